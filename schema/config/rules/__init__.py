"""What the sections must agree on: pure functions `Config -> list[Problem]`, each one rule.

Every rule refuses a configuration that would fail, deadlock or silently do something else than it says; none
changes anything. They stand by what they speak of:

    batch length timing             sizes, lengths, waits
    loss estimator kl schedule      the algorithm
    precision lora mesh placement   how a model is trained, and where
    architecture model              the model that is named
    tls secrets                     encryption, what must not be seen
    engine checkpoint upload role   other parts, and parts that need each other
    weights                         how versions travel
    data reward evaluation          the user's files and functions
    text                            names and paths that can be printed
    idle                            keys that cannot act

A rule looks at values, not at what was written, so a resolved configuration, in which every key is written, meets
the same answers (but for two names of one thing, which must not contradict each other). It speaks also of keys whose
part this build lacks and `availability` refuses: where both speak of one key both are shown, so that whoever turns
to a build that has the part meets no second surprise. `check_warnings` names what works but is seldom meant.
"""

from __future__ import annotations

from collections.abc import Callable

from schema.config.availability import check_left_out
from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.rules.architecture import ARCHITECTURE_RULES, ARCHITECTURE_WARNINGS
from schema.config.rules.batch import BATCH_RULES
from schema.config.rules.checkpoint import CHECKPOINT_RULES
from schema.config.rules.data import DATA_RULES
from schema.config.rules.engine import ENGINE_RULES
from schema.config.rules.estimator import ESTIMATOR_RULES
from schema.config.rules.evaluation import EVALUATION_RULES
from schema.config.rules.exactness import EXACTNESS_WARNINGS
from schema.config.rules.idle import IDLE_RULES, IDLE_WARNINGS, keys_are_of_the_evaluation
from schema.config.rules.kl import KL_RULES
from schema.config.rules.length import LENGTH_RULES
from schema.config.rules.lora import LORA_RULES, LORA_WARNINGS
from schema.config.rules.loss import LOSS_RULES
from schema.config.rules.mesh import MESH_RULES
from schema.config.rules.model import MODEL_WARNINGS
from schema.config.rules.placement import PLACEMENT_RULES, PLACEMENT_WARNINGS
from schema.config.rules.precision import PRECISION_RULES, PRECISION_WARNINGS
from schema.config.rules.role import ROLE_RULES, ROLE_WARNINGS
from schema.config.rules.schedule import SCHEDULE_RULES, SCHEDULE_WARNINGS
from schema.config.rules.secrets import SECRET_WARNINGS
from schema.config.rules.text import TEXT_RULES
from schema.config.rules.timing import TIMING_RULES
from schema.config.rules.tls import TLS_RULES, TLS_WARNINGS
from schema.config.rules.upload import UPLOAD_RULES
from schema.config.rules.weights import WEIGHT_RULES

Rule = Callable[[Config], list[Problem]]


def check_rules(config: Config) -> list[Problem]:
    """Everything that the rules have against a configuration."""
    texts = [problem for rule in TEXT_RULES for problem in rule(config)]
    unusable = {problem.key.partition("[")[0] for problem in texts}  # what else is said of them is an echo
    rules = EVALUATION_RULES if config.is_evaluation else RULES
    found = (problem for rule in rules for problem in rule(config))
    return texts + [problem for problem in found if problem.key not in unusable]


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
    *UPLOAD_RULES,
    *ENGINE_RULES,
    *DATA_RULES,
    *ROLE_RULES,
    *MESH_RULES,
    *ARCHITECTURE_RULES,
    *PLACEMENT_RULES,
    *TLS_RULES,
    *WEIGHT_RULES,
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
    hint = f"write {key} = true"
    return [Problem(key, message, False, hint)]


WARNINGS: tuple[Rule, ...] = (
    master_weights_are_wide,
    losses_can_be_made_good,
    *EXACTNESS_WARNINGS,
    *SCHEDULE_WARNINGS,
    *PRECISION_WARNINGS,
    *LORA_WARNINGS,
    *ROLE_WARNINGS,
    *ARCHITECTURE_WARNINGS,
    *MODEL_WARNINGS,
    *PLACEMENT_WARNINGS,
    *TLS_WARNINGS,
    *SECRET_WARNINGS,
    *IDLE_WARNINGS,
)


def check_warnings(config: Config) -> list[Problem]:
    """What is allowed and works, but seldom meant: shown, never refused."""
    if config.is_evaluation:
        return keys_are_of_the_evaluation(config)
    return [*check_left_out(config), *(warning for rule in WARNINGS for warning in rule(config))]
