"""Files of systems that have no reader: what they look like, and what can be done.

A configuration is recognised by a few telling keys, a script by the modules and options that it names. The table has
a row for each system. Those that are made from verl keep most of its keys, so any one of their own keys tells them,
and they come first. A file with a key that only a system with a reader has is read as that one's, unless it matches a
system made from verl.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from convert.engine.keys import lookup, words


@dataclass(frozen=True)
class Foreign:
    """A system without a reader.

    title: its name in sentences. signs: each a group of dotted keys that tell it when a file has all of them.
    script: a pattern of what a script or command line of it names. remedy: what can be done, before what can always
    be done.
    """

    title: str
    signs: tuple[str, ...] = ()
    script: str = ""
    remedy: str = ""
    is_made_from_verl: bool = False

    def matches(self, data: Mapping[str, Any]) -> bool:
        """Whether a configuration has all keys of one of the signs."""
        absent = object()
        return any(
            all(lookup(data, tuple(key.split(".")), absent) is not absent for key in sign.split())
            for sign in self.signs
        )


_FROM_VERL = (
    "it is made from verl, and its own parts, which decide what is trained, have no counterpart here. To convert "
    "what it shares with verl, and write the rest by hand: --system verl"
)
_NO_JOB = (
    "it says how a job is started or sharded; what is trained stands in the file or script of the training"
)

SYSTEMS_WITHOUT_READER: tuple[Foreign, ...] = (
    Foreign(
        "EasyR1",
        ("worker.actor", "worker.rollout", "worker.reward", "worker.ref", "worker.critic"),
        r"verl\.trainer\.main(?![\w.])|(?<![\w.])worker\.(?:actor|rollout|reward|ref|critic)\.",
        "it is made from verl and has most keys under names of its own; `cosmos-launch explain` knows those of verl",
        is_made_from_verl=True,
    ),
    Foreign(
        "RAGEN",
        ("es_manager", "agent_proxy", "ctx_manager"),
        r"(?<![\w.])(?:es_manager|agent_proxy|ctx_manager)\.|(?<![\w/])ragen\.",
        _FROM_VERL,
        is_made_from_verl=True,
    ),
    Foreign("rLLM", ("rllm",), r"(?<![\w/])rllm\.|(?<![\w/])rllm (?:train|eval)\b", _FROM_VERL, True),
    Foreign(
        "verl-agent",
        ("env.env_name actor_rollout_ref", "env.env_name algorithm", "algorithm.gigpo"),
        r"(?<![\w.])env\.env_name=|(?<![\w.])algorithm\.gigpo\.",
        _FROM_VERL,
        is_made_from_verl=True,
    ),
    Foreign("Agent Lightning", ("agentlightning",), r"\bagentlightning\b", _FROM_VERL, True),
    Foreign(
        "SkyRL",
        (
            "trainer.placement.colocate_all",
            "trainer.policy.model",
            "generator.sampling_params",
            "generator.n_samples_per_prompt",
            "generator.num_inference_engines",
            "generator.inference_engine",
            "environment.env_class",
        ),
        r"\bskyrl(?:_\w+|-\w+)?\b|(?<![\w.])generator\.(?:n_samples_per_prompt|num_inference_engines)=",
    ),
    Foreign(
        "NeMo RL",
        (
            "grpo.num_prompts_per_step",
            "loss_fn policy",
            "policy.dtensor_cfg",
            "policy.megatron_cfg",
            "policy.generation.vllm_cfg",
            "policy.train_global_batch_size",
            "distillation policy.model_name",
        ),
        r"\bnemo_rl\b|\brun_(?:grpo|sft|dpo|rm|distillation)(?:_\w+)?\.py",
    ),
    Foreign(
        "NeMo Aligner",
        (
            "trainer.ppo",
            "trainer.grpo",
            "trainer.dpo",
            "trainer.sft model",
            "pretrained_checkpoint.restore_from_path",
        ),
        r"\bnemo_aligner\b|\btrain_gpt_\w+\.py",
    ),
    Foreign(
        "prime-rl",
        (
            "orchestrator",
            "trainer.optim inference",
            "trainer.model.impl",
            "inference model.name",
            "inference.model",
            "inference.parallel",
            "model.name optim.lr",
            "rollouts_per_example",
        ),
        r"\bprime[-_]rl\b|\buv run (?:rl|sft|trainer|orchestrator|inference) (?:@|--\w+ @)",
    ),
    Foreign(
        "AReaL",
        (
            "allocation_mode",
            "gconfig",
            "actor.mb_spec",
            "train_dataset.batch_size actor",
            "rollout.max_head_offpolicyness",
            "cluster.name_resolve",
        ),
        r"\bareal(?:ite)?\b(?!/)",
    ),
    Foreign(
        "slime or miles",
        ("hf_checkpoint rollout_batch_size", "hf_checkpoint num_rollout", "rollout_num_gpus", "num_rollout"),
        r"--hf-checkpoint\b|--num-rollout\b|--rollout-num-gpus\b|--rollout-function-path\b|\bslime\.|\bmiles\.",
    ),
    Foreign(
        "OpenRLHF",
        ("prompt_data pretrain", "prompt_data rollout_batch_size", "prompt_data n_samples_per_prompt"),
        r"\bopenrlhf\b|--reward_pretrain\b|--remote_rm_url\b|--vllm_num_engines\b|--init_kl_coef\b",
    ),
    Foreign(
        "Trinity-RFT",
        ("algorithm.algorithm_type", "explorer buffer", "explorer synchronizer"),
        r"\btrinity run\b|\btrinity\.(?:cli|common|explorer|trainer)\b",
    ),
    Foreign("PipelineRL", ("finetune.rl", "finetune actor.rollout_policy"), r"\bpipelinerl\b"),
    Foreign(
        "verifiers",
        ("trainer.args env.id", "env.id trainer.run_name"),
        r"\bverifiers\b|\bvf-(?:rl|eval|train)\b",
    ),
    Foreign(
        "torchforge",
        ("policy.engine_args", "generator.engine_args", "policy.engine_config", "provisioner"),
        r"\bforge\.(?:actors|controller|data)\b|\bapps\.(?:grpo|sft)\.main\b",
    ),
    Foreign(
        "open-instruct",
        (
            "dataset_mixer_list",
            "mixer_list",
            "model_name_or_path with_tracking",
            "model_name_or_path use_slow_tokenizer",
        ),
        r"\bopen_instruct\b|--dataset_mixer_list\b",
    ),
    Foreign(
        "ms-swift",
        ("rlhf_type", "tuner_type model", "train_type model dataset"),
        r"\bswift (?:rlhf|sft|pt|rollout)\b|\bmegatron (?:rlhf|sft|pt)\b|--rlhf_type\b|\bswift\.llm\b",
    ),
    Foreign(
        "LLaMA-Factory",
        ("finetuning_type", "stage do_train", "stage dataset template"),
        r"\bllamafactory\b|\bllamafactory-cli\b|--finetuning_type\b",
    ),
    Foreign(
        "axolotl",
        ("base_model datasets", "base_model sequence_len", "base_model micro_batch_size", "base_model rl"),
        r"\baxolotl\b",
    ),
    Foreign(
        "torchtune",
        tuple(
            f"{table}._component_" for table in words("model tokenizer dataset loss optimizer checkpointer")
        ),
        r"\btorchtune\b|\btune (?:run|download)\b",
    ),
    Foreign(
        "torchtitan",
        ("model.flavor", "training.local_batch_size", "training.seq_len parallelism", "job.config_file"),
        r"\btorchtitan\b",
    ),
    Foreign("Oumi", ("model.model_name training.trainer_type", "training.trainer_type"), r"\boumi\b"),
    Foreign("trlX", ("method.name train.total_steps", "method.name tokenizer"), r"\btrlx\b"),
    Foreign("Unsloth", (), r"\bunsloth\b"),
    Foreign("ART", (), r"\bopenpipe\b|^\s*(?:import art|from art)\b"),
    Foreign("Tinker", (), r"\btinker(?:_cookbook)?\b"),
    Foreign("Tunix", ("rl_training_config",), r"\btunix\b"),
    Foreign(
        "TRL",
        (
            "model_name_or_path dataset_name",
            "model_name_or_path num_generations",
            "model_name_or_path max_completion_length",
            "model_name_or_path per_device_train_batch_size",
            "model_name_or_path dataset_mixer",
            "model_name_or_path dataset_mixture",
            "dataset_name per_device_train_batch_size",
            "num_generations max_completion_length",
        ),
        r"\btrl\b|\bopen_r1\b|\bexamples/scripts/(?:sft|dpo|grpo|ppo|rloo|kto)\w*\.py|\b(?:GRPO|SFT|DPO|PPO|RLOO|Reward|KTO|ORPO)(?:Trainer|Config)\b|--num_generations\b",
    ),
    Foreign("Megatron-LM", (), r"\bpretrain_gpt\.py|--tensor-model-parallel-size\b"),
    Foreign("accelerate", ("compute_environment", "distributed_type num_processes"), "", _NO_JOB),
    Foreign("DeepSpeed", ("zero_optimization", "train_micro_batch_size_per_gpu"), "", _NO_JOB),
    Foreign("Kubernetes", ("apiVersion kind",), "", _NO_JOB),
    Foreign("SkyPilot", ("resources run",), "", _NO_JOB),
    Foreign(
        "a model (its config.json)", ("architectures model_type",), "", "name the model in a configuration"
    ),
    Foreign("a Jupyter notebook", ("nbformat cells",), "", ""),
)
"""In the order in which they are asked."""

_MODULE = re.compile(r"(?:-m\s+|^\s*)((?:verl|recipe)\.[\w.]+)", re.MULTILINE)
VERL_COMMAND = "python3 -m {module} … --cfg job --resolve > run.yaml"
VERL_MAIN = "verl.trainer.main_ppo"
_VERL_SCRIPT = re.compile(
    r"(?<![\w/.])(?:verl\.trainer|verl\.\w+\.main|recipe\.\w+)|(?<![\w.])(?:actor_rollout_ref\.|"
    r"algorithm\.(?:adv_estimator|use_kl_in_reward|norm_adv_by_std_in_grpo)=)"
)
_ROLL_SCRIPT = re.compile(
    r"--config_path\b|\bstart_\w+_pipeline\b|(?<![\w/.])roll\.(?:pipeline|distributed|configs|utils)\b"
)
_COSMOS_SCRIPT = re.compile(r"\bcosmos[-_]rl\b|\bcosmos-launch\b")

_SHELL = re.compile(
    r"^[ \t]*(?:\w+=\S+[ \t]+)*(?:exec |nohup |srun |(?:uv|poetry) run )?(?:python[\d.]*|torchrun|deepspeed|bash|sh|"
    r"srun|sbatch|accelerate launch|ray job submit|uv run|llamafactory-cli|axolotl|tune run|swift|trl)(?=\s|$)",
    re.MULTILINE,
)
_OPTION = re.compile(r"(?:^|\s)--[a-zA-Z][\w.-]*(?=[\s=\\]|$)", re.MULTILINE)
_PYTHON = re.compile(
    r"^(?:from [\w.]+ import |import [\w.]+|def \w+\(|class \w+[:(]|if __name__ )", re.MULTILINE
)
_OVERRIDE = re.compile(r"(?:^|\s)[+~]{0,2}[a-zA-Z_][\w@/]*(?:\.[\w@/]+)+=\S", re.MULTILINE)
_COMMENT = re.compile(r"^[ \t]*#.*$", re.MULTILINE)
_KEY = re.compile(r"^[ \t]*(?:- )?[\w.]+:(?=[ \t]|$)", re.MULTILINE)


def other_system(data: Mapping[str, Any]) -> Foreign | None:
    """The system without a reader that a configuration looks like; None where no row matches."""
    return next((system for system in SYSTEMS_WITHOUT_READER if system.matches(data)), None)


def by_hand(title: str = "") -> str:
    """The way on for a file that has no reader. title: the system that it may be a fork of."""
    new_file = (
        "write the job as a configuration of ours: `cosmos-launch init` begins one, and `cosmos-launch explain NAME` "
        "finds our key for a name of verl, ROLL or cosmos-rl"
    )
    if not title:
        return new_file[0].upper() + new_file[1:]
    return f"of a fork of {title}, remove its own keys or accept each by name (--allow-unknown KEY); else {new_file}"


def described(system: Foreign) -> tuple[str, str]:
    """The message and the hint of an error about a configuration of this system."""
    message = f"this looks like a file of {system.title}, which `convert` does not read"
    return message, _joined(system.remedy)


def script_kind(text: str, name: str) -> str:
    """Which script a text is by its name or first line; "" for any other text."""
    if name.endswith((".sh", ".bash", ".zsh", ".slurm", ".sbatch")) or re.match(r"#!.*\b(?:ba|z|)sh\b", text):
        return "a shell script"
    if name.endswith(".py") or re.match(r"#!.*python", text):
        return "a Python script"
    return "a script" if text.startswith("#!") else ""


def command_kind(text: str) -> str:
    """The kind of a text that cannot be read as keys: a script, a command line, words of one; "" for any other."""
    code = _COMMENT.sub("", text)
    if _PYTHON.search(code) and not _SHELL.search(code):
        return "a Python script"
    if len(_KEY.findall(code)) > 1:
        return ""
    if len(_OVERRIDE.findall(code)) >= 2 and not _SHELL.search(code):
        return "words of a command line"
    if _SHELL.search(code) or len(_OPTION.findall(code)) >= 2:
        return "a command line"
    return ""


def script_problem(kind: str, text: str) -> tuple[str, str]:
    """The message and the hint of an error about a script or a command line.

    kind: as `script_kind` or `command_kind` name it.
    """
    code = _COMMENT.sub("", text)
    counts = {
        system.title: len(re.findall(system.script, code, re.MULTILINE))
        for system in SYSTEMS_WITHOUT_READER
        if system.script
    }
    with_reader = {"verl": _VERL_SCRIPT, "ROLL": _ROLL_SCRIPT, "cosmos-rl": _COSMOS_SCRIPT}
    of_verl = [
        system.title
        for system in SYSTEMS_WITHOUT_READER
        if counts.get(system.title) and system.is_made_from_verl
    ]
    counts |= {title: len(pattern.findall(code)) for title, pattern in with_reader.items()}
    title = max(counts, key=lambda name: counts[name]) if any(counts.values()) else ""
    if title == "verl" and of_verl:
        title = of_verl[0]
    if not title:
        return (
            f"{kind}, not a configuration",
            f"convert the YAML or TOML that it names, if it names one. {by_hand()}",
        )
    return f"{kind} of {title}, not a configuration", _script_hint(title, code)


def _script_hint(title: str, code: str) -> str:
    if title == "verl":
        module = _MODULE.search(code)
        command = VERL_COMMAND.format(module=module[1] if module else VERL_MAIN)
        return (
            f"let its own command print what it composes, with all its overrides, and convert that: {command}"
        )
    if title == "ROLL":
        return "convert the YAML that its --config_path and --config_name name"
    if title == "cosmos-rl":
        return "convert the TOML that its --config names"
    remedy = next(system.remedy for system in SYSTEMS_WITHOUT_READER if system.title == title)
    return _joined(remedy)


def _joined(remedy: str) -> str:
    return f"{remedy}. {by_hand()}" if remedy else by_hand()
