"""The reward pool against real processes: deadlines, crashes, replacements, what a process may know."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from rollout_worker.rewards import protocol
from rollout_worker.rewards.pool import PoolStats, RewardPool, RewardPoolError, RewardResult, Task
from rollout_worker.rewards.registry import RewardConfigError
from schema.config import RewardConfig
from schema.util import memory_kills
from schema.util.memory_kills import BY_OTHERS
from tests.schema.util.test_memory_kills import counted
from tests.support.waiting import PATIENCE, until

T = TypeVar("T")

USER = """
import json, os, pathlib, re, signal, subprocess, sys, time

class Unsaid(Exception):
    def __str__(self):
        return 1 / 0

def word(completion, row, slow=0.0):
    if completion == "hang":
        child = subprocess.Popen(["sleep", "3600"])
        pathlib.Path(__file__).with_name("child").write_text(str(child.pid))
        child.wait()
    if completion == "stuck":
        re.match(r"(a+)+$", "a" * 64 + "b")
    if completion == "die":
        print("last words")
        os.kill(os.getpid(), signal.SIGKILL)
    if completion == "unsaid":
        raise Unsaid
    if completion == "exit":
        sys.exit(3)
    if completion == "input":
        input()
    if completion == "print":
        print("not a message")
    if completion == "raise":
        raise KeyError("no such word")
    if completion == "refused":
        raise ConnectionRefusedError(111, "x" * 3000)
    if completion == "nan":
        return float("nan")
    if completion == "inf":
        return float("-inf")
    if completion == "text":
        return "1.0"
    if completion == "none":
        return None
    if completion == "bool":
        return True
    return float(len(completion))

def environment(completion, row):
    with open(row["file"], "w") as file:
        json.dump(dict(os.environ), file)
    return 0.0
"""


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, PATIENCE))


@pytest.fixture
def word(tmp_path: Path) -> str:
    path = tmp_path / "user.py"
    path.write_text(USER)
    return f"{path}:word"


async def score(pool: RewardPool, name: str, texts: list[str]) -> list[RewardResult]:
    return await asyncio.gather(*(pool.submit(Task(text, {"answer": "1"}, (name,))) for text in texts))


def pool_of(*functions: str, **settings: Any) -> RewardPool:
    return RewardPool(
        functions, {}, RewardConfig(**{"timeout": PATIENCE, "num_workers": 1, "retries": 0, **settings})
    )


@asynccontextmanager
async def running(*functions: str, **settings: Any) -> AsyncIterator[RewardPool]:
    pool = pool_of(*functions, **settings)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


async def with_pool(name: str, texts: list[str], timeout: float = PATIENCE, processes: int = 1) -> list[RewardResult]:
    async with running(name, timeout=timeout, num_workers=processes) as pool:
        return await score(pool, name, texts)


def test_every_sample_gets_its_own_rewards_and_closing_leaves_no_process(word: str) -> None:
    texts = ["x" * i for i in range(1, 200)]
    results = run(with_pool(word, texts, processes=2))
    assert [result.rewards[word] for result in results] == [float(len(text)) for text in texts]
    assert not any(result.error for result in results)
    assert run(with_pool(word, [], processes=2)) == []
    until(lambda: not _children(), "the end of all reward processes")


FAULTS = {
    "raise": "KeyError: 'no such word'",
    "refused": "ConnectionRefusedError: ",
    "input": "EOFError",
    "nan": "RewardNotANumber",
    "inf": "RewardNotANumber",
    "text": "RewardNotANumber",
    "none": "RewardNotANumber",
    "die": "RewardCrash: the reward process died (signal 9)\nin reward function {word}\nlast words",
    "exit": "RewardCrash: the reward process died (exit code 3)\nin reward function {word}",
    "unsaid": "Unsaid: (its message cannot be had: ZeroDivisionError)\nin reward function {word}",
}


def test_failing_samples_are_errors_by_name_and_their_neighbours_are_scored(word: str) -> None:
    texts = ["one", *(text for fault in FAULTS for text in (fault, "seven")), "print", "bool"]
    results = run(with_pool(word, texts))
    for text, result in zip(texts, results, strict=True):
        if text in FAULTS:
            assert result.rewards == {}
            assert (result.error or "").startswith(FAULTS[text].format(word=word))
            assert result.outage == (text == "refused")
        else:
            assert result == RewardResult({word: 1.0 if text == "bool" else float(len(text))})
    located = results[texts.index("raise")].error or ""
    assert 'raise KeyError("no such word")' in located
    assert "user.py" in located
    assert "registry.py" not in located


def test_a_missed_deadline_is_charged_to_the_sample_that_missed_it(word: str) -> None:
    """`stuck` never gives up the interpreter lock: only killing the process helps. The child of `hang` dies, too."""
    results = run(with_pool(word, ["one", "hang", "three", "stuck", "fours"], timeout=5.0))
    late = RewardResult({}, f"RewardTimeout: the sample took longer than 5 s\nin reward function {word}", outage=True)
    assert all((result.seconds >= 5.0) == bool(result.error) for result in results)
    assert results == [RewardResult({word: 3.0}), late, RewardResult({word: 5.0}), late, RewardResult({word: 5.0})]
    child = int(Path(word.rpartition(":")[0]).with_name("child").read_text())
    until(lambda: not _runs(child), "the end of what a function has started")


@pytest.mark.parametrize("kills", [1, 3])
def test_a_process_that_is_killed_while_it_starts_is_no_fault_of_the_functions(tmp_path: Path, kills: int) -> None:
    path = tmp_path / "user.py"
    begin = f"""
import os, pathlib, signal
seen = pathlib.Path({str(tmp_path)!r}) / str(len(list(pathlib.Path({str(tmp_path)!r}).glob("[0-9]"))))
if int(seen.name) < {kills}:
    seen.touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    path.write_text(begin + USER)
    if kills < 3:
        (result,) = run(with_pool(f"{path}:word", ["one"]))
        assert result.rewards == {f"{path}:word": 3.0}
    else:
        with pytest.raises(RewardPoolError, match="signal 9"):
            run(with_pool(f"{path}:word", ["one"]))


def test_a_killed_process_is_replaced_and_the_cause_named(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_kills, "ROOT", tmp_path)
    counted(tmp_path, kills=0)

    async def work() -> list[RewardResult]:
        async with running(word) as pool:
            await score(pool, word, ["a"])
            (pid,) = _children()
            counted(tmp_path, kills=1)
            os.kill(pid, signal.SIGKILL)
            first = await score(pool, word, ["bb"])
            second = await score(pool, word, ["ccc"])
            stats = pool.stats()
            assert (stats.pending, stats.oldest_s, stats.failed) == (0, 0.0, 1)
            return first + second

    lost, scored = run(work())
    assert lost.error == f"RewardCrash: the reward process died ({BY_OTHERS})\nin reward function {word}"
    assert scored.rewards == {word: 3.0}


def _runs(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # which waits for a parent that may not care
    return False


def _children() -> list[int]:
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it may end while it is looked at
            if "rollout_worker.rewards.process" in child.cmdline():
                found.append(child.pid)
    return found


def test_a_function_that_cannot_be_had_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(RewardConfigError, match=r"no file .*nowhere\.py"):
        run(with_pool(f"{tmp_path}/nowhere.py:f", []))


@pytest.mark.parametrize("gpus", [[], ["CUDA_VISIBLE_DEVICES"]], ids=["of the engine", "named"])
def test_of_the_environment_a_reward_process_gets_what_is_named(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("COSMOS_TOKEN", "do-not-tell")
    monkeypatch.setenv("WANDB_API_KEY", "do-not-tell")
    monkeypatch.setenv("JUDGE_KEY", "tell")
    monkeypatch.setenv("COSMOS_PARENT_PID", "4711")
    name = word.replace(":word", ":environment")
    file = tmp_path / "environment.json"

    async def work() -> None:
        async with running(name, environment=["JUDGE_KEY", *gpus]) as pool:
            await pool.submit(Task("", {"file": str(file)}, (name,)))

    run(work())
    seen = json.loads(file.read_text())
    assert "PATH" in seen
    assert not {"COSMOS_TOKEN", "WANDB_API_KEY"} & seen.keys()
    assert "do-not-tell" not in seen.values()
    assert (seen["JUDGE_KEY"], seen["COSMOS_PARENT_PID"]) == ("tell", "4711")
    assert seen["CUDA_VISIBLE_DEVICES"] == ("3" if gpus else "")


def test_gpus_that_are_named_and_not_dealt_are_those_of_the_machine(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher sets the variable only for replicas; scoring elsewhere works without it."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    name, file = word.replace(":word", ":environment"), tmp_path / "environment.json"

    async def work() -> None:
        async with running(name, environment=["CUDA_VISIBLE_DEVICES"]) as pool:
            await pool.submit(Task("", {"file": str(file)}, (name,)))

    run(work())
    assert "CUDA_VISIBLE_DEVICES" not in json.loads(file.read_text())


def test_a_variable_that_is_not_there_is_named_with_the_key_that_passes_it(tmp_path: Path) -> None:
    with pytest.raises(RewardConfigError, match=r"reward\.environment: JUDGE_KEY is not set .*export JUDGE_KEY="):
        run(pool_of("format", environment=["PATH", "JUDGE_KEY"]).start())
    path, hint = tmp_path / "user.py", 'reward.environment = ["JUDGE_KEY"]'
    path.write_text("import os\n\ndef judge(completion, row):\n    return float(os.environ['JUDGE_KEY'])\n")
    (result,) = run(with_pool(f"{path}:judge", ["one"]))
    assert (result.error or "").splitlines()[0].startswith("KeyError: 'JUDGE_KEY' (")
    assert hint in (result.error or "").splitlines()[0]
    path.write_text("import os\n\nKEY = os.environ['JUDGE_KEY']\n")
    with pytest.raises(RewardConfigError) as refused:
        run(with_pool(f"{path}:judge", []))
    assert hint in str(refused.value)


def test_several_functions_of_one_sample(word: str) -> None:
    """One of them fails: its error is told, the other's reward is kept for the record. One dies: it is named."""

    async def work() -> list[RewardResult]:
        async with running(word, "format") as pool:
            return [await pool.submit(Task(text, {}, ("format", word))) for text in ("raise", "die")]

    failed, died = run(work())
    assert failed.rewards == {"format": 0.0}
    assert failed.error is not None
    assert f"in reward function {word}\n" in (died.error or "")


def test_samples_are_scored_by_the_source_of_their_row() -> None:
    async def work() -> list[RewardResult]:
        async with running("by_source") as pool:
            rows = [{"data_source": source, "answer": "7"} for source in ("gsm8k", "math_dapo", "mine")]
            tasks = [pool.submit(Task("#### 7", row, ("by_source",))) for row in rows]
            return await asyncio.gather(*tasks)

    gsm8k, dapo, mine = run(work())
    assert (gsm8k.rewards, dapo.rewards) == ({"by_source": 1.0}, {"by_source": 0.0})
    assert mine.rewards == {}
    assert "data_source 'mine'" in (mine.error or "")


def test_what_fails_once_is_scored_again_and_what_always_fails_so_often_as_it_is_told(tmp_path: Path) -> None:
    path, kinds = tmp_path / "user.py", ["raise", "refused", "die", "hang", "never"]
    path.write_text(
        f"""
import os, pathlib, signal, time

def moody(completion, row):
    tries = pathlib.Path({str(tmp_path)!r}) / completion
    with tries.open("a") as file:
        file.write("x")
    if completion == "never" or tries.stat().st_size == 1:
        if completion == "refused":
            raise ConnectionRefusedError
        if completion == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if completion == "hang":
            time.sleep(3600)
        raise KeyError(completion)
    return 1.0
"""
    )
    name = f"{path}:moody"

    async def work() -> tuple[list[RewardResult], PoolStats]:
        async with running(name, timeout=5.0, retries=2) as pool:
            return await score(pool, name, kinds), pool.stats()

    (*mended, never), stats = run(work())
    assert mended == [RewardResult({name: 1.0})] * 4
    assert never.error is not None
    assert (stats.pending, stats.attempts, stats.failed, stats.retried) == (0, 11, 1, 6)
    assert [(tmp_path / kind).stat().st_size for kind in kinds] == [2, 2, 2, 2, 3]


def test_messages_survive_being_cut_anywhere() -> None:
    messages = [{"a": 1}, {"b": "ü" * 50}, {}, {"c": [1.5, None]}]
    data = b"".join(protocol.encode(message) for message in messages)
    for size in (1, 2, 3, 7, len(data)):
        decoder = protocol.MessageDecoder()
        found = [m for i in range(0, len(data), size) for m in decoder.feed(data[i : i + size])]
        assert found == messages


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x02\x00\x00\x00[]", b"\x01\x00\x00\x00{"])
def test_nonsense_is_refused(data: bytes) -> None:
    with pytest.raises(protocol.ProtocolError):
        protocol.MessageDecoder().feed(data)


def test_a_slow_sample_delays_nobody_behind_it(word: str) -> None:
    async def work() -> list[float]:
        async with running(word, timeout=600.0, num_workers=2) as pool:
            slow, *others = [pool.submit(Task(text, {}, (word,))) for text in ("hang", "a", "bb", "ccc")]
            results = await asyncio.gather(*others)
            assert not slow.done()
            stats = pool.stats()
            assert (stats.pending, stats.failed, stats.oldest_s > 0) == (1, 0, True)
            assert 0 < stats.seconds == pytest.approx(sum([result.seconds for result in results]))
            return [result.rewards[word] for result in results]

    assert run(work()) == [1.0, 2.0, 3.0]


def test_no_process_scores_what_another_does(tmp_path: Path) -> None:
    path, calls = tmp_path / "user.py", tmp_path / "calls"
    path.write_text(
        "import time\n\ndef slow(completion, row):\n"
        f"    open({str(calls)!r}, 'a').write(completion)\n    time.sleep(1.1)\n    return float(completion)\n"
    )
    name = f"{path}:slow"
    results = run(with_pool(name, ["1", "2", "3"], processes=2))
    assert [result.rewards[name] for result in results] == [1.0, 2.0, 3.0]
    assert sorted(calls.read_text()) == ["1", "2", "3"]
