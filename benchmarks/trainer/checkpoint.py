"""How long saving holds training up: at once, in the background, and by torch's own functions.

    python -m benchmarks.trainer.checkpoint [--rounds 3] [--directory /tmp/…]

A model of 100M parameters in float32 with AdamW's state (1.2 GB) trains on a short row, step after step. In turns it
is saved by this project (`sync`, `async`) and by `torch.distributed.checkpoint` (`save`, `async_save`), without an
export. `call` is the time in which no step runs; `held` adds what the steps take longer while something is written
in parallel with them; `complete` is the time until all is on disk. Ours is read again and compared, theirs is not.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.harness import in_turns, medians, options, report, timed
from benchmarks.trainer.drafts import CONTENTS, draft
from policy_worker.background import Background
from policy_worker.checkpoints.state import state_to_save
from policy_worker.checkpoints.storage import Staging
from policy_worker.checkpoints.write import Draft, write
from policy_worker.model.model import PolicyModel
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.process import RankEnvironment
from policy_worker.trained.lr_schedule import Schedule
from policy_worker.trained.trainer import Trainer
from schema.config import Config

Save = Callable[[Path], Callable[[], bool]]
"""Saves into a directory, returns when steps may go on; the answer says whether all is on disk by now."""


def make_learner(layers: int) -> Trainer:
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(
        Qwen3Config(
            vocab_size=16384, hidden_size=768, intermediate_size=2304, num_hidden_layers=layers, head_dim=64,
            num_attention_heads=12, num_key_value_heads=6, tie_word_embeddings=True,
        )
    )  # fmt: skip
    train = {"param_dtype": "float32", "optm_impl": "foreach", "compile": False}
    return Trainer(
        PolicyModel(lm), Config.model_validate({"train": train}), RankGroup(RankEnvironment()), Schedule(1000)
    )


class Bench:
    """Steps of one trainer, and the ways to save it."""

    def __init__(self, layers: int) -> None:
        self.trainer = make_learner(layers)
        self.staging, self.unfinished = Staging(self.trainer.group.device), Background()
        self.ids = torch.randint(0, 16384, (1, 48))
        self.number = 0

    def step(self) -> float:
        """Seconds of one training step."""

        def work() -> None:
            self.trainer.model.lm(input_ids=self.ids, labels=self.ids).loss.backward()
            self.trainer.optimizer.step(1.0)

        return timed(work)

    def _draft(self, root: Path, staging: Staging | None) -> Draft:
        self.number += 1
        return draft(self.trainer, root, self.number, staging)

    def sync(self, root: Path) -> Callable[[], bool]:
        write(self._draft(root, None), self.trainer.group)
        return lambda: True

    def asynchronous(self, root: Path) -> Callable[[], bool]:
        draft = self._draft(root, self.staging)
        self.unfinished.start(lambda: write(draft, self.trainer.group) and None)
        return lambda: self.unfinished.wait(0.0)

    def torch_sync(self, root: Path) -> Callable[[], bool]:
        dcp.save(self._state(), checkpoint_id=root / "torch")
        return lambda: True

    def torch_async(self, root: Path) -> Callable[[], bool]:
        future = dcp.async_save(self._state(), checkpoint_id=root / "torch")
        return lambda: future.done() and future.result() is not False

    def _state(self) -> dict[str, torch.Tensor]:
        return {key: t for state in state_to_save(self.trainer, CONTENTS).values() for key, t in state.items()}


def measure(bench: Bench, save: Save, place: Path, settle: int = 3) -> dict[str, float]:
    """One save, with steps around it."""
    plain = statistics.median(bench.step() for _ in range(settle))
    root = Path(tempfile.mkdtemp(dir=place))
    began = time.perf_counter()
    complete = save(root)
    call, extra = time.perf_counter() - began, 0.0
    while not complete():
        extra += bench.step() - plain
    whole = time.perf_counter() - began
    shutil.rmtree(root)
    return {"call_s": call, "held_s": call + max(extra, 0.0), "complete_s": whole, "step_s": plain}


def main() -> None:
    given = options(
        __doc__,
        rounds=3,
        layers=(12, "of the model; of 12 it has 100M parameters"),
        directory=(Path, "where to write; default: a temporary one"),
    )
    bench = Bench(given.layers)
    ways: dict[str, Save] = {
        "sync": bench.sync, "async": bench.asynchronous, "torch_sync": bench.torch_sync,
        "torch_async": bench.torch_async,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir=given.directory) as place:
        turns = in_turns(
            {name: partial(measure, bench, save, Path(place)) for name, save in ways.items()}, given.rounds
        )
    rows = {name: medians(taken) for name, taken in turns.items()}
    report(given, rows, rows)
    bench.trainer.group.close()


if __name__ == "__main__":
    main()
