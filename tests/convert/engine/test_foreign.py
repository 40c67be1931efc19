"""Files and scripts of systems without a reader are refused with what they look like; those of ours never are."""

from __future__ import annotations

from pathlib import Path

import pytest

from convert import convert_text
from convert.engine.foreign import SYSTEMS_WITHOUT_READER, by_hand, other_system
from tests.schema.config_samples import refused

_EASYR1 = (
    "data: {prompt_key: problem, rollout_batch_size: 512}\nalgorithm: {adv_estimator: grpo, disable_kl: false}\n"
    "worker: {actor: {global_batch_size: 128}, rollout: {n: 5}}\ntrainer: {n_gpus_per_node: 8}"
)
_RAGEN = (
    "defaults: [ppo_trainer, envs]\nactor_rollout_ref: {actor: {use_ref: true}, rollout: {top_p: 1.0}}\n"
    "algorithm: {adv_estimator: gae, bi_level_gae: false}\nagent_proxy: {max_turn: 5}\nes_manager: {train: {}}"
)
FILES = {
    "EasyR1": _EASYR1,
    "RAGEN": _RAGEN,
    "rLLM": "defaults: [ppo_trainer]\nactor_rollout_ref: {rollout: {mode: async}}\nrllm: {agent: {name: x}}",
    "verl-agent": "actor_rollout_ref: {rollout: {n: 1}}\nenv: {env_name: Sokoban, rollout: {n: 8}}",
    "SkyRL": "trainer: {policy: {model: {path: x}}}\ngenerator: {n_samples_per_prompt: 5}",
    "NeMo RL": "grpo: {num_prompts_per_step: 32}\nloss_fn: {ratio_clip_min: 0.2}\npolicy: {model_name: x}",
    "prime-rl": "[model]\nname = 'x'\n[orchestrator]\nbatch_size = 128\n[trainer.optim]\nlr = 3e-6\n[inference]",
    "AReaL": "allocation_mode: sglang.d4\nactor: {path: x, mb_spec: {}}\nrollout: {}\ngconfig: {n_samples: 4}",
    "slime or miles": "hf_checkpoint: x\nrollout_batch_size: 32\nn_samples_per_prompt: 8",
    "OpenRLHF": "pretrain: x\nprompt_data: y\nrollout_batch_size: 1024",
    "open-instruct": "model_name_or_path: x\ndataset_mixer_list: [a, 1.0]",
    "LLaMA-Factory": "model_name_or_path: x\nstage: sft\ndo_train: true\nfinetuning_type: lora\ndataset: a",
    "axolotl": "base_model: x\ndatasets: [{path: a}]\nmicro_batch_size: 2",
    "torchtune": "checkpointer: {_component_: torchtune.x}\nepochs: 1",
    "TRL": "model_name_or_path: x\ndataset_name: y\nnum_generations: 7\nlearning_rate: 2e-5",
    "accelerate": "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP",
    "DeepSpeed": '{"zero_optimization": {"stage": 3}}',
}


@pytest.mark.parametrize(("system", "text"), FILES.items(), ids=FILES)
def test_a_file_of_another_system_is_refused_by_its_name(system: str, text: str) -> None:
    (problem,) = refused(convert_text, text, "run.toml" if text.startswith("[") else "run")
    assert f"this looks like a file of {system}," in problem.message
    assert "cosmos-launch init" in problem.hint
    astray = ("check the indentation", "this looks like TOML", "say which", "--cfg job")
    assert not any(words in problem.hint for words in astray)


_IMPORTS = "from datasets import x\nfrom trl import GRPOTrainer\n\ndef reward(x, **kwargs):\n    return 1\n"
_RAY = 'ray job submit --runtime-env-json=\'{"x": "y"}\' -- python3 -m openrlhf.cli.train --pretrain x'
_OVERRIDES = "algorithm.adv_estimator=grpo\n+actor_rollout_ref.actor.extra=1\n~data.val_files\n++trainer.nnodes=2"
SCRIPTS = {
    "run.py": (_IMPORTS, "a Python script of TRL", "cosmos-launch init"),
    "trl": (_IMPORTS, "a Python script of TRL", "cosmos-launch init"),
    "unsloth.py": ("from unsloth import FastLanguageModel", "a Python script of Unsloth", "cosmos-launch init"),
    "args.txt": ("--pretrain x --init_kl_coef 0.1 --n_samples 1", "a command line of OpenRLHF", "init"),
    "command": ("deepspeed --module openrlhf.cli.train_ppo \\\n  --pretrain x", "of OpenRLHF", "init"),
    "command.yaml": (_RAY, "a command line of OpenRLHF", "cosmos-launch init"),
    "ppo.sh": ("set -x\npython3 -m openrlhf.cli.train_ppo_ray --pretrain x", "a shell script of OpenRLHF", "init"),
    "slime.sh": ("python3 train.py --hf-checkpoint x --num-rollout 40", "a shell script of slime or miles", "init"),
    "easy.sh": ("python3 -m verl.trainer.main config=x worker.rollout.n=5", "a shell script of EasyR1", "explain"),
    "ragen.sh": ("python train.py --config-name x es_manager.train.env_groups=8", "of RAGEN", "--system verl"),
    "prime": ("uv run rl @ configs/rl.toml --trainer.optim.lr 1e-6", "a command line of prime-rl", "init"),
    "verl.sh": (
        f"python3 -m verl.trainer.main_ppo {_OVERRIDES}",
        "a shell script of verl",
        "-m verl.trainer.main_ppo",
    ),
    "recipe.sh": (
        "#!/bin/bash\npython3 -m recipe.dapo.main_dapo data.seed=1\n",
        "a shell script of verl",
        "-m recipe.dapo.main_dapo … --cfg job --resolve",
    ),
    "run": (
        "#!/usr/bin/env bash\npython3 -m verl.trainer.main_ppo trainer.nnodes=1 $@\n",
        "a shell script of verl",
        "--cfg job --resolve",
    ),
    "words": (f"verl.trainer.sft_trainer\n{_OVERRIDES}", "words of a command line of verl", "-m verl.trainer.sft_tr"),
    "overrides": (
        "algorithm.adv_estimator=grpo\n++data.train_files=x",
        "words of a command line of verl",
        "-m verl.trainer.main_ppo",
    ),
    "roll.sh": ("python start_rlvr_pipeline.py --config_path x", "a shell script of ROLL", "--config_name"),
    "cosmos.sh": ("cosmos-rl --config x.toml", "a shell script of cosmos-rl", "the TOML that its --config names"),
    "other.sh": ("./train --fast", "a shell script, not a configuration", "the YAML or TOML that it names"),
}


@pytest.mark.parametrize(("name", "text", "message", "hint"), [(name, *row) for name, row in SCRIPTS.items()])
def test_a_script_is_refused_with_the_system_that_it_starts(name: str, text: str, message: str, hint: str) -> None:
    (problem,) = refused(convert_text, text, name)
    assert message in problem.message
    assert hint in problem.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("algorithm:\n  adv_estimator: grpo\n run: python x --a --b\n", "not YAML"),
        ("system_prompt: |\n  import math\nactor_rollout_ref: [\n", "not YAML"),
        ("[train]\nx.y=1\nz.y=\n", "broken TOML"),
        ("hello world\n", "expected keys and values"),
    ],
)
def test_a_broken_file_is_told_as_such(text: str, message: str) -> None:
    (problem,) = refused(convert_text, text, "run.toml" if text.startswith("[") else "run.yaml")
    assert message in problem.message


def test_titles_of_other_systems_are_distinct() -> None:
    titles = [system.title for system in SYSTEMS_WITHOUT_READER]
    assert len(set(titles)) == len(titles)


OURS = {
    "verl with AReaL's": ("actor_rollout_ref: {rollout: {n: 4}}\ngconfig: {n_samples: 4}", "verl"),
    "verl with SkyPilot's": ("algorithm: {adv_estimator: grpo}\nresources: {gpus: 8}\nrun: x", "verl"),
    "verl with torchforge's": ("algorithm: {adv_estimator: grpo}\nprovisioner: {launcher: slurm}", "verl"),
    "verl with TRL's": ("actor_rollout_ref: {}\nmodel_name_or_path: m\ndataset_name: d", "verl"),
    "verl's SFT with Kubernetes's": ("model: {partial_pretrain: m}\napiVersion: 1\nkind: Job", "verl"),
    "ROLL with OpenRLHF's": ("pretrain: m\nactor_train: {infer_batch_size: 1}\nprompt_data: d", "roll"),
    "cosmos-rl with prime-rl's": (
        "[policy]\nmodel_name_or_path = 'm'\n[model]\nname = 'm'\n[optim]\nlr = 1e-6",
        "cosmos-rl",
    ),
}


@pytest.mark.parametrize(("text", "system"), OURS.values(), ids=OURS)
def test_a_file_with_a_key_of_another_system_is_still_its_own(text: str, system: str) -> None:
    found = convert_text(text, "run.toml" if text.startswith("[") else "run.yaml")
    assert found.system == system
    assert "for it has keys that only" in found.warnings[0]


def test_where_no_key_decides_the_hint_names_the_system_to_ask_for() -> None:
    text = "model: {path: m}\noptim: {lr: 1e-5}\ndata: {train_files: x.parquet}\nresources: {}\nrun: x"
    (problem,) = refused(convert_text, text, "run.yaml")
    assert "a file of SkyPilot" in problem.message
    assert "if it is a file of verl, --system verl" in problem.hint


def test_a_system_that_is_named_is_read_with_a_warning() -> None:
    found = convert_text(_RAGEN, "run.yaml", "verl")
    assert "looks like a file of RAGEN" in found.warnings[0]
    (problem,) = refused(convert_text, FILES["TRL"], "run.yaml", "verl")
    assert "has no key of verl's configurations: this looks like a file of TRL" in problem.message


def strangers(known: int, unknown: int) -> str:
    """A file of verl with so many keys that verl has, and that it has not."""
    names = ("n", "temperature", "top_p", "top_k", "ignore_eos", "enforce_eager", "dtype", "load_format", "mode")
    actor = ", ".join(f"stranger_{index}: 1" for index in range(unknown))
    rollout = ", ".join(f"{name}: null" for name in names[: known - 1])
    return f"algorithm: {{adv_estimator: grpo}}\nactor_rollout_ref: {{actor: {{{actor}}}, rollout: {{{rollout}}}}}"


@pytest.mark.parametrize("system", [None, "verl"])
def test_a_file_of_which_most_keys_are_unknown_is_refused(system: str | None, tmp_path: Path) -> None:
    (problem,) = refused(convert_text, strangers(5, 12), "run.yaml", system)
    assert "12 of its 17 keys are not keys of verl" in problem.message
    assert problem.hint == by_hand("verl")
    few, half = (
        convert_text(strangers(2, 9), "run.yaml", system),
        convert_text(strangers(10, 10), "run.yaml", system),
    )
    assert (len(few.unsupported), len(half.unsupported)) == (9, 10)
    names = [f"actor_rollout_ref.actor.stranger_{index}" for index in range(12)]
    accepted = convert_text(strangers(5, 12), "run.yaml", system, None, names)
    assert not accepted.unsupported


def test_keys_of_others_in_tables_of_their_own_do_not_tell_a_system() -> None:
    assert other_system({"env": {"name": "x"}, "model": {"path": "m"}, "trainer": {"optim": 1}}) is None
