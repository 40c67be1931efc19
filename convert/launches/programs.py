"""Programs that start jobs of other systems; verl's, with the file that configures each and where it is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from convert.engine.keys import words
from convert.hydra.words import Override

_SYSTEMS = re.compile(
    r"(?P<verl>(?:verl|recipe)(?:\.\w+)+|(?:\S*/)?(?:verl|recipe)/\S+\.py)"
    r"|(?P<roll>(?:\S*/)?start_\w*pipeline\w*\.py)"
    r"|(?P<cosmos>(?:\S*/)?cosmos-rl|cosmos_rl(?:\.\w+)*)"
)
_NOT_A_JOB = re.compile(r"\.(?:model_merger|data_preprocess|preprocess|tools?|scripts|utils|download)\b")
_RL = "actor_rollout_ref.actor.strategy actor_rollout_ref.ref.strategy critic.strategy"
ENGINES = {"dp": "fsdp", "megatron": "megatron", "veomni": "veomni", "torchtitan": "torchtitan"}
"""Names in verl's files -> the strategy that they set."""


@dataclass(frozen=True)
class Program:
    """kind: of the reader. config: the name of its configuration. folders: where it is below verl's repository.

    defaults: what its configuration says other than the table of this kind.
    """

    kind: str
    config: str
    folders: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)


_SFT_ENGINE = {
    "optim.lr": 1e-3, "optim.betas": [0.9, 0.999], "optim.weight_decay": 0.01, "optim.lr_warmup_steps_ratio": 0.0,
    "optim.lr_scheduler_type": "constant", "optim.clip_grad": 1.0, "data.messages_key": "messages",
    "data.use_dynamic_bsz": True, "data.max_token_len_per_gpu": 8192, "data.max_length": 1024,
    "data.train_batch_size": 256, "data.micro_batch_size_per_gpu": 4, "trainer.n_gpus_per_node": 1,
    "trainer.total_epochs": 4,
}  # fmt: skip
_TRAINER = ("verl/trainer/config", "trainer/config", "config")
_PROGRAMS = (
    (r"main_eval", Program("evaluation", "evaluation", _TRAINER)),
    (r"fsdp_sft_trainer", Program("sft", "sft_trainer", _TRAINER)),
    (r"sft_trainer", Program("sft", "sft_trainer_engine", _TRAINER, _SFT_ENGINE)),
    (r"dapo", Program("rl", "dapo_trainer", ("recipe/dapo/config", *_TRAINER))),
    (r"fully_async", Program("rl", "fully_async_ppo_trainer",
        ("verl/experimental/fully_async_policy/config", *_TRAINER))),
    (r"one_step_off", Program("rl", "one_step_off_ppo_trainer",
        ("verl/experimental/one_step_off_policy/config", *_TRAINER))),
)  # fmt: skip
_USUAL = Program("rl", "ppo_trainer", _TRAINER)

OWN_FILES = frozenset(
    words(
        """ppo_trainer ppo_megatron_trainer sft_trainer sft_trainer_engine evaluation dapo_trainer
        dapo_megatron_trainer fully_async_ppo_trainer fully_async_ppo_megatron_trainer one_step_off_ppo_trainer
        one_step_off_ppo_megatron_trainer legacy_reward_impl data/legacy_data rollout/rollout model/hf_model
        reward/reward algorithm/rollout_correction distillation/distillation transfer_queue/transfer_queue
        profiler/profiler"""
    )
) | {f"{group}/{name}_{group}" for group in ("actor", "ref", "critic") for name in ENGINES} | {
    f"{group}/{name}" for group in ("model_engine", "optim", "engine") for name in (*ENGINES, "fsdp", "automodel")
}  # fmt: skip
"""Names of verl's own files: what they say is known where they are not here."""


def system_of(word: str, before: str = "") -> str | None:
    """The system whose jobs a word of a command line starts, by its name on our command line; None: of none.

    before: the word in front of it.
    """
    match = _SYSTEMS.fullmatch(word)
    if match is None or _NOT_A_JOB.search(word):
        return None
    is_module = bool(match["verl"]) and "/" not in word
    if is_module and before not in ("", "-m", "--module"):
        return None  # a word of a message, or a value
    return {"verl": "verl", "roll": "roll", "cosmos": "cosmos-rl"}[str(match.lastgroup)]


def program(name: str) -> Program:
    """The program of a module or file of verl."""
    last = name.removesuffix(".py").replace("/", ".")
    return next((of for pattern, of in _PROGRAMS if re.search(pattern, last)), _USUAL)


def is_choice(word: Override) -> bool:
    """Whether a word chooses one of verl's own files for a table: `engine=megatron`, `actor@…=dp_actor`."""
    return word.package is not None or f"{word.key}/{word.value}" in OWN_FILES


def engine_keys(kind: str, config: str, overrides: Sequence[Override]) -> tuple[str, dict[str, str]]:
    """The engine that a configuration's name or the words choose ("" for FSDP), and keys that its files set."""
    engine = next((name for name in ENGINES if f"_{name}_" in config), "")
    for word in overrides:
        if word.key in ("model_engine", "engine") and isinstance(word.value, str):
            engine = str(word.value)
        elif word.key == "actor" and word.package and str(word.value).endswith("_actor"):
            engine = str(word.value).removesuffix("_actor")
    if engine in ("", "dp", "fsdp"):
        return "", {}
    keys = "engine.strategy" if kind == "sft" else _RL
    return engine, dict.fromkeys(words(keys), ENGINES.get(engine, engine))
