"""The closed list of ROLL's keys without a counterpart, its part of that of `convert.engine.unsupported`."""

from __future__ import annotations

from pathlib import Path

from convert.engine.fallback import MEGATRON_SPEED
from convert.engine.keys import words
from convert.engine.table import Table
from convert.engine.unsupported import EITHER_WAY, ClosedList

THINKING = dict.fromkeys(words("native qwen2_5 qwen3"), True) | dict.fromkeys(
    words("native_nonthinking qwen3_nothink"), False
)
"""ROLL's templates that are the tokenizer's own -> whether it thinks, where it can. `native` and `qwen2_5` leave that
to the template, which then thinks."""

DPO_KEYS = words("chosen_key rejected_key ipo beta label_smoothing")
DISTILLATION_ROLES = words("student teacher student_train student_infer")

_MEDIA = words(
    "image_max_pixels image_min_pixels video_folder video_fps video_max_frames video_min_frames video_max_pixels "
    "video_min_pixels video_total_pixels custom_data_kwargs_func"
)
_SPEED = (*MEGATRON_SPEED, *words("recompute_method recompute_num_layers recompute_modules attention_backend"))
_SETTINGS = "<trainer>.strategy_args.strategy_config"

ROLES = words("actor_train actor_infer reference critic validation sft_train")
_KINDS = {
    "<role>": ROLES,
    "<trainer>": words("actor_train reference critic sft_train"),
    "<environments>": words("train_env_manager val_env_manager"),
}


def _general(key: str) -> tuple[str, ...]:
    """The names under which a key of one role stands in the list; supervised fine-tuning has the policy's entries."""
    role, _, rest = key.partition(".")
    policy = (f"actor_train.{rest}",) if role == "sft_train" else ()
    return (*policy, *(f"{kind}.{rest}" for kind, roles in _KINDS.items() if rest and role in roles))


_TABLES = (
    *ROLES,
    *DISTILLATION_ROLES,
    *_KINDS["<environments>"],
    *words(
        "rewards reward reward_model reward_normalization train_infer_correction dataset_filter vlm_filter "
        "custom_envs custom_env"
    ),
)
"""The tables in which every key may decide what is trained."""

_TEMPLATES = ", ".join(map(repr, THINKING))
LISTED = Table(Path(__file__).with_name("unsupported.txt"), globals(), {"EITHER_WAY": EITHER_WAY})

ROLL = ClosedList(LISTED.reasons("reasons"), LISTED.neutral("method"), _general, _TABLES, flat=True)
