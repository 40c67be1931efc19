"""Score answers that a file holds: `python -m rollout_worker.evaluate --run-dir DIR`.

    DIR/data/evaluation.jsonl ─▶ reward processes ─▶ DIR/scores.jsonl, then DIR/evaluation.json

The same reward functions, processes and deadlines as in training. A reward that fails is an error with a name and
is counted, never a 0: means are over the answers that could be scored. Exit codes: 0 done, 1 some answers could not
be scored, 2 a reward function cannot be had.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rollout_worker.rewards.pool import RewardPool, RewardPoolError, RewardResult, Task
from rollout_worker.rewards.registry import RewardConfigError
from rollout_worker.rewards.scoring import score_of
from schema.config import Config
from schema.scores.summary import ScoredPrompt, summarise
from schema.util.atomic_file import replacing, write_text
from schema.util.text import configure_logging
from schema.wire.messages import SourceScores

log = logging.getLogger("rollout_worker.evaluate")  # run with -m, __name__ would say nothing

ALL = "all"
IN_FLIGHT = 512
"""Answers waiting for their rewards: enough for many processes, few enough to hold the file's rows in memory."""
REPORT_EVERY_S = 2.0
MAX_ERRORS_SHOWN = 5


@dataclass(slots=True)
class SourceTally:
    """The prompts of one data source, and sums of the single rewards."""

    prompts: list[ScoredPrompt] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    rewarded: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, prompt: ScoredPrompt, rewards: Iterable[Mapping[str, float]]) -> None:
        """One prompt, and the single rewards of its answers that have a score."""
        self.prompts.append(prompt)
        for values in rewards:
            for name, value in values.items():
                self.rewards[name] += value
                self.rewarded[name] += 1

    def summary(self, scores: SourceScores) -> dict[str, Any]:
        """`score`: mean over prompts of the mean over their answers; `best`: of their best answer; `scores`: all."""
        best = scores.mean if scores.best is None else scores.best
        return {
            "prompts": scores.prompts,
            "responses": scores.samples + scores.errors,
            "errors": scores.errors,
            "score": scores.mean and scores.mean.value,
            "best": best and best.value,
            "rewards": {name: self.rewards[name] / self.rewarded[name] for name in sorted(self.rewards)},
            "scores": scores.model_dump(mode="json"),
        }


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """The prepared rows, one at a time."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


async def evaluate(config: Config, run_dir: Path) -> dict[str, Any]:
    """Score all answers; writes both files and answers what evaluation.json holds.

    Raises `RewardConfigError` when a function cannot be had, `RewardPoolError` when its processes keep dying.
    """
    weights = config.evaluation.reward_weights
    pool = RewardPool(weights, config.custom, config.reward)
    await pool.start()
    try:
        return await _score_all(run_dir, pool, config)
    finally:
        await pool.close()


async def _score_all(run_dir: Path, pool: RewardPool, config: Config) -> dict[str, Any]:
    weights, names = config.evaluation.reward_weights, config.reward_names
    tallies: dict[str, SourceTally] = defaultdict(SourceTally)
    errors: list[str] = []
    waiting: deque[tuple[dict[str, Any], list[asyncio.Future[RewardResult]]]] = deque()
    in_flight, began, reported = 0, time.monotonic(), time.monotonic()
    with replacing(run_dir / "scores.jsonl") as neighbour, neighbour.open("w", encoding="utf-8") as file:
        for row in rows_of(run_dir / "data" / "evaluation.jsonl"):
            responses = row.pop("responses")
            waiting.append((row, [pool.submit(Task(text, row, tuple(weights))) for text in responses]))
            in_flight += len(responses)
            while in_flight > IN_FLIGHT:
                in_flight -= await _settle(waiting.popleft(), weights, names, tallies, errors, file)
            if time.monotonic() - reported > REPORT_EVERY_S:
                reported = time.monotonic()
                log.info("%s prompts scored", f"{len(tallies[ALL].prompts):,}")
        while waiting:
            await _settle(waiting.popleft(), weights, names, tallies, errors, file)
    whole = tallies.pop(ALL)
    scores = summarise(whole.prompts, config.evaluation.pass_score)
    summary = {
        **whole.summary(scores.whole),
        "seconds": round(time.monotonic() - began, 3),
        "sources": {name: tallies[name].summary(of_source) for name, of_source in scores.sources.items()},
        "error_examples": errors,
    }
    write_text(run_dir / "evaluation.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    return summary


async def _settle(
    waiting: tuple[dict[str, Any], list[asyncio.Future[RewardResult]]],
    weights: Mapping[str, float],
    names: Mapping[str, str],
    tallies: dict[str, SourceTally],
    errors: list[str],
    file: TextIO,
) -> int:
    """Wait for the answers of one prompt, write and count them; answers how many they were."""
    row, futures = waiting
    results = [await future for future in futures]
    judged = [score_of(result.rewards, weights, result.error) for result in results]
    rewards = [{names[name]: value for name, value in result.rewards.items()} for result in results]
    scores, faults = [score for score, _ in judged], [error for _, error in judged]
    kept = [score for score in scores if score is not None]
    source = row.get("data_source")
    source = source if isinstance(source, str) and source != ALL else ""
    answers = [result.answer for result, score in zip(results, scores, strict=True) if score is not None]
    prompt = ScoredPrompt(source, kept, answers, len(scores) - len(kept))
    for name in {ALL, source} - {""}:
        tallies[name].add(prompt, [values for values, fault in zip(rewards, faults, strict=True) if not fault])
    errors += [fault for fault in faults if fault][: MAX_ERRORS_SHOWN - len(errors)]
    line = {
        "key": row["key"],
        "scores": scores,
        "rewards": rewards,
        "errors": faults,
        "answers": [result.answer for result in results],
        "seconds": [round(result.seconds, 6) for result in results],
    }
    file.write(json.dumps(line, ensure_ascii=False) + "\n")
    return len(results)


def main(argv: list[str] | None = None) -> int:
    """The command line; answers the exit code."""
    parser = argparse.ArgumentParser(prog="python -m rollout_worker.evaluate", description="Score answers.")
    parser.add_argument("--run-dir", type=Path, required=True, help="directory of the run")
    run_dir = parser.parse_args(argv).run_dir
    configure_logging()
    config = Config.model_validate_json((run_dir / "config.json").read_text(encoding="utf-8"))
    try:
        summary = asyncio.run(evaluate(config, run_dir))
    except RewardConfigError as error:
        log.error("%s", " ".join(str(error).split()))
        return 2
    except RewardPoolError as error:
        log.error("%s", " ".join(str(error).split()))
        return 1
    if summary["errors"]:
        example = summary["error_examples"][0].splitlines()[0]
        log.error("%s of %s answers could not be scored: %s", summary["errors"], summary["responses"], example)
    return 1 if summary["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
