"""The state of a job, whatever of it is still alive: what `cosmos-launch status` shows, and what to do next.

state        the launcher   the controller   the run
running      alive          answers
starting     alive          not there yet
waiting      alive          "not now"        Redis does not take writes, or another controller is in charge
unreachable  alive          no answer        the launcher restarts it
ending       alive                           it has finished, was stopped or has failed; its processes are leaving
leaving      gone                            its processes are still ending
killed       gone                            left no summary
finished, stopped, failed                    as its summary says
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from launcher.errors import LaunchError, NotServingError
from launcher.job.remote import HOW_TO_GET_IN, RemoteJob
from launcher.plan.checkpoints import newest_checkpoint
from launcher.plan.rundir import RunDir
from launcher.restarts import EXIT_FAILED, EXIT_OK
from schema.util.text import one_line

if TYPE_CHECKING:
    from schema.wire.messages import WeightsStatus

ALIVE = frozenset({"running", "starting", "waiting", "unreachable", "ending"})
LAST_EVENTS = 8
MOST_REPLICAS = 16
LONG_AGO = 15.0
"""Seconds of silence that are worth a word."""
ENDED = frozenset({"finished", "stopped", "failed", "killed"})
"""States in which nothing will change by itself."""
BAD = frozenset({"failed", "killed", "leaving"})


def find_status(target: RemoteJob) -> dict[str, Any]:
    """Everything that is known, as JSON-compatible values. Raises LaunchError if nothing can be found out."""
    facts: dict[str, Any] = dict.fromkeys(
        ("launcher", "checkpoint", "summary", "status", "ledger", "replicas", "autoscale", "error", "history")
    )
    facts |= {"run_dir": None, "url": target.address() or None, "leaving": []}
    facts |= {"evaluates": False, "embeds_redis": False}
    if target.run is None:
        facts |= _ask(target)
        phase = facts["status"]["phase"]
        facts["state"] = phase if phase in ENDED else "running"
    else:
        facts |= _local(target, target.run)
        if facts["status"] is None:
            facts["history"] = _history(target.run)
    facts["alive"] = facts["state"] in ALIVE
    facts["next"] = advice(facts)
    return facts


def exit_code(facts: Mapping[str, Any]) -> int:
    """0: it runs, or ended as it was asked to; 1: it failed or was killed."""
    return EXIT_FAILED if facts["state"] in BAD else EXIT_OK


def _ask(target: RemoteJob) -> dict[str, Any]:
    from controller.client import calls as api

    return {
        "status": target.ask(api.job()).model_dump(mode="json"),
        "ledger": target.ask(api.ledger()).model_dump(mode="json"),
        "replicas": [replica.model_dump(mode="json") for replica in target.ask(api.replicas())],
        "autoscale": target.ask(api.autoscale()).model_dump(mode="json"),
    }


def _local(target: RemoteJob, run: RunDir) -> dict[str, Any]:
    checkpoint, config = newest_checkpoint(run.checkpoints), run.written_config() or {}
    answers = (config.get("evaluation") or {}).get("dataset") or {}
    facts: dict[str, Any] = {
        "run_dir": str(run.path),
        "launcher": run.launcher() or None,
        "evaluates": any(answers.get(name) for name in ("name", "files", "custom_class", "part")),
        "embeds_redis": not (config.get("redis") or {}).get("url"),
        "checkpoint": {"path": str(checkpoint.path), "step": checkpoint.step} if checkpoint else None,
    }
    if run.is_alive():
        seen = _alive(target, bool((facts["launcher"] or {}).get("ending")))
        if run.is_alive():  # else it has ended meanwhile
            return {**facts, **seen}
    if leaving := run.leaving():
        return {**facts, "state": "leaving", "leaving": leaving}
    summary = run.summary()
    if summary is None:
        return {**facts, "state": "killed"}
    return {**facts, "state": summary["outcome"], "summary": summary, "status": summary.get("status")}


def _history(run: RunDir) -> dict[str, Any]:
    """Read the events of a run that no controller can be asked about; empty where they cannot be read.

    steps and validations are those that count, as in a summary; job is the last word about it.
    """
    from schema.wire import event_file

    course, health = event_file.Course(), event_file.Health()
    try:
        event_file.fold(event_file.read(event_file.path_of(run.path)), course, health)
    except OSError:
        return {}
    return {
        "steps": [record.model_dump(mode="json") for record in course.steps],
        "validations": [record.model_dump(mode="json") for record in course.validations],
        "job": health.job,
        "alarms": health.alarms,
        "faults": [fault.model_dump(mode="json") for fault in health.faults.values()],
    }


def _alive(target: RemoteJob, ending: bool) -> dict[str, Any]:
    """Return the state of a run with a launcher. The controller of one that ends may be gone, and is not needed."""
    if not target.address():
        return {"state": "ending" if ending else "starting"}
    try:
        answer = _ask(target)
    except LaunchError as error:
        if ending:
            return {"state": "ending"}
        if error.hint.startswith(HOW_TO_GET_IN):
            raise
        state = "waiting" if isinstance(error, NotServingError) else "unreachable"
        return {"state": state, "error": error.message}
    return {**answer, "state": "ending" if ending else "running"}


_PATIENCE = {
    "starting": "wait; its logs are in {where}/logs",
    "waiting": "wait until its reason is over; see {where}/logs/controller.log",
    "unreachable": (
        "wait: the launcher restarts the controller, the others keep trying; see {where}/logs/controller.log"
    ),
    "ending": "wait until its processes have left, or `cosmos-launch stop {where} --now`",
    "leaving": "wait until they have left, or `cosmos-launch stop {where} --now`; then --resume goes on",
}
"""By state, where there is nothing to do but wait."""


def advice(facts: Mapping[str, Any]) -> str:
    """Say what the user should do next; empty where nothing is to be done."""
    state, where = facts["state"], facts["run_dir"]
    if state in ("running", "waiting", "unreachable") and (redis := _redis(facts)):
        if facts["embeds_redis"]:
            return f"wait: the launcher restarts Redis if it does not answer for a minute; see {where}/logs/redis.log"
        return f"bring back the server of redis.url ({redis}); the job waits for it, nothing is lost"
    if state == "running":
        return _while_running(facts)
    if state in _PATIENCE:
        return _PATIENCE[state].format(where=where)
    if state == "finished":
        model = (facts["summary"] or {}).get("final_model")
        return f"nothing: the trained model is in {model}" if model else "nothing: it has reached its end"
    if facts["evaluates"]:
        return f"its logs are in {where}/logs; an evaluation is not resumed, but run again"
    resume = f"`cosmos-launch --resume {where}` goes on{_from_where(facts)}" if where else "start it again"
    if state != "failed":
        return resume
    from launcher.display.summary import ALL_DROPPED, out_of_data

    if facts["summary"] and out_of_data(facts["summary"]):
        return ALL_DROPPED
    return f"fix what the reason names (the logs are in {facts['run_dir']}/logs), then {resume}"


def _redis(facts: Mapping[str, Any]) -> str:
    """Say what is wrong with Redis, by the launcher's last look at it."""
    from launcher.display.view import REDIS

    return REDIS.get((facts["launcher"] or {}).get("redis", ""), "")


def _while_running(facts: Mapping[str, Any]) -> str:
    where = facts["run_dir"] or facts["url"]
    if facts["status"]["phase"] == "paused":
        return f"`cosmos-launch resume {where}` lets it go on"
    weak = [
        f"{name} ({process['in_a_row']} of {process['limit']})"
        for name, process in ((facts["launcher"] or {}).get("processes") or {}).items()
        if process["in_a_row"] and process["in_a_row"] >= process["limit"]
    ]
    if weak:
        return f"look why {', '.join(weak)} keeps ending: one more time ends the job (launcher.max_restarts)"
    return ""


def _from_where(facts: Mapping[str, Any]) -> str:
    if facts["checkpoint"] is None:
        return " (without a checkpoint: steps that were trained must be trained again)" if _steps(facts) else ""
    return f" from the checkpoint of step {facts['checkpoint']['step']}"


def _steps(facts: Mapping[str, Any]) -> int:
    if facts["status"] is not None:
        return int(facts["status"].get("step", 0))
    steps = (facts["history"] or {}).get("steps")
    return int(steps[-1]["step"]) + 1 if steps else 0


def lines(facts: Mapping[str, Any], now: float | None = None) -> list[str]:
    """The status as text. `now`: Unix time, for "… ago"."""
    now = time.time() if now is None else now
    text = [_title(facts)]
    if facts["summary"] is not None:
        from launcher.display.summary import rows

        text += [f"  {name}: {value}" for name, value in rows(facts["summary"])]
    elif facts["status"] is not None:
        text += _job_lines(facts)
    elif facts["history"]:
        from launcher.display.summary import learning

        steps, validations = facts["history"]["steps"], facts["history"]["validations"]
        text += [f"  steps: {_steps(facts)}, the last at {_clock(steps[-1]['at'])}"] if steps else []
        text += [f"  {name}: {value}" for name, value in learning(steps, validations)]
    text += _process_lines(facts, now)
    if facts["alive"] and (redis := _redis(facts)):
        text.append(f"  redis: {redis}")
    if facts["checkpoint"] is not None:
        text.append(f"  checkpoint: step {facts['checkpoint']['step']} in {facts['checkpoint']['path']}")
    if facts["error"]:
        text.append(f"  controller: {facts['error']}")
    if facts["next"]:
        text.append(f"next: {facts['next']}")
    return [one_line(line) for line in text]


def _title(facts: Mapping[str, Any]) -> str:
    launcher = facts["launcher"] or {}
    where, pid = facts["run_dir"] or facts["url"], launcher.get("pid")
    match facts["state"]:
        case "running" if facts["run_dir"]:
            return f"{where} runs (pid {pid}), its controller at {facts['url']}"
        case "running":
            return f"{facts['status']['name']} ({facts['status']['job_id']}) at {where}"
        case "starting" if facts["evaluates"]:
            return f"{where} scores answers"
        case "starting":
            return f"{where} is starting: {launcher.get('stage', 'the launcher has begun')}"
        case "waiting":
            return f"{where} runs (pid {pid}), but its controller cannot serve now"
        case "unreachable":
            return f"{where} runs (pid {pid}), but its controller does not answer"
        case "ending":
            return f"{where} is ending: {launcher['ending']}"
        case "leaving":
            return f"{where}: the launcher is gone, its processes are leaving ({', '.join(facts['leaving'])})"
        case "killed":
            seen = launcher.get("seen_at")
            when = f", alive until {_clock(seen)}" if seen else ""
            return f"{where} was killed: it is not running and left no summary{when}"
        case _:
            return f"{where} has ended"


def _job_lines(facts: Mapping[str, Any]) -> list[str]:
    from launcher.display.summary import source_lines
    from launcher.display.view import View, line, rewards_text
    from schema.wire.messages import JobStatus

    status, ledger = JobStatus.model_validate(facts["status"]), facts["ledger"]
    grpo = status.mode == "grpo"
    text = ["  " + line(View(status=status, bound=ledger["bound"] if grpo else None))]
    if grpo:
        states = ", ".join(f"{name} {count}" for name, count in ledger["states"].items() if count)
        text.append(f"  groups: {states or 'none yet'}")
    if rewards := rewards_text(status):
        text.append(f"  rewards: {rewards}")
    if ledger["dropped"]:
        text.append("  dropped: " + ", ".join(f"{why} {n}" for why, n in ledger["dropped"].items()))
    text += [f"  trained of {source}" for source in source_lines(ledger)]
    if status.weights is not None:
        text.append(f"  weights: {_weights(status.weights, status.replicas.get('rollout', 0))}")
    gone = 0
    if (scale := facts["autoscale"]) is not None and scale["enabled"]:
        present = f"{scale['replicas']} of {scale['desired']} rollout replicas"
        text.append(f"  {present} (autoscale: {scale['reason']})")
    for replica in facts["replicas"]:
        if replica["state"] == "left":
            gone += 1
            continue
        text.append(f"  {_replica(replica)}")
    return [*text, f"  left in order: {gone}"] if gone else text


def why_lines(facts: Mapping[str, Any]) -> list[str]:
    """Say what a job waits for, what fails, and what would help; of a dead one, how it died and what came last."""
    from launcher.display.view import View, sentence
    from schema.wire.messages import JobStatus

    text = []
    if facts["status"] is not None:
        status = JobStatus.model_validate(facts["status"])
        text.append("why: " + (sentence(View(status=status)) or "nothing is known"))
        text += [
            f"  {r['name']}: {r['state']}, {r['status'] or 'no word'}"
            for r in (facts["replicas"] or [])[:MOST_REPLICAS]
        ]
        if status.rewards is not None:
            text += [f"  reward failed {count} times: {kind}" for kind, count in status.rewards.failed.items()]
        text += [f"  alarm: {alarm.text}" for alarm in status.alarms]
        text += [f"  would help: {advice}" for advice in status.advice]
    elif history := facts["history"]:
        word = history["job"].get("text", "none")
        text.append(f"why: {facts['state']}; the last word of its job: {word}")
        text += [
            f"  failed: {fault['kind']}" + (f" ({fault['count']} times)" if fault["count"] > 1 else "")
            for fault in history["faults"]
        ]
        text += [f"  alarm: {alarm}" for alarm in history["alarms"].values()]
    if facts["run_dir"] is not None:
        text += _last_events(facts["run_dir"])
    return [one_line(line) for line in text]


def _last_events(run_dir: str) -> list[str]:
    """The newest events of a run that are no steps."""
    from collections import deque
    from pathlib import Path

    from schema.wire import event_file
    from schema.wire.messages import EventKind

    shown = deque(
        (
            event
            for event in event_file.read(event_file.path_of(Path(run_dir)))
            if event.kind not in (EventKind.STEP, EventKind.PUBLICATION)
        ),
        maxlen=LAST_EVENTS,
    )
    return [f"  {_clock(event.at)} {event.text}" for event in shown]


def _replica(replica: Mapping[str, Any]) -> str:
    """A replica in words: what it does, how fast, how busy."""
    gauges = replica["gauges"]
    place = f"{replica['host']}, pid {replica['pid']}" if replica["host"] else f"pid {replica['pid']}"
    parts = [f"{replica['name']} ({place}): {replica['state']}"]
    parts += [replica["status"]] if replica["status"] else []
    if replica["role"] == "rollout":
        parts += [f"version {replica['version']}", f"{replica['leases']} groups under lease"]
        parts += [f"{gauges['tokens_per_s']:.0f} tokens/s"] if "tokens_per_s" in gauges else []
        parts += [f"{gauges['scoring']:.0f} samples being scored"] if gauges.get("scoring") else []
    if "idle_fraction" in gauges:
        parts.append(f"idle {gauges['idle_fraction']:.0%}")
    if replica["state"] != "live" or replica["last_seen_s"] >= LONG_AGO:
        parts.append(f"last seen {replica['last_seen_s']:.0f} s ago")
    return ", ".join(parts)


def _weights(weights: WeightsStatus, rollouts: int) -> str:
    """The newest version, what it cost, and who has it."""
    from launcher.preflight.memory import size_text

    cost = [size_text(weights.n_bytes)]
    if weights.ratio is not None:
        cost.append(f"{weights.ratio:.2%} of a full one")
    if weights.density is not None:
        cost.append(f"{weights.density:.2%} of the elements changed")
    text = f"version {weights.version}, {weights.kind}, {', '.join(cost)}; "
    text += f"in use by {weights.updated} of {rollouts} replicas"
    if weights.pause_s is not None:
        text += f", pause {weights.pause_s * 1000:.0f} ms"
    return text + (f"; unreadable {weights.unreadable} times" if weights.unreadable else "")


def _process_lines(facts: Mapping[str, Any], now: float) -> list[str]:
    """List the processes that died, when and why, and how often each was restarted."""
    from launcher.display.view import duration

    launcher = facts["launcher"] or {}
    text = []
    restarts = [
        f"{name} {process['restarts']} ({process['in_a_row']} of {process['limit']} in a row)"
        for name, process in (launcher.get("processes") or {}).items()
        if process["restarts"]
    ]
    if restarts and facts["summary"] is None:
        text.append(f"  restarts: {', '.join(restarts)}")
    deaths = [end for end in launcher.get("ends") or [] if end["code"]]  # the others left in order
    for end in deaths[-3:]:
        ago = f" ({duration(now - end['at'])} ago)" if facts["alive"] else ""
        text.append(f"  died: {_clock(end['at'])}{ago} {end['process']}: {end['what']}; its log: {end['log']}")
        text += [f"    │ {line}" for line in end["lines"][-1:]]
    return text


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
