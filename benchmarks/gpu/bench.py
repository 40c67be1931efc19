"""What sections have in common: the device, the clock, the sizes, and where results go."""

from __future__ import annotations

import gc
import json
import shutil
import statistics
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.roofline import Card, Roof, Work, known, roof
from benchmarks.jobs import launch, summary_of

FEW_STEPS, SOME_STEPS = 2, 15
"""Optimizer steps of a job, in a rehearsal and in a run."""
WARM_UPS = 3
SHAPES: dict[str, dict[str, Any]] = {
    "1.5B": {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    },
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    },
}  # fmt: skip
"""Of Qwen3 with tied embeddings. "1.5B" has the width of Qwen3-1.7B and four layers fewer: 1.52B parameters."""


class Bench:
    """One section's view of the machine.

    device: "cuda" or "cpu". tiny: sizes of a rehearsal. out: a file of JSON lines that rows are appended to, with the
    section's name. kept: a directory for what is more than a row.
    """

    def __init__(self, device: str, tiny: bool, out: Path, kept: Path, section: str) -> None:
        self.device, self.tiny, self._out, self.kept = torch.device(device), tiny, out, kept
        self._section = section
        self.on_gpu = self.device.type == "cuda"
        self.repeats = 2 if tiny else 5

    # ---- results ------------------------------------------------------------------------------------------

    def row(self, case: str, status: str = "ok", **figures: float | str | bool) -> None:
        """Report a case at once, so that whatever ends this process leaves it in the file.

        Names of figures end in their unit: `_s`, `_ms`, `_gb`, `_gb_s`, `_tokens_s`."""
        line = {"section": self._section, "case": case, "status": status, **figures}
        with self._out.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    def check(self, case: str, right: bool, **figures: float | str | bool) -> None:
        """Report something that must be so."""
        self.row(case, "ok" if right else "wrong", **figures)

    def timed(self, case: str, seconds: float, work: Work, **figures: float | str | bool) -> None:
        """Report how long a piece of work took, next to what the card could do."""
        self.row(case, ms=seconds * 1e3, **self.roof(work, seconds), **figures)

    def skip(self, case: str, why: str) -> None:
        self.row(case, "skipped", why=why)

    # ---- measuring ----------------------------------------------------------------------------------------

    def sync(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], warm_ups: int = WARM_UPS) -> float:
        """Median time of a call, by CUDA events on a GPU."""
        for _ in range(1 if self.tiny else warm_ups):
            work()
        return statistics.median(self.once(work) for _ in range(self.repeats))

    def once(self, work: Callable[[], object]) -> float:
        """Time of one call; on a GPU that of the device's work, which may outlast the call."""
        self.sync()
        if not self.on_gpu:
            began = time.perf_counter()
            work()
            return time.perf_counter() - began
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def wall(self, work: Callable[[], object]) -> float:
        """Seconds until a call has returned and the device is done."""
        self.sync()
        began = time.perf_counter()
        work()
        self.sync()
        return time.perf_counter() - began

    def peak_gb(self, work: Callable[[], object]) -> float:
        """The most device memory during a call beyond what was there before it; 0 on a CPU, where nobody counts."""
        if not self.on_gpu:
            work()
            return 0.0
        self.free()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        self.sync()
        return float(torch.cuda.max_memory_allocated() - before) / 1e9

    def free(self) -> None:
        """Give unused memory back."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def in_memory(self, gigabytes: float) -> str | None:
        """Where temporary files go: into memory, if that many fit there; None: the usual place."""
        there = Path("/dev/shm")
        return str(there) if there.is_dir() and shutil.disk_usage(there).free > 1.2e9 * gigabytes else None

    # ---- what the card could do ---------------------------------------------------------------------------

    @cached_property
    def card(self) -> Card:
        """Its peaks, by its name; what that does not tell is measured."""
        flops, bytes_s = self.known or (self.product_flops(), self.copy_bytes_s())
        return Card(flops, bytes_s, self.bus_bytes_s())

    @property
    def known(self) -> tuple[float, float] | None:
        """Peaks of its data sheet; see `roofline.known`."""
        return known(torch.cuda.get_device_name(self.device)) if self.on_gpu else None

    def roof(self, work: Work, seconds: float) -> Roof:
        """Figures of `roofline.roof` for this card."""
        return roof(self.card, work, seconds)

    def product_flops(self) -> float:
        """FLOP/s that a large product in bf16 reaches."""
        n = 128 if self.tiny else 8192
        a, b = torch.randn(2, n, n, device=self.device, dtype=torch.bfloat16)
        return 2 * n**3 / self.seconds(lambda: a @ b)

    def copy_bytes_s(self) -> float:
        """Bytes per second that a large copy within the memory reads and writes."""
        data = torch.empty(2**20 if self.tiny else 2**30, device=self.device, dtype=torch.uint8)
        out = torch.empty_like(data)
        return 2 * data.nbytes / self.seconds(lambda: out.copy_(data))

    def bus_bytes_s(self) -> float:
        """Bytes per second of a copy to pinned memory."""
        data = torch.empty(2**20 if self.tiny else 2**28, device=self.device, dtype=torch.uint8)
        out = torch.empty(len(data), dtype=torch.uint8, pin_memory=self.on_gpu)
        return data.nbytes / self.seconds(lambda: out.copy_(data, non_blocking=True))

    # ---- what is measured ---------------------------------------------------------------------------------

    @property
    def shape(self) -> dict[str, Any]:
        return SHAPES["tiny" if self.tiny else "1.5B"]

    def language_model(self, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
        """A random Qwen3 of `shape` on the device."""
        from transformers import AutoModelForCausalLM, Qwen3Config

        torch.manual_seed(0)
        settings = {**self.shape, "tie_word_embeddings": True, "max_position_embeddings": 32768, **changes}
        with torch.device(self.device):
            return AutoModelForCausalLM.from_config(Qwen3Config(**settings), dtype=dtype)


def reinforce(bench: Bench, place: Path, name: str, config: str, model: Path, *settings: str) -> dict[str, Any]:
    """A few steps of one of the quickstart's GRPO jobs; its summary. Raises `JobFailedError`."""
    same = {
        "train.max_num_steps": FEW_STEPS if bench.tiny else SOME_STEPS, "validation.enable": False,
        "train.ckpt.enable_checkpoint": False, "launcher.export_final": False,
    }  # fmt: skip
    return summary_of(launch(config, model, place, name, same, *settings))
