"""What is said of a job, and what to do next: from plain values."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from controller.client import calls as api
from launcher.commands.status import advice, exit_code, find_status, lines, why_lines
from launcher.errors import LaunchError
from launcher.job.remote import RemoteJob
from launcher.plan.checkpoints import Checkpoint, newest_checkpoint
from launcher.plan.rundir import RunDir
from schema.wire import event_file
from schema.wire.messages import Event, EventKind
from tests.launcher.samples import job_status
from tests.schema.wire.test_event_file import rewind, step, validation

DIR = "/runs/mine"
PROCESS = {"role": "rollout", "state": "up", "restarts": 4, "in_a_row": 1, "limit": 3}
END = {
    "at": 1000.0, "process": "rollout-0", "code": 137, "what": "killed by SIGKILL", "log": "r.log",
    "lines": ["x", "y"],
}  # fmt: skip


def found(state: str, **changes: Any) -> dict[str, Any]:
    launcher = {"pid": 7, "stage": "preparing data", "seen_at": 2000.0}
    launcher |= {"processes": {"rollout-0": PROCESS}, "ends": [END]}
    fields = dict.fromkeys(
        ("checkpoint", "summary", "status", "ledger", "replicas", "autoscale", "error", "url", "next", "history")
    )
    fields |= {"state": state, "run_dir": DIR, "launcher": launcher, "leaving": ["workers"], "alive": False}
    fields |= {"evaluates": False, "embeds_redis": True}
    return {**fields, **changes}


@pytest.mark.parametrize(
    ("state", "code"),
    [("running", 0), ("starting", 0), ("waiting", 0), ("unreachable", 0), ("ending", 0), ("finished", 0),
     ("stopped", 0), ("failed", 1), ("killed", 1), ("leaving", 1)],
)  # fmt: skip
def test_exit_codes(state: str, code: int):
    assert exit_code(found(state)) == code


@pytest.mark.parametrize(
    ("state", "words"),
    [("starting", f"{DIR}/logs"), ("unreachable", "controller.log"), ("waiting", "until its reason is over"),
     ("ending", "--now"),
     ("leaving", f"stop {DIR} --now"),
     ("killed", f"cosmos-launch --resume {DIR}"), ("stopped", f"cosmos-launch --resume {DIR}"),
     ("failed", "fix what"), ("finished", "nothing")],
)  # fmt: skip
def test_every_state_says_what_to_do(state: str, words: str):
    assert words in advice(found(state))


def test_a_run_without_a_prompt_left_is_not_said_to_go_on():
    summary = {"outcome": "failed", "ledger": {"created": 24, "states": {"dropped": 24}}}
    assert "a run of its own" in advice(found("failed", summary=summary))


def test_an_evaluation_is_not_said_to_go_on():
    for state in ("killed", "stopped", "failed"):
        assert "--resume" not in advice(found(state, evaluates=True))
    assert lines(found("starting", evaluates=True))[0] == f"{DIR} scores answers"


def test_a_launcher_that_ends_the_job_is_not_said_to_start_it(tmp_path: Path):
    """Its controller never came up: nothing but the launcher itself knows of the end."""
    run = RunDir(tmp_path)
    run.make()
    run.lock()
    try:
        run.launcher_json.write_text(json.dumps({"pid": os.getpid() + 1, "ending": "stopped"}))
        assert find_status(RemoteJob(run))["state"] == "starting", "that file is of an earlier start"
        run.launcher_json.write_text(json.dumps({"pid": os.getpid(), "ending": "failed: no controller"}))
        now = find_status(RemoteJob(run))
        with pytest.raises(LaunchError, match="is ending: failed: no controller"):
            RemoteJob(run).ask(api.job())
    finally:
        run.unlock()
    assert (now["state"], now["alive"]) == ("ending", True)
    assert lines(now)[0] == f"{tmp_path} is ending: failed: no controller"
    assert find_status(RemoteJob(run))["state"] == "killed"


def test_it_says_from_where_a_run_goes_on():
    checkpoint = {"path": "c/step-00000012", "step": 12}
    assert advice(found("stopped", checkpoint=checkpoint)).endswith("goes on from the checkpoint of step 12")
    assert "without a checkpoint" in advice(found("stopped", status={"step": 5}))


def test_a_budget_that_is_nearly_used_up_is_a_warning():
    running = found("running", status={"phase": "training"})
    assert advice(running) == ""
    running["launcher"]["processes"]["rollout-0"] = {**PROCESS, "in_a_row": 3}
    assert "rollout-0 (3 of 3)" in advice(running)
    assert "cosmos-launch resume" in advice(found("running", status={"phase": "paused"}))


@pytest.mark.parametrize(
    ("embeds", "redis", "says"),
    [(True, "hung", "the launcher restarts Redis"), (False, "hung", "server of redis.url (hung"),
     (False, "away", "server of redis.url (cannot be reached")],
)  # fmt: skip
@pytest.mark.parametrize("state", ["running", "waiting", "unreachable"])
def test_a_redis_that_does_not_answer_is_the_reason(state: str, embeds: bool, redis: str, says: str):
    now = found(state, embeds_redis=embeds, alive=True, error="Redis does not take writes: Timeout")
    now["launcher"] |= {"redis": redis}
    text = "\n".join(lines({**now, "next": advice(now)}))
    assert f"redis: {redis.replace('away', 'cannot be reached')}" in text
    assert says in text
    assert "restarts the controller" not in text
    assert ("does not answer" in lines(now)[0]) == (state == "unreachable")


def test_the_dead_are_named_with_their_last_words():
    text = "\n".join(lines(found("unreachable", alive=True, error="no answer"), now=1060.0))
    assert "(1m00s ago) rollout-0: killed by SIGKILL; its log: r.log" in text
    assert "│ y" in text
    assert "restarts: rollout-0 4 (1 of 3 in a row)" in text
    assert "controller: no answer" in text
    assert "alive until" in lines(found("killed"))[0]


def test_the_newest_checkpoint_is_the_one_that_latest_names(tmp_path: Path):
    assert newest_checkpoint(tmp_path) is None
    for name in ("step-00000004", "step-00000008", ".step-00000012.beside", "step-x"):
        (tmp_path / name).mkdir()
    assert newest_checkpoint(tmp_path) == Checkpoint(tmp_path / "step-00000008", 8)
    (tmp_path / "latest").write_text("step-00000004\n")
    assert newest_checkpoint(tmp_path) == Checkpoint(tmp_path / "step-00000004", 4), "training went back to it"
    (tmp_path / "latest").write_text("step-00000099")
    assert newest_checkpoint(tmp_path) == Checkpoint(tmp_path / "step-00000008", 8)


def test_the_weights_have_a_line():
    weights = {
        "version": 12, "publication": 13, "kind": "delta", "n_bytes": 3 * 2**20, "ratio": 0.0123, "density": 0.009,
        "updated": 1, "pause_s": 0.0042, "unreadable": 0,
    }  # fmt: skip
    ledger = {"bound": 4, "states": {}, "dropped": {}}
    status = job_status(weights=weights).model_dump(mode="json")
    running = found("running", status=status, ledger=ledger, replicas=[])
    text = "  weights: version 12, delta, 3 MiB, 1.23% of a full one, 0.90% of the elements changed; "
    assert f"{text}in use by 1 of 2 replicas, pause 4 ms" in lines(running)
    weights |= {"ratio": None, "density": None, "pause_s": None, "kind": "full", "unreadable": 2}
    running["status"] = job_status(weights=weights).model_dump(mode="json")
    plain = "  weights: version 12, full, 3 MiB; in use by 1 of 2 replicas; unreadable 2 times"
    assert plain in lines(running)


def test_why_tells_what_is_waited_for_what_fails_and_what_came_last(tmp_path: Path) -> None:
    rewards = {
        "scored": 5, "failed": {"ValueError in reward function f": 2}, "timeouts": 0, "seconds_mean": 0.1,
        "retried": 3, "attempt_seconds_mean": 1.3,
        "scoring": 1, "oldest_s": 4.0, "wait_seconds": 0.0, "wait_fraction": None,
    }  # fmt: skip
    status = job_status().model_dump(mode="json") | {
        "sentence": "step 3 waits for 2 more groups", "sentence_since": 990.0, "updated_at": 1000.0,
        "rewards": rewards,
        "alarms": [{"name": "cut_off", "text": "answers are cut off"}], "advice": ["one more rollout replica"],
    }  # fmt: skip
    plain = found("running", status=status, ledger={"bound": 4, "states": {}, "dropped": {}}, replicas=[])
    assert "  rewards: 5 scored, 1.30 s each; 2 failed (ValueError" in "\n".join(lines(plain))
    assert "; 3 times scored again; 1 in the pool" in "\n".join(lines(plain))
    replica = {"name": "rollout-0", "state": "live", "status": "loading\x1b[31m"}
    death = Event(id=1, at=1000.0, kind=EventKind.REPLICA, text="rollout-0.1 is lost")
    event_file.append(
        event_file.path_of(tmp_path), [death, death.model_copy(update={"id": 2, "kind": EventKind.STEP})]
    )
    text = "\n".join(why_lines(found("running", status=status, replicas=[replica], run_dir=str(tmp_path))))
    for words in (
        "why: step 3 waits for 2 more groups (for 10s)", "rollout-0: live, loading", "failed 2 times: ValueError",
        "alarm: answers are cut off", "would help: one more rollout replica",
    ):  # fmt: skip
        assert words in text
    assert text.count("rollout-0.1 is lost") == 1
    assert "\x1b" not in text


def test_a_killed_run_shows_what_its_events_say(tmp_path: Path) -> None:
    def event(id_: int, kind: EventKind, text: str, **data: Any) -> Event:
        return Event(id=id_, at=1000.0, kind=kind, text=text, data=data)

    steps = [step(id_, id_ - 1, reward_mean=0.25 * id_) for id_ in range(1, 5)]
    events = [
        *steps,
        rewind(5, 3),
        validation(6, 3),
        event(7, EventKind.JOB, "the job is training", phase="training", note="", error=None),
        event(8, EventKind.ALARM, "answers are cut off", name="cut_off", on=True, step=3),
        event(9, EventKind.ALARM, "rewards are all alike", name="alike", on=True, step=3),
        event(10, EventKind.ALARM, "over: rewards are all alike", name="alike", on=False, step=3),
        event(11, EventKind.REWARD, "a reward failed", failure="ValueError in reward function f"),
        event(12, EventKind.DROP, "dropped", reason="reward_error", count=7),
        event(13, EventKind.DROP, "of another version"),
    ]
    event_file.append(event_file.path_of(tmp_path), events)
    run = RunDir(tmp_path)
    run.make()
    now = find_status(RemoteJob(run))
    assert now["state"] == "killed"
    text = "\n".join(lines(now) + why_lines(now))
    for words in (
        "  steps: 3, the last at ", "reward: 0.250 → 0.750", "held-out: 0.500 (version 3", "trained again",
        "why: killed; the last word of its job: the job is training",
        "  failed: ValueError in reward function f\n", "  failed: dropped: reward_error (7 times)",
        "  alarm: answers are cut off",
    ):  # fmt: skip
        assert words in text, text
    assert "alarm: rewards" not in text
    assert json.loads(json.dumps(now))["history"]["steps"][-1]["step"] == 2
