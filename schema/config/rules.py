"""What the sections must agree on: pure functions `Config -> list[Problem]`, each one rule.

Every rule refuses a configuration that would fail, deadlock or silently do something else than it says; none
changes anything. They stand by what they speak of:

    batches  batch_rules      lengths     length_rules      time       timing_rules
    losses   loss_rules       advantages  estimator_rules   KL         kl_rules
    schedule schedule_rules   precision   precision_rules   LoRA       lora_rules
    meshes   mesh_rules       models      architecture_rules           roles      role_rules
    devices  placement_rules  checkpoints checkpoint_rules  engines    engine_rules
    the user's files and functions        data_rules    what cannot act  idle_rules

A rule looks at values, not at what was written, so a resolved configuration, in which every key is written, meets
the same answers (but for two names of one thing, which must not contradict each other). It speaks also of keys whose
part this build lacks and `availability` refuses: where both speak of one key both are shown, so that whoever turns
to a build that has the part meets no second surprise. `check_warnings` names what works but is seldom meant.
"""

from __future__ import annotations

from collections.abc import Callable

from schema.config.architecture_rules import ARCHITECTURE_RULES, ARCHITECTURE_WARNINGS
from schema.config.batch_rules import BATCH_RULES
from schema.config.checkpoint_rules import CHECKPOINT_RULES
from schema.config.data_rules import DATA_RULES
from schema.config.engine_rules import ENGINE_RULES
from schema.config.estimator_rules import ESTIMATOR_RULES
from schema.config.evaluation_rules import EVALUATION_RULES
from schema.config.idle_rules import IDLE_RULES, IDLE_WARNINGS, keys_are_of_the_evaluation
from schema.config.kl_rules import KL_RULES
from schema.config.length_rules import LENGTH_RULES
from schema.config.lora_rules import LORA_RULES, LORA_WARNINGS
from schema.config.loss_rules import LOSS_RULES
from schema.config.mesh_rules import MESH_RULES
from schema.config.model_rules import MODEL_WARNINGS
from schema.config.placement_rules import PLACEMENT_RULES, PLACEMENT_WARNINGS
from schema.config.precision_rules import PRECISION_RULES, PRECISION_WARNINGS
from schema.config.problem import Problem
from schema.config.role_rules import ROLE_RULES, ROLE_WARNINGS
from schema.config.root import Config
from schema.config.schedule_rules import SCHEDULE_RULES, SCHEDULE_WARNINGS
from schema.config.timing_rules import TIMING_RULES

Rule = Callable[[Config], list[Problem]]


def check_rules(config: Config) -> list[Problem]:
    """Everything that the rules have against a configuration."""
    rules = EVALUATION_RULES if config.is_evaluation else RULES
    return [problem for rule in rules for problem in rule(config)]


RULES: tuple[Rule, ...] = (
    *BATCH_RULES,
    *TIMING_RULES,
    *LOSS_RULES,
    *ESTIMATOR_RULES,
    *KL_RULES,
    *LENGTH_RULES,
    *SCHEDULE_RULES,
    *PRECISION_RULES,
    *LORA_RULES,
    *CHECKPOINT_RULES,
    *ENGINE_RULES,
    *DATA_RULES,
    *ROLE_RULES,
    *MESH_RULES,
    *ARCHITECTURE_RULES,
    *PLACEMENT_RULES,
    *IDLE_RULES,
)


def master_weights_are_wide(config: Config) -> list[Problem]:
    """Warning: bfloat16 has 8 bits of precision."""
    if config.train.master_dtype != "bfloat16":
        return []
    key = "train.master_dtype"
    message = "updates smaller than 1/256 of a weight are lost in bfloat16 master weights"
    return [Problem(key, message, "bfloat16", f'write {key} = "float32"')]


def losses_can_be_made_good(config: Config) -> list[Problem]:
    """Warning: without checkpoints there is nothing to restart from."""
    if config.train.ckpt.enable_checkpoint:
        return []
    key = "train.ckpt.enable_checkpoint"
    message = "without checkpoints the loss of all policy replicas ends the job"
    hint = f'write {key} = true and train.ckpt.save_mode = "sync"'
    return [Problem(key, message, False, hint)]


WARNINGS: tuple[Rule, ...] = (
    master_weights_are_wide,
    losses_can_be_made_good,
    *SCHEDULE_WARNINGS,
    *PRECISION_WARNINGS,
    *LORA_WARNINGS,
    *ROLE_WARNINGS,
    *ARCHITECTURE_WARNINGS,
    *MODEL_WARNINGS,
    *PLACEMENT_WARNINGS,
    *IDLE_WARNINGS,
)


def check_warnings(config: Config) -> list[Problem]:
    """What is allowed and works, but seldom meant: shown, never refused."""
    if config.is_evaluation:
        return keys_are_of_the_evaluation(config)
    return [warning for rule in WARNINGS for warning in rule(config)]
