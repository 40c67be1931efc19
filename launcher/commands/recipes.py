"""Starter configurations: commented TOML for a chosen recipe, with values that fit the machine.

    recipe + Fit (GPUs, engine, model) ─▶ text

Every text is sound as it is: a test validates each recipe for machines of several sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from string import Template

from launcher.commands.recipe_texts import (
    CHECKPOINTS,
    DAPO,
    DATA,
    DECAY,
    GRPO,
    GSPO,
    HEAD,
    MEMORY,
    NO_EXPORT,
    OVERSAMPLE,
    POLICY,
    ROLLOUT,
    SFT,
    SHARED,
    TINY_GRPO,
    TINY_GRPO_DATA,
    TINY_POLICY,
    TINY_SFT,
    TINY_SFT_DATA,
    TRAIN,
)

GPU_MODEL, CPU_MODEL = "Qwen/Qwen3-1.7B", "Qwen/Qwen3-0.6B"


@dataclass(frozen=True, slots=True)
class Fit:
    """What the text is written for. engine: `vllm` or `transformers`. model: in place of the recipe's own."""

    gpus: int
    engine: str
    model: str = ""

    @property
    def training_gpus(self) -> int:
        """GPUs of the trainer: the largest power of two that leaves as many for the rollouts."""
        half = self.gpus // 2
        return 1 << (half.bit_length() - 1) if half else 1

    @property
    def rollout_gpus(self) -> int:
        """GPUs of the rollout replicas, one each; a single GPU is shared."""
        return max(1, self.gpus - self.training_gpus)


@dataclass(frozen=True, slots=True)
class Recipe:
    """One starter configuration.

    is_tiny: for the model of 0.33M parameters. makes_model: `init` makes that next to the file. needs_model: it
    goes on from a trained one.
    """

    name: str
    title: str
    note: str
    blocks: tuple[str, ...]
    values: dict[str, str]
    cpu_values: dict[str, str]
    supervised: bool = False
    is_tiny: bool = False
    makes_model: bool = False
    needs_model: bool = False

    def text(self, fit: Fit, file: str, model: str = "") -> str:
        """The file's text. file: its name, for the commands in the comments."""
        values = {
            "title": self.title,
            "note": "\n".join(f"# {line}".rstrip() for line in self.note.splitlines()),
            "commands": commands(file),
            "fit": self.words(fit),
            "shards": str(self._shards(fit)),
            "rollouts": str(fit.rollout_gpus if fit.gpus > 1 else 1),
            "engine": fit.engine,
            "model": model or fit.model or (GPU_MODEL if fit.gpus else CPU_MODEL),
            "dtype": "bfloat16" if fit.gpus else "float32",
            "dtype_note": "the optimizer's copy stays float32"
            if fit.gpus
            else "bfloat16 is slow without a GPU",
            "memory": self._memory(fit),
            **self.values,
            **({} if fit.gpus else self.cpu_values),
        }
        blocks = list(self.blocks)
        if fit.gpus == 1 and not self.supervised:
            blocks.append(SHARED)
        return "\n".join(Template(block).substitute(values) for block in blocks)

    def words(self, fit: Fit) -> str:
        """What the text is written for."""
        if self.is_tiny:
            return "two CPU cores"
        gpus = {0: "no GPU", 1: "one GPU"}.get(fit.gpus, f"{fit.gpus} GPUs")
        return f"a machine with {gpus}" + ("" if self.supervised else f", rollouts by {fit.engine}")

    def _memory(self, fit: Fit) -> str:
        """What only vLLM has, and only a GPU needs."""
        share = {0: "", 1: "0.4"}.get(fit.gpus, "0.85") if fit.engine == "vllm" else ""
        return (MEMORY.format(share) if share else "") + "\n"

    def _shards(self, fit: Fit) -> int:
        return max(1, fit.gpus) if self.supervised else fit.training_gpus


def commands(file: str) -> str:
    """What to do with the file, as comments."""
    rows = [
        (f"cosmos-launch validate {file}", "every mistake at once"),
        (f"cosmos-launch --config {file} --dry-run", "processes, commands, memory"),
        (f"cosmos-launch --config {file}", "train"),
        ("cosmos-launch explain train.optm_lr", "what a key does (keys left out have their defaults)"),
    ]
    size = max(len(command) for command, _ in rows) + 3
    return "\n".join(f"#   {command:<{size}}{words}" for command, words in rows)


_SMALL = "samples of a step: 4 groups of 4: small, for the sake of the CPU"
_SHORT = {
    "max_length": "3072", "response": "2048", "checkpointing": "true", "group": "16", "lease": "8",
    "concurrent": "256", "batch": "256", "batch_words": "samples of a step: 16 groups of 16", "lr": "1e-6",
    "warmup": "10", "epochs": "1", "stale": "2", "tokens": "16384", "save_freq": "20",
}  # fmt: skip
_SHORT_CPU = {
    "max_length": "768", "response": "256", "group": "4", "lease": "2", "concurrent": "16", "batch": "16",
    "batch_words": _SMALL, "tokens": "1536",
}  # fmt: skip
_LONG = {
    "max_length": "18432", "response": "16384", "checkpointing": "true", "group": "16", "lease": "4",
    "concurrent": "128", "batch": "512", "batch_words": "samples of a step: 32 groups of 16", "lr": "1e-6",
    "warmup": "10", "epochs": "1", "stale": "2", "tokens": "18432", "save_freq": "20", "piece": "128",
}  # fmt: skip
_LONG_CPU = {
    "max_length": "2048", "response": "1024", "group": "4", "lease": "2", "concurrent": "16", "batch": "16",
    "batch_words": _SMALL, "tokens": "2048", "piece": "4",
}  # fmt: skip

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "grpo",
            "Reinforcement learning on checkable answers with GRPO (arXiv 2402.03300).",
            "The place to start: grade-school mathematics, the reward is a right \\boxed{} answer.",
            (HEAD, POLICY, ROLLOUT, TRAIN, CHECKPOINTS, GRPO, DATA),
            _SHORT,
            _SHORT_CPU,
        ),
        Recipe(
            "dapo",
            "Reinforcement learning with DAPO (arXiv 2503.14476).",
            "Clip-higher, token-level loss, dynamic sampling, a soft penalty on answers that run out of room.",
            (HEAD, POLICY, ROLLOUT, TRAIN, CHECKPOINTS, GRPO + DAPO, DATA, OVERSAMPLE),
            {**_SHORT, "buffer": "512"},
            {**_SHORT_CPU, "buffer": "64"},
        ),
        Recipe(
            "gspo",
            "Reinforcement learning on long answers with GSPO (arXiv 2507.18071).",
            "Ratios of whole answers, up to 16k tokens, several optimizer steps per batch.",
            (HEAD, POLICY, ROLLOUT, TRAIN, CHECKPOINTS, GRPO + GSPO, DATA),
            _LONG,
            _LONG_CPU,
        ),
        Recipe(
            "sft",
            "Supervised fine-tuning on conversations.",
            "Only the assistant's turns are learned.",
            (HEAD, POLICY, TRAIN, CHECKPOINTS, SFT),
            {
                **_SHORT, "max_length": "4096", "lr": "1e-5", "warmup": DECAY, "batch": "64", "save_freq": "100",
                "batch_words": "conversations of a step",
            },
            {"max_length": "1024", "batch": "8", "tokens": "2048"},
            supervised=True,
        ),
        Recipe(
            "addition-sft",
            "A small model learns to add, without a GPU, in half a minute on two cores. Part one: imitation.",
            "A model of 0.33M random parameters (made next to this file) imitates a sloppy demonstrator. It ends\n"
            "with about a third of the sums right. Part two: cosmos-launch init addition-grpo -o grpo.toml",
            (HEAD, TINY_POLICY, TINY_SFT, CHECKPOINTS + NO_EXPORT, TINY_SFT_DATA),
            {"save_freq": "200"},
            {},
            supervised=True,
            is_tiny=True,
            makes_model=True,
        ),
        Recipe(
            "addition-grpo",
            "A small model learns to add, without a GPU, in a minute on two cores. Part two: reinforcement.",
            "Right answers are rewarded, and so is the format. The model stops blurting, reasons column by column\n"
            "and learns to carry: about 95 % of the sums it has never seen.",
            (HEAD, TINY_POLICY, TINY_GRPO, CHECKPOINTS + NO_EXPORT, TINY_GRPO_DATA),
            {"save_freq": "20"},
            {},
            is_tiny=True,
            needs_model=True,
        ),
    )
}  # fmt: skip
