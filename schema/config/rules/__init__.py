"""Rules on which the sections must agree: pure functions from a `Config` to its problems, each one rule.

Every rule refuses a configuration that would fail, deadlock or silently do something else than it says; none
changes anything. One condition is a row (`rows`), what decides between several a function. They are grouped by what
they speak of:

    batch timing                    sizes and lengths; staleness and waits
    algorithm teacher               loss, advantages, KL terms; distillation
    training mesh placement         how a model is trained, and where
    trainable                       which parameters of it train
    named model loadable            the models that are named, and their tokenizer
    checkpoint                      what is saved, and how versions travel
    engine role                     generation; parts that need each other
    data reward                     the user's files and functions; an evaluation
    security                        names that can be printed, secrets; encryption
    profiler                        what is recorded, where and when
    idle                            keys that cannot act

A rule looks at values, not at what was written, so a resolved configuration, in which every key is written, meets
the same answers (but for two names of one thing, which must not contradict each other). It speaks also of keys whose
part this build lacks and `availability` refuses: where both speak of one key both are shown, so that whoever turns
to a build that has the part meets no second surprise. `check_warnings` names what works but is seldom meant.
"""

from __future__ import annotations

from schema.config.model_facts import FindFile, local_file
from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.rules.algorithm import ALGORITHM_RULES, ALGORITHM_WARNINGS
from schema.config.rules.batch import BATCH_RULES, BATCH_WARNINGS
from schema.config.rules.checkpoint import CHECKPOINT_RULES, WEIGHT_RULES
from schema.config.rules.data import DATA_RULES
from schema.config.rules.engine import ENGINE_RULES, ENGINE_WARNINGS, stop_strings_can_be_found
from schema.config.rules.idle import IDLE_RULES, IDLE_WARNINGS, keys_are_of_the_evaluation
from schema.config.rules.loadable import LOADABLE_RULES, LOADABLE_WARNINGS
from schema.config.rules.mesh import MESH_RULES
from schema.config.rules.mixture import MIXTURE_RULES
from schema.config.rules.model import MODEL_RULES, MODEL_WARNINGS, READING_RULES, model_warnings
from schema.config.rules.placement import PLACEMENT_RULES, PLACEMENT_WARNINGS
from schema.config.rules.profiler import PROFILER_RULES, PROFILER_WARNINGS
from schema.config.rules.reward import EVALUATION_RULES, REWARD_RULES
from schema.config.rules.role import ROLE_RULES, ROLE_WARNINGS
from schema.config.rules.rows import Refusal, Rule
from schema.config.rules.security import TEXT_RULES, TEXT_WARNINGS, TLS_RULES, TLS_WARNINGS
from schema.config.rules.teacher import TEACHER_RULES, TEACHER_WARNINGS, tokens_are_those_of_the_policy
from schema.config.rules.timing import TIMING_RULES, TIMING_WARNINGS
from schema.config.rules.trainable import TRAINABLE_RULES, TRAINABLE_WARNINGS
from schema.config.rules.training import TRAINING_RULES, TRAINING_WARNINGS


def check_rules(config: Config) -> list[Problem]:
    """Everything that the rules have against a configuration."""
    texts = [problem for rule in TEXT_RULES for problem in rule(config)]
    unusable = {problem.key.partition("[")[0] for problem in texts}  # what else is said of them is an echo
    rules = EVALUATION_RULES if config.is_evaluation else RULES
    problems = (problem for rule in rules for problem in rule(config))
    return texts + [problem for problem in problems if problem.key not in unusable]


RULES: tuple[Rule, ...] = (
    *BATCH_RULES,
    *TIMING_RULES,
    *ALGORITHM_RULES,
    *TEACHER_RULES,
    *TRAINING_RULES,
    *TRAINABLE_RULES,
    *CHECKPOINT_RULES,
    *ENGINE_RULES,
    *DATA_RULES,
    *MIXTURE_RULES,
    *MODEL_RULES,
    *LOADABLE_RULES,
    *REWARD_RULES,
    *ROLE_RULES,
    *MESH_RULES,
    *PLACEMENT_RULES,
    *PROFILER_RULES,
    *TLS_RULES,
    *WEIGHT_RULES,
    *IDLE_RULES,
)


def check_models(config: Config, find: FindFile = local_file) -> list[Problem]:
    """Everything that the rules have against a configuration for the models that it names, and its meshes.

    These rules stand among `RULES`, where a model that is not on the machine passes them. A worker applies them again
    when it has fetched the files, before it loads weights. find: where files of a model are.
    """
    rules = (*READING_RULES, *LOADABLE_RULES, tokens_are_those_of_the_policy, stop_strings_can_be_found)
    read = [problem for rule in rules for problem in rule(config, find)]
    return read + [problem for rule in MESH_RULES for problem in rule(config)]


def check_model_warnings(config: Config, find: FindFile = local_file) -> list[Problem]:
    """Return the warnings that a worker has to repeat: see `check_models`."""
    loadable = [problem for rule in LOADABLE_WARNINGS for problem in rule(config, find)]
    return [*model_warnings(config, find), *loadable]


WARNINGS: tuple[Rule, ...] = (
    Refusal("train.master_dtype", lambda c: c.train.master_dtype == "bfloat16",
        "updates smaller than 1/256 of a weight are lost in bfloat16 master weights", 'write {!} = "float32"'),
    Refusal("train.ckpt.enable_checkpoint", lambda c: not (c.train.ckpt.enable_checkpoint or c.validation.only),
        "without checkpoints the loss of all policy replicas ends the job", "write {!} = true"),
    *BATCH_WARNINGS,
    *ALGORITHM_WARNINGS,
    *TEACHER_WARNINGS,
    *TIMING_WARNINGS,
    *TRAINING_WARNINGS,
    *TRAINABLE_WARNINGS,
    *ROLE_WARNINGS,
    *ENGINE_WARNINGS,
    *MODEL_WARNINGS,
    *LOADABLE_WARNINGS,
    *PLACEMENT_WARNINGS,
    *PROFILER_WARNINGS,
    *TLS_WARNINGS,
    *TEXT_WARNINGS,
    *IDLE_WARNINGS,
)  # fmt: skip


def check_warnings(config: Config) -> list[Problem]:
    """Return warnings of what works but is seldom meant: they are shown and never refuse."""
    if config.is_evaluation:
        return keys_are_of_the_evaluation(config)
    return [warning for rule in WARNINGS for warning in rule(config)]
