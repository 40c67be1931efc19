"""ROLL's supervised fine-tuning (`sft_config.yaml`): one role, `sft_train`, whose keys are those of `actor_train`.

Each rule of `actor_train` is taken with both names, so that what several keys say together (`facts`) is found under
the one that it asks for.
"""

from __future__ import annotations

from dataclasses import replace

from convert.engine import to, values
from convert.engine.keys import words
from convert.engine.model import Result, mapped
from convert.engine.rules import ConversionContext, KeyPath, Rule, computed
from convert.roll.actor_infer import VALIDATION_FILE
from convert.roll.actor_train import ACTOR_TRAIN_RULES
from convert.roll.converters import POLICY, template
from convert.roll.facts import global_batch
from convert.roll.pipeline import PIPELINE_RULES

_POLICY_ROLE, ROLE = "actor_train", "sft_train"
_BATCH = "train.train_batch_per_replica"
_OF_ROLLOUTS = "supervised fine-tuning generates nothing"


@computed(_BATCH, words="the global batch: one optimizer step")
def _accumulation(context: ConversionContext, leaf: KeyPath) -> Result:
    batch, formula = global_batch(context)
    return mapped((_BATCH, batch), note=f"global batch {formula}")


@computed("train.max_num_steps", "train.epoch", words="above 0 it alone ends the run; else num_train_epochs")
def _max_steps(context: ConversionContext, leaf: KeyPath) -> Result:
    steps = values.integer(leaf.value)
    if steps < 1:
        return to.always("num_train_epochs ends the run").run(context, leaf)
    return mapped(("train.max_num_steps", steps), ("train.epoch", steps), note="max_steps alone ends the run")


_OWN: dict[str, Rule] = {
    rule.key: rule
    for rule in (
        Rule(f"{ROLE}.training_args.gradient_accumulation_steps", _accumulation, default=1),
        Rule(f"{ROLE}.data_args.template", template(f"{ROLE}.data_args.template", ours=""), default="native"),
        Rule(f"{ROLE}.data_args.prompt", to.always("prompt_key names the column of the question")),
        Rule(f"{ROLE}.data_args.messages", to.always("prompt_key names the column of the question")),
        Rule(f"{ROLE}.data_args.response", to.always("response_key names the column of the answer")),
        Rule(f"{ROLE}.data_args.tag", to.always("one domain: no shares to keep")),
        Rule(f"{ROLE}.data_args.eval_file_name", to.always("ROLL takes validation.data_args.file_name")),
        Rule(f"{ROLE}.infer_batch_size", to.integer("validation.batch_size", "as it is", null="")),
        Rule(f"{ROLE}.model_update_frequency", to.always(_OF_ROLLOUTS)),
        Rule(f"{ROLE}.max_tokens_per_microbatch_in_infer", to.always("changes no number")),
        Rule(
            f"{ROLE}.sequence_packing_args.max_packed_sequence_length_forward", to.always("changes no number")
        ),
        Rule(f"{ROLE}.router_replay.mode", to.always(_OF_ROLLOUTS)),
    )
}


def _of_the_role(rule: Rule) -> Rule:
    """A rule of the policy as one of `sft_train`, with the policy's name as another spelling."""
    key = f"{ROLE}{rule.key.removeprefix(_POLICY_ROLE)}"
    own = _OWN.get(key, replace(rule, key=key))
    also = tuple(f"{ROLE}{name.removeprefix(_POLICY_ROLE)}" for name in rule.also)
    return replace(own, also=(*also, rule.key, *rule.also))


def _shared() -> tuple[Rule, ...]:
    """The top-level keys that mean the same in every pipeline of ROLL."""
    names = words(
        "pipeline_cls pretrain exp_name seed output_dir track_with tracker_kwargs.project tracker_kwargs.name "
        "save_steps max_ckpt_to_keep logging_steps eval_steps resume_from_checkpoint num_gpus_per_node num_nodes "
        "profiler_timeline profiler_memory report_length_and_rewards is_offload_states "
        "is_offload_optimizer_states_in_train_step save_logging_board_dir render_save_dir model_download_type"
    )
    return tuple(rule for rule in PIPELINE_RULES if rule.key in names)


def sft_rules() -> tuple[Rule, ...]:
    """All rules of an SFT file."""
    column = f"{POLICY}.{{}}_column_name".format
    length = to.integer("policy.model_max_length", "longer rows are left out and counted", null="")
    return (
        *_shared(),
        Rule("max_steps", _max_steps, default=-1),
        Rule("sequence_length", length),
        Rule("max_grad_norm", to.number("train.optm_grad_norm_clip"), default=1.0),
        Rule("prompt_key", to.text(column("prompt")), default="instruction"),
        Rule("query_key", to.text(column("query"), "as it is: it follows the question", "null: none")),
        Rule("response_key", to.text(column("response")), default="output"),
        Rule("global_template", template("global_template", ours="")),
        VALIDATION_FILE,
        *(
            Rule(f"validation.data_args.{name}", to.always("rows are read as those of sft_train"))
            for name in words("template preprocessing_num_workers dataset_dir dataset_type cache_path")
        ),
        *map(_of_the_role, ACTOR_TRAIN_RULES),
    )
