"""ROLL's supervised fine-tuning (`sft_config.yaml`): one role, `sft_train`, whose keys are those of `actor_train`.

Each rule of `actor_train` is taken with both names, so that what several keys say together (`facts`) is found under
the one that it asks for.
"""

from __future__ import annotations

from dataclasses import replace

from convert.engine import values
from convert.engine.keys import words
from convert.engine.model import Result, implicit
from convert.engine.rules import ConversionContext, KeyPath, Rule
from convert.roll.actor_train import ACTOR_TRAIN_RULES
from convert.roll.converters import KEYS
from convert.roll.facts import global_batch
from convert.roll.pipeline import PIPELINE_RULES

ROLE = "sft_train"
_SHARED = words(
    "pipeline_cls pretrain exp_name seed output_dir track_with tracker_kwargs.project tracker_kwargs.name "
    "save_steps max_ckpt_to_keep logging_steps eval_steps resume_from_checkpoint num_gpus_per_node num_nodes "
    "profiler_timeline profiler_memory report_length_and_rewards is_offload_states "
    "is_offload_optimizer_states_in_train_step save_logging_board_dir render_save_dir model_download_type"
)
"""The top-level keys that mean the same in every pipeline of ROLL."""


def _accumulation(context: ConversionContext, leaf: KeyPath) -> Result:
    batch, formula = global_batch(context)
    return leaf.to(batch, note=f"global batch {formula}")


def _max_steps(context: ConversionContext, leaf: KeyPath) -> Result:
    steps = values.integer(leaf.value)
    if steps < 1:
        return implicit("num_train_epochs ends the run")
    return leaf.to(steps, steps, note="max_steps alone ends the run")


_OWN = {rule.key: rule for rule in KEYS.rules("sft_train", globals())}


def _of_the_role(rule: Rule) -> Rule:
    """A rule of the policy as one of `sft_train`, with the policy's name as another spelling."""
    key, *also = (name.replace("actor_train", ROLE, 1) for name in (rule.key, *rule.also))
    return replace(_OWN.get(rule.key, rule), key=key, also=(*also, rule.key, *rule.also))


SFT_RULES = (
    *(rule for rule in PIPELINE_RULES if rule.key in _SHARED),
    *KEYS.rules("sft", globals()),
    *map(_of_the_role, ACTOR_TRAIN_RULES),
)
