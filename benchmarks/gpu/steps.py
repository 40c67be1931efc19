"""Optimizer steps as several sections measure them: speed and memory of each case, and numbers equal to a first."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.parts import Parts
from benchmarks.gpu.roofline import StepShape, Work, causal_pairs
from benchmarks.harness import Figures
from launcher.preflight import memory
from launcher.preflight.models import find_model
from policy_worker.model import attention
from policy_worker.model.attention import Block
from policy_worker.model.load import kept_activations
from policy_worker.model.micro_batch import Segment, TrainSample
from policy_worker.model.model import PolicyModel
from policy_worker.model.prepare import spare_memory
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.trained.lr_schedule import Schedule
from policy_worker.trained.trainer import Trainer
from schema.config import Config


def config_of(train: dict[str, Any], policy: dict[str, Any] | None = None) -> Config:
    """Supervised training in bf16 on packed rows, without recomputation, and what is written over that."""
    usual = {
        "compile": False, "param_dtype": "bfloat16", "sequence_packing": True, "optm_impl": "fused",
        "optm_warmup_steps": 0, "optm_lr": 1e-6, "train_policy": {"type": "sft"},
    }  # fmt: skip
    model = {"model_name_or_path": "random", "parallelism": {"tp_size": 1}, "model_gradient_checkpointing": False}
    return Config.model_validate({"train": usual | train, "policy": model | (policy or {})})


def samples(lengths: Sequence[int], vocabulary: int, prompt: int = 1, alike: int = 1) -> dict[int, TrainSample]:
    """Sequences of which every token behind the prompt is learned. alike: so many in turn have the same prompt."""
    rng = np.random.default_rng(0)
    made: dict[int, TrainSample] = {}
    for row, length in enumerate(lengths):
        ids = rng.integers(0, vocabulary, length + 1, dtype=np.int32)
        if row % alike:
            ids[:prompt] = made[row - row % alike].segments[0].token_ids[:prompt]
        mask = (np.arange(length + 1) >= prompt).astype(np.uint8)
        made[row] = TrainSample([Segment(ids, mask, None)])
    return made


class Steps:
    """A trainer of a random model, and its optimizer step on the same micro-batches of packed rows."""

    def __init__(
        self, bench: Bench, group: RankGroup, config: Config, lengths: Sequence[int], micro_batches: int = 1,
        prompt: int = 1, alike: int = 1, **shape: Any,
    ) -> None:  # fmt: skip
        """lengths: of the sequences of a micro-batch. prompt, alike: see `samples`. shape: changes of the model's
        configuration."""
        lm = bench.language_model(**shape)
        lm.set_attn_implementation(attention.NAME)
        model = PolicyModel(lm.train())
        spare_memory(model, **kept_activations(config.policy, config.train))
        self.bench, self.config, self.lengths = bench, config, lengths
        self.trainer = Trainer(model, config, group, Schedule(1000))
        self.parts = Parts(bench.on_gpu)
        self._samples = samples([*lengths] * micro_batches, lm.config.vocab_size, prompt, alike)
        self._learned = sum(sample.learned_tokens for sample in self._samples.values())
        rows = range(len(lengths))
        self._batches = [[row + len(rows) * number for row in rows] for number in range(micro_batches)]
        self._blocks: list[Block] = []
        self.seconds = 0.0
        """Seconds of a step, once it is measured."""
        self.logprobs: list[Tensor] = []
        """Log-probs of the first step, a tensor for each micro-batch."""
        self.losses: list[Tensor] = []
        self.norms: list[float] = []

    def __call__(self) -> None:
        """Take one."""
        first, total = not self.losses, torch.zeros((), device=self.bench.device)
        part, arriving = self.parts.part, iter(self.trainer.micro_batches(self._samples, self._batches))
        for _ in self._batches:
            with part("arrival"):
                batch = next(arriving)
            with part("forward"):
                logprobs = self.trainer.forward(batch).logprobs
            if first:
                self._blocks += batch.blocks
                self.logprobs.append(logprobs.detach().cpu())
            loss = -logprobs.sum() / self._learned
            with part("backward"):
                self.trainer.backward(loss)
            total += loss.detach()
        with part("optimizer"):
            self.norms.append(self.trainer.step(0))
        self.losses.append(total)

    @property
    def tokens(self) -> int:
        return sum(self.lengths) * len(self._batches)

    @property
    def shape(self) -> StepShape:
        """What its arithmetic is counted from, once a step has been taken. Shared positions count once."""
        config = self.trainer.model.lm.config
        return StepShape(
            parameters=sum(parameter.numel() for parameter in self.trainer.model.parameters()),
            head=config.vocab_size * config.hidden_size,
            positions=sum(sum(block.pieces) for block in self._blocks),
            learned=self._learned,
            width=config.num_attention_heads * config.head_dim,
            layers=config.num_hidden_layers,
            pairs=sum(causal_pairs(block.shared, block.lengths) for block in self._blocks),
        )

    def measured(self) -> Figures:
        """Speed of whole steps; on a GPU the most memory too."""
        bench, first = self.bench, self.bench.wall(self)
        self.seconds = seconds = bench.seconds(self)
        roof = bench.roof(Work(flops=3 * self.shape.forward), seconds)
        figures = {"tokens_s": self.tokens / seconds, "step_ms": seconds * 1e3, **roof, "first_step_s": first}
        if bench.on_gpu:
            figures["peak_gb"] = bench.peak_gb(self) + torch.cuda.memory_allocated() / 1e9
        return figures

    def estimated(self) -> Figures:
        """What `--dry-run` says of one rank, of its device and of the host."""
        with tempfile.TemporaryDirectory() as folder:
            self.trainer.model.lm.config.save_pretrained(folder)
            parts = memory.trainer(self.config, find_model(folder, None, {}), 1, 1)
        host = sum(part.bytes for part in parts if part.device) / 1e9
        return {"estimate_gb": sum(part.bytes for part in parts) / 1e9 - host, "host_estimate_gb": host}


def each(
    bench: Bench, cases: Iterable[tuple[str, Callable[[], Steps]]],
    same: Callable[[str, Steps, Steps], None], figures_of: Callable[[Steps], Figures] = lambda steps: {},
    after: Callable[[str, Steps], None] = lambda case, steps: None,
) -> None:  # fmt: skip
    """Measure each case by a trainer of its own and compare its numbers with those of the first.

    A case that fails, by compilers, kernels or memory, is reported: the others are worth having. same: reports
    whether a case has the numbers of the first. figures_of: further figures of a case. after: reports more of it.
    """
    first = None
    for case, make in cases:
        bench.free()
        steps = _measured(bench, case, make, figures_of, after)
        if steps is None:
            continue
        if first is not None:
            same(case, first, steps)
        else:
            first = steps
        del steps.trainer


def _measured(
    bench: Bench, case: str, make: Callable[[], Steps], figures_of: Callable[[Steps], Figures],
    after: Callable[[str, Steps], None],
) -> Steps | None:  # fmt: skip
    """Measure and report one case; None if it failed, when nothing of it is left in memory."""
    steps: Steps | None = None
    try:
        steps = make()
        figures = steps.measured()
        bench.row(case, **figures, **figures_of(steps))
        after(case, steps)
    except Exception as error:
        report_failure(bench, case, error)
        return None
    return steps


def report_failure(bench: Bench, case: str, error: Exception) -> None:
    """Report a case that has raised, and drop what the frames of its traceback hold: when memory ran out, most of
    it."""
    traceback.print_exc()
    bench.row(case, "failed", why=f"{type(error).__name__}: {error}"[:500])
    raised: BaseException | None = error
    while raised is not None:
        traceback.clear_frames(raised.__traceback__)
        raised.__traceback__ = None
        raised = raised.__cause__ or raised.__context__
