"""A signal to every kind of process of a real job, keepers included: nothing is lost and nothing is left.

The short form of `python -m tests.chaos.signals`, which tries every signal, and of `python -m tests.chaos`, which
says what is looked at afterwards (`tests.chaos.judge`, `tests.chaos.traces`). And what no restart mends: rewards that
fail, a prompt that kills whoever takes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from controller.client import Call, Client
from tests.chaos.plan import JobPlan, Strike
from tests.chaos.servers import ObjectStore
from tests.chaos.setting import Setting
from tests.chaos.signals import SignalJob, rows, strike
from tests.e2e.program import Program, check_ledger, command, write_config

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

REWARDS = """
import os
import pathlib
import signal
import time

def once(marker, kind):
    path = pathlib.Path(marker + kind)
    first = not path.exists()
    path.touch()
    return first

def moody(completion, row, marker):
    kind = row["answer"]
    if kind == "raises":
        raise KeyError("never a reward for this")
    if kind == "kills":
        os.kill(os.getppid(), signal.SIGSEGV)
        time.sleep(60)
    if kind == "hangs" and once(marker, kind):
        time.sleep(3600)
    if kind == "exits" and once(marker, kind):
        os._exit(7)
    return len(completion) / 10
"""


CHOSEN = {
    "data": "SIGKILL",
    "keeper of data": "SIGHUP",
    "controller": "SIGHUP",
    "keeper of controller": "SIGSTOP",
    "redis": "SIGKILL",
    "keeper of redis": "SIGTERM",
    "rollout": "SIGHUP",
    "keeper of rollout": "SIGKILL",
    "reward": "SIGTERM",
    "trackers": "SIGKILL",
    "keeper of trackers": "SIGINT",
    "policy": "SIGKILL",
    "keeper of policy": "SIGINT",
    "launcher": "SIGKILL",
}
"""One signal for each process of a job with the embedded engine and trainers of one rank."""


def test_whoever_gets_a_signal_nothing_is_lost(tmp_path: Path, model: Path) -> None:
    known = {(row.process, row.number.name): row for row in rows()}
    chosen = [known[pair] for pair in CHOSEN.items()]
    assert {row.process for row in known.values()} - {"other rank", "keeper of other rank", "engine"} == CHOSEN.keys()
    signals = [strike(row, "start" if row.process.endswith("data") else "progress") for row in chosen]
    plan = JobPlan(1, 1, (*signals, Strike("store", "progress", 0.0, 0.0, 1.0)), policies=2)
    setting = Setting(rows=200, epochs=1, save_freq=4)
    with ObjectStore() as store:
        job = SignalJob(plan, setting, tmp_path / "job", model, lambda kill: None, len(plan.strikes), store=store)
        verdict = job.run()
    assert verdict.violations == [], (tmp_path / "job" / "launcher.log").read_text()[-5000:]
    assert job.tried == chosen
    assert len(verdict.kills) == len(plan.strikes), "the job is long enough to be hit"
    assert verdict.dropped == 0
    logs = [path.read_text() for path in (tmp_path / "job").glob("**/logs/rollout-*.log")]
    assert logs
    assert not any("waiting for the name" in log for log in logs), "successors have their places at once"


def moody_job(folder: Path, model: Path, kinds: list[str], rows: int) -> Path:
    """A job whose first prompts are of these kinds, in their order."""
    (folder / "rewards.py").write_text(REWARDS)
    answers = [*kinds, *["plain"] * (rows - len(kinds))]
    data = [{"prompt": f"{i} + {i} = ?", "answer": answer} for i, answer in enumerate(answers)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, data)))
    config = write_config(folder, model, steps=1000, validation=False)
    text = config.read_text()
    for old, new in {
        '"synthetic:addition"\noptions = { n = 200, digits = 2, phrasings = 1 }': f'"{folder}/rows.jsonl"',
        "{ boxed_math = 1.0, format = 0.2 }": f'{{ "{folder}/rewards.py:moody" = 1.0 }}\ndataloader_shuffle = false',
        "[controller]\n": f'[reward]\ntimeout = 5.0\nretries = 0\n[custom]\nmarker = "{folder}/"\n\n'
        f"[controller]\nmax_attempts = 2\n",
        "[launcher]\n": "[launcher]\nmax_restarts = 20\n",
    }.items():
        assert old in text
        text = text.replace(old, new, 1)
    config.write_text(text)
    return config


def dropped_groups(client: Client) -> list[dict[str, Any]]:
    call: Call[list[dict[str, Any]]] = Call(
        "GET", "/v1/groups", lambda answer: json.loads(answer.body), params={"state": "dropped"}
    )
    return client.send(call)


def test_failing_rewards_are_tried_again_and_poison_is_dropped_with_its_cause(tmp_path: Path, model: Path) -> None:
    # By the bound the first prompts have their end, or their step waits for them, before the last kind is leased.
    kinds = ["hangs", "plain", "exits", "raises", *["plain"] * 36, "kills"]
    config = moody_job(tmp_path, model, kinds, 60)
    with Program(config) as program:

        def both(client: Client) -> list[dict[str, Any]] | None:
            found = dropped_groups(client)
            return found if len(found) == 2 else None

        raises, kills = program.until("the drop of two groups", both)
        summary = program.finish()
    assert (raises["id"], raises["reason"]) == ("e0-p3", "reward_error")
    assert "KeyError: 'never a reward for this'" in raises["error"]
    assert "rewards.py" in raises["error"], "the traceback says where"
    assert (kills["id"], kills["reason"]) == ("e0-p40", "poison")
    assert "crashed" in kills["error"]
    ledger = check_ledger(summary, 2, trained=58)
    assert ledger.dropped == {"reward_error": 1, "poison": 1}
    assert sum(ledger.staleness.values()) == 58 * 4, "what hung or died once has its reward in the end"
    shown = command("samples", program.run_dir, "--errors", "-n", "99", "--json").stdout
    counted = summary["status"]["rewards"]
    for kind in ("RewardTimeout", "RewardCrash", "KeyError"):
        assert kind in str(counted["failed"]), "on the screens, by kind"
        assert any(kind in sample["error"] for sample in json.loads(shown)), "and as samples"
        assert kind in program.output(), "and when it first happened"
    assert counted["timeouts"] >= 1
