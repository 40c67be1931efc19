"""verl's files: every key of the pages is placed, and what is computed agrees with sums done by hand."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schema.config import ConfigError, check_config
from schema.config.availability import UNAVAILABLE
from schema.interop import convert, convert_text
from schema.interop.engine.keys import lookup, split_key
from schema.interop.engine.model import Conversion, Outcome
from schema.interop.engine.registry import reader
from schema.interop.engine.rules import ConversionContext, KeyPath
from schema.interop.engine.source import Source
from schema.interop.engine.write import to_json, to_report, to_toml
from schema.interop.verl.reader import READER
from tests.schema.interop.verl.pages import PAGES

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("verl_*.yaml"))
POLICY = "train.train_policy"


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")


def example(name: str, env: dict[str, str] | None = None) -> Conversion:
    """The conversion of an example."""
    return convert(Path(__file__).parents[1] / "examples" / f"verl_{name}.yaml", env=env)


def ours(conversion: Conversion, key: str) -> Any:
    """The value of one of our keys."""
    return lookup(conversion.config, split_key(key))


def rl(text: str = "") -> Conversion:
    """A small RL file: GRPO with the given lines added."""
    head = "algorithm: {adv_estimator: grpo}\n" if "algorithm:" not in text else ""
    return convert_text(head + text, "small.yaml")


# --- coverage -------------------------------------------------------------------------------------------------


def test_the_pages_name_as_many_keys_as_were_counted() -> None:
    assert {page: len(set(keys)) for page, keys in PAGES.items()} == {
        "old page": 100,
        "newer page": 172,
        "translated page": 189,
    }


@pytest.mark.parametrize("page", PAGES)
def test_every_key_of_a_page_is_in_an_example_and_is_understood(page: str) -> None:
    outcomes: dict[str, set[Outcome]] = {}
    for file in EXAMPLES:
        for entry in convert(file).entries:
            outcomes.setdefault(entry.source, set()).add(entry.outcome)
    for key in PAGES[page]:
        inside = [source for source in outcomes if source == key or source.startswith(f"{key}.")]
        assert inside, f"{key} is in no example"
        for source in inside:
            assert Outcome.UNKNOWN not in outcomes[source], f"{source} is not understood"


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_every_leaf_has_one_entry_and_the_toml_reads_back(file: Path) -> None:
    conversion = convert(file)
    assert not conversion.missing_leaves
    assert not conversion.repeated_leaves
    text = to_toml(conversion)
    assert tomllib.loads(text) == conversion.config
    report = to_report(conversion)
    for leaf in conversion.leaves:
        assert leaf in text, leaf
        assert leaf in report, leaf
    assert sum(to_json(conversion)["counts"].values()) == len(conversion.leaves)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_what_is_converted_lacks_only_parts_that_are_not_built(file: Path) -> None:
    """Beside parts to come, only files that are not here are missed."""
    try:
        check_config(convert(file).config)
        problems = []
    except ConfigError as error:
        problems = list(error.problems)
    absent = ("does not exist", "cannot be read", "cannot be found", "no dataset is named")
    for problem in problems:
        if not any(words in problem.message for words in absent):
            keys = {problem.key} if problem.key in UNAVAILABLE else {*problem.related}
            assert keys, problem.render()
            assert keys <= UNAVAILABLE.keys(), problem.render()


@pytest.mark.parametrize("kind", READER.kinds)
def test_what_may_have_no_counterpart_has_a_reason(kind: str) -> None:
    """Rows that give up on values they do not know find their reason in the closed list."""
    rules = READER.rules(kind)
    context = ConversionContext(READER, kind, Source("empty", {}), rules)
    for rule in rules:
        if rule.converter.run.__qualname__.startswith("lacking"):
            leaf = KeyPath(rule.key.replace("*", "strange"), "strange", "strange")
            assert rule.converter.run(context, leaf).outcome is Outcome.NONE, rule.key


def test_every_reason_says_something() -> None:
    for key, reason in reader("verl").unsupported.reasons.items():
        assert len(reason) > 20, key


def test_a_plain_grpo_file_validates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is refused: not a rule, not a column, not a part that is missing."""
    rules = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": "2 + 2?"}],
            "reward_model": {"style": "rule", "ground_truth": "4"},
        }
    ]
    (tmp_path / "data" / "gsm8k").mkdir(parents=True)
    for name in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(rules), tmp_path / "data" / "gsm8k" / f"{name}.parquet")
    monkeypatch.chdir(tmp_path)
    config = check_config(example("grpo").config)
    assert config.groups_per_step == 4
    assert config.samples_per_step == 32
    assert config.staleness_bound == 0
    assert config.grpo.reward_weights == {"by_source": 1.0}


# --- batches --------------------------------------------------------------------------------------------------


def test_batches_count_samples() -> None:
    conversion = example("ppo")
    assert ours(conversion, "train.train_batch_per_replica") == 96 * 4
    assert ours(conversion, f"{POLICY}.batch_size_per_optimize") == 24 * 4
    assert ours(conversion, "critic.batch_size_per_optimize") == 24 * 4
    assert ours(conversion, "rollout.n_generation") == 4


def test_a_mini_batch_of_everything_is_one_optimizer_step() -> None:
    conversion = example("grpo")
    assert ours(conversion, f"{POLICY}.batch_size_per_optimize") is None
    entry = conversion.entry("actor_rollout_ref.actor.ppo_mini_batch_size")
    assert entry.targets == ((f"{POLICY}.batch_size_per_optimize", None),)


def test_token_budgets_are_times_the_sequence_parallel_size() -> None:
    conversion = example("ppo")
    assert ours(conversion, f"{POLICY}.max_token_len_per_mini_batch") == 6000 * 2
    assert ours(conversion, f"{POLICY}.mini_batch") is None
    assert ours(conversion, "critic.mini_batch") == 5  # the critic's own switch is off


def test_the_deprecated_twin_is_divided_by_the_ranks() -> None:
    conversion = example("ppo_old")
    assert ours(conversion, f"{POLICY}.mini_batch") == 32 // 4
    twin = conversion.entry("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu")
    assert twin.outcome is Outcome.IMPLICIT


def test_two_twins_are_a_conflict_that_is_reported() -> None:
    conversion = rl("actor_rollout_ref: {actor: {ppo_micro_batch_size: 64, ppo_micro_batch_size_per_gpu: 4}}")
    assert ours(conversion, f"{POLICY}.mini_batch") == 4
    assert any("ppo_micro_batch_size" in warning for warning in conversion.warnings)


def test_a_pipeline_takes_its_micro_batches_at_once() -> None:
    conversion = example("megatron")
    assert ours(conversion, "policy.parallelism.pp_micro_batch_size") == 1
    assert ours(conversion, f"{POLICY}.mini_batch") == 1 * 2


def test_lengths_add_up() -> None:
    conversion = example("ppo")
    assert ours(conversion, "rollout.max_response_length") == 500
    assert ours(conversion, f"{POLICY}.dataset.max_prompt_length") == 1000
    assert ours(conversion, "policy.model_max_length") == 1500


# --- meshes ---------------------------------------------------------------------------------------------------


def mesh(conversion: Conversion) -> dict[str, int]:
    """The policy's mesh."""
    return ours(conversion, "policy.parallelism")


def test_fsdp_size_shards_and_replicates() -> None:
    sizes = mesh(example("ppo"))  # 16 GPUs, 2 share a sequence, shards of 4
    assert (sizes["cp_size"], sizes["dp_shard_size"], sizes["dp_replicate_size"], sizes["tp_size"]) == (
        2,
        2,
        4,
        1,
    )


@pytest.mark.parametrize(
    ("size", "expected"), [(-1, (8, 1)), (8, (8, 1)), (64, (8, 1)), (1, (1, 8)), (2, (2, 4))]
)
def test_fsdp_size_by_verls_rule(size: int, expected: tuple[int, int]) -> None:
    sizes = mesh(rl(f"actor_rollout_ref: {{actor: {{fsdp_config: {{fsdp_size: {size}}}}}}}"))
    assert (sizes["dp_shard_size"], sizes.get("dp_replicate_size", 1)) == expected


def test_megatrons_sizes() -> None:
    sizes = mesh(example("megatron"))  # 32 GPUs = tp 2 × pp 2 × cp 2 × dp 4
    assert sizes == {
        "tp_size": 2,
        "pp_size": 2,
        "cp_size": 2,
        "ep_size": 4,
        "dp_shard_size": 4,
        "virtual_pp_size": 2,
        "pp_micro_batch_size": 1,
        "sequence_parallel": False,
    }


def test_engines_are_gpus_over_the_size_of_one() -> None:
    assert ours(example("ppo"), "rollout.parallelism.n_init_replicas") == 16 // 4
    assert ours(example("ppo"), "rollout.parallelism.tp_size") == 4
    assert ours(rl(), "rollout.parallelism.n_init_replicas") == 8 // 2  # verl's defaults: 8 GPUs, tp 2
    assert ours(rl("trainer: {n_gpus_per_node: 1}"), "rollout.parallelism.n_init_replicas") == 1


def test_the_hybrid_engine_shares_gpus() -> None:
    entry = example("ppo").entry("actor_rollout_ref.hybrid_engine")
    assert dict(entry.faithful or entry.targets)["placement.share"] == "time"
    assert ours(example("ppo_old"), "placement.share") == "memory"  # free_cache_engine: False


# --- schedules ------------------------------------------------------------------------------------------------


def train(text: str, trainer: str = "") -> dict[str, Any]:
    """The [train] that an optim table gives."""
    return rl(f"actor_rollout_ref: {{actor: {{optim: {{{text}}}}}}}\n{trainer}").config["train"]


def test_warm_up_is_steps_or_a_share() -> None:
    assert train("lr: 1e-6")["optm_warmup_steps"] == 0  # verl's default, ours is 20
    assert train("lr_warmup_steps: 12, lr_warmup_steps_ratio: 0.5")["optm_warmup_steps"] == 12
    share = train("lr_warmup_steps: -1, lr_warmup_steps_ratio: 0.05")["optm_warmup_steps"]
    assert isinstance(share, float)
    assert share == 0.05


@pytest.mark.parametrize("share", [0.1, 0.07, 0.3, 0.05, 1.0, 0.123456789])
def test_a_cosine_takes_what_warm_up_leaves(share: float) -> None:
    keys = train(f"lr_warmup_steps_ratio: {share}, warmup_style: cosine, min_lr_ratio: 0.1")
    assert keys["optm_decay_type"] == "cosine"
    assert math.isclose(keys["optm_decay_ratio"] + share, 1.0)
    assert keys["optm_decay_ratio"] + share <= 1.0
    assert keys["optm_min_lr_factor"] == 0.1
    assert keys["optm_warmup_start_factor"] == 0.1


def test_a_cosine_after_steps_of_warm_up_needs_the_number_of_steps() -> None:
    known = train("lr_warmup_steps: 20, warmup_style: cosine", "trainer: {total_training_steps: 200}")
    assert known["optm_decay_ratio"] == 0.9
    assert train("lr_warmup_steps: 20, warmup_style: cosine")["optm_decay_ratio"] == 1.0


def test_a_floor_without_decay_is_not_written() -> None:
    assert "optm_min_lr_factor" not in train("min_lr_ratio: 0.1, warmup_style: constant")


def test_megatrons_optimizer() -> None:
    keys = example("megatron").config["train"]
    assert keys["optm_name"] == "AdamW"
    assert keys["optm_decay_type"] == "inverse_sqrt"
    assert keys["optm_warmup_start_factor"] == 0.1  # 1e-6 / 1e-5
    assert keys["optm_min_lr_factor"] == 0.1
    assert keys["optm_grad_norm_clip"] == 0.5
    assert "optm_decay_steps" not in keys


def test_megatrons_decay_counts_the_warm_up() -> None:
    text = (
        "actor_rollout_ref: {actor: {strategy: megatron, optim: {lr_warmup_steps: 10, lr_decay_steps: 110, "
    )
    keys = rl(text + "lr_decay_style: linear, lr: 1e-5, min_lr: 1e-6}}}").config["train"]
    assert (keys["optm_decay_type"], keys["optm_decay_steps"], keys["optm_min_lr_factor"]) == (
        "linear",
        100,
        0.1,
    )
    assert "optm_decay_ratio" not in keys


def test_megatrons_wsd() -> None:
    text = "actor_rollout_ref: {actor: {strategy: megatron, optim: {lr_decay_style: WSD, lr_wsd_decay_steps: 30, "
    keys = rl(text + "lr_wsd_decay_style: exponential}}}").config["train"]
    assert keys["optm_decay_type"] == "wsd"
    assert (keys["optm_decay_steps"], keys["optm_wsd_decay_type"]) == (30, "exponential")


def test_sft_decays_over_a_tenth_of_what_warm_up_leaves() -> None:
    keys = example("sft").config["train"]
    assert keys["optm_decay_type"] == "wsd"
    assert keys["optm_decay_ratio"] == pytest.approx(0.1 * 0.8)
    assert keys["optm_betas"] == [0.9, 0.95]


def test_the_optimizers_epsilon_is_torchs() -> None:
    assert rl().config["train"]["epsilon"] == 1e-8


# --- the loss -------------------------------------------------------------------------------------------------


def loss(text: str) -> dict[str, Any]:
    """The train policy that an actor table gives."""
    return rl(f"actor_rollout_ref: {{actor: {{{text}}}}}").config["train"]["train_policy"]


def test_clipping() -> None:
    assert {key: loss("clip_ratio: 0.1")[key] for key in ("epsilon_low", "epsilon_high")} == {
        "epsilon_low": 0.1,
        "epsilon_high": 0.1,
    }
    both = loss("clip_ratio: 0.1, clip_ratio_high: 0.3, clip_ratio_c: 5.0")
    assert (both["epsilon_low"], both["epsilon_high"], both["lower_bound_ratio"]) == (0.1, 0.3, 5.0)


def test_dr_grpo() -> None:
    keys = example("megatron").config["train"]["train_policy"]
    assert (keys["loss_type"], keys["unbiased_loss_max_tokens"]) == ("seq-mean-token-mean", 2000)
    assert keys["unbiased_advantage"] is True


def test_kl_in_the_loss() -> None:
    keys = loss("use_kl_loss: true, kl_loss_coef: 0.04, kl_loss_type: mse")
    assert (keys["kl_beta"], keys["kl_type"]) == (0.04, "k2")
    off = loss("use_kl_loss: false, kl_loss_coef: 0.04, kl_loss_type: mse")
    assert "kl_beta" not in off
    assert "kl_type" not in off


def test_kl_in_the_reward() -> None:
    keys = example("ppo").config["train"]["train_policy"]["kl_in_reward"]
    assert keys == {"beta": 0.02, "type": "k3", "controller": "adaptive", "target": 0.2, "horizon": 5000}


def test_an_old_file_says_that_its_kl_is_gone() -> None:
    conversion = example("ppo_old")
    assert "kl_in_reward" not in conversion.config["train"]["train_policy"]
    assert any("kl_in_reward.beta = 0.005" in warning for warning in conversion.warnings)


@pytest.mark.parametrize(
    ("theirs", "our"), [("gae", "gae"), ("rloo", "rloo"), ("grpo_passk", "pass_at_k"), ("opo", "opo")]
)
def test_estimators(theirs: str, our: str) -> None:
    conversion = rl(f"algorithm: {{adv_estimator: {theirs}}}")
    assert ours(conversion, f"{POLICY}.advantage_estimator") == our
    assert ours(conversion, "critic.enable") is (True if theirs == "gae" else None)


def test_dynamic_sampling_and_the_overlong_penalty() -> None:
    keys = example("recent").config["train"]["train_policy"]
    assert keys["filter_reward_metric"] == ["by_source"]
    assert keys["max_retry_for_on_policy"] == 10
    assert keys["overlong_reward"] == {
        "enable_overlong_penalty": True,
        "buffer_length": 512,
        "penalty_factor": 0.5,
    }
    assert example("recent").config["controller"]["oversample"] == 3.0
    assert keys["rollout_correction"] == {
        "weights": "token",
        "cap": 3.0,
        "reject": "geometric",
        "reject_below": 0.99,
        "reject_above": 1.01,
    }


# --- defaults, rewards, validation ----------------------------------------------------------------------------


def test_verls_defaults_are_written_where_ours_differ() -> None:
    conversion = convert_text("actor_rollout_ref: {model: {path: m}}", "small.yaml")
    expected = {
        "rollout.n_generation": 1,
        f"{POLICY}.advantage_estimator": "gae",
        "train.train_batch_per_replica": 1024,
        f"{POLICY}.batch_size_per_optimize": 256,
        "train.epoch": 30,
        "train.resume": True,
        "train.output_dir": "checkpoints/verl_examples/gsm8k",
        "rollout.gpu_memory_utilization": 0.5,
        "rollout.max_response_length": 512,
        "policy.model_max_length": 1024,
        f"{POLICY}.dataset.overlong_prompts": "error",
        f"{POLICY}.on_policy": True,
        "policy.parallelism.tp_size": 1,
        "policy.parallelism.dp_shard_size": 8,
    }
    assert {key: ours(conversion, key) for key in expected} == expected
    assert ours(conversion, "train.optm_lr") is None  # the same as ours
    assert {addition.key for addition in conversion.additions} >= set(expected)


def test_rewards_by_source_or_by_the_users_function() -> None:
    assert ours(rl(), f"{POLICY}.reward_function") == "by_source"
    assert ours(rl(), f"{POLICY}.response_column_name") == "reward_model.ground_truth"
    assert ours(example("ppo"), f"{POLICY}.reward_function") == "code/scores.py:polite"
    text = "custom_reward_function: {path: my.py, name: null}"
    assert ours(rl(text), f"{POLICY}.reward_function") == "my.py:compute_score"


def test_greedy_validation_ignores_its_sampling_keys() -> None:
    text = "actor_rollout_ref: {rollout: {val_kwargs: {do_sample: false, temperature: 1.0, top_p: 0.5}}}"
    conversion = rl(text)
    assert ours(conversion, "validation.temperature") == 0.0
    assert ours(conversion, "validation.top_p") is None
    sampled = ours(example("ppo"), "validation")
    assert (sampled["temperature"], sampled["top_k"], sampled["top_p"], sampled["n_generation"]) == (
        0.6,
        40,
        0.95,
        3,
    )


def test_validation_before_training_only() -> None:
    conversion = rl("data: {val_files: v.parquet}\ntrainer: {test_freq: -1}")
    keys = ours(conversion, "validation")
    assert keys["enable"] is True
    assert keys["freq"] >= 10**9
    assert ours(rl("trainer: {test_freq: 5}"), "validation.enable") is None  # nothing to validate on


def test_checkpoints() -> None:
    keys = example("ppo").config["train"]["ckpt"]
    assert keys["enable_checkpoint"] is True
    assert (keys["save_freq"], keys["max_keep"], keys["export_safetensors"]) == (25, 1, True)
    assert ours(example("ppo"), "train.resume") == "runs/helpful/ppo-7b/step_50"
    assert ours(example("grpo"), "train.resume") is False


def test_sglang_becomes_vllm_loudly() -> None:
    conversion = example("ppo_old")
    assert ours(conversion, "rollout.backend") == "vllm"
    assert any("sglang" in warning for warning in conversion.warnings)


def test_home_is_written_out_and_said() -> None:
    conversion = example("ppo")
    files = ours(conversion, f"{POLICY}.dataset.files")
    assert files == [f"/home/somebody/corpora/helpful/train-{index}.parquet" for index in (0, 1)]
    assert "`~`" in conversion.entry("data.train_files").note
    assert ours(conversion, "rollout.custom_server") == "/home/somebody/code/server.py:HouseServer"


def test_engine_arguments_pass_through_or_go_to_their_own_key() -> None:
    rollout = example("recent").config["rollout"]
    assert rollout["max_num_seqs"] == 64
    assert rollout["engine_kwargs"] == {"limit_mm_per_prompt": {"image": 2}}
    assert example("ppo").config["rollout"]["engine_kwargs"] == {"mm_processor_cache_gb": 0}


def test_sft_reads_columns_inside_structs() -> None:
    keys = example("sft").config["train"]["train_policy"]
    assert keys["type"] == "sft"
    assert (keys["prompt_column_name"], keys["response_column_name"]) == (
        "extra_info.question",
        "extra_info.answer",
    )


def test_sft_on_conversations() -> None:
    text = (
        "model: {partial_pretrain: m}\ndata: {multiturn: {enable: true, messages_key: turns}, prompt_key: q}"
    )
    keys = convert_text(text, "sft.yaml").config["train"]["train_policy"]
    assert keys["conversation_column_name"] == "turns"
    assert "prompt_column_name" not in keys


def test_evaluation() -> None:
    keys = example("evaluation").config["evaluation"]
    assert keys == {
        "dataset": {"files": ["results/answers.parquet"]},
        "prompt_column_name": "question",
        "responses_column_name": "completions",
        "data_source_column_name": "origin",
        "reference_column_name": "truth.ground_truth",
        "reward_function": "code/scores.py:exact",
    }


def test_translated_keys_are_named_with_the_real_one() -> None:
    conversion = example("translated")
    for entry in conversion.entries:
        assert entry.outcome is Outcome.NONE, entry.source
        assert "machine translation" in entry.note
    assert "data.path" in conversion.entry("数据.路径").note
    assert "optim.lr" in conversion.entry("优化器配置.学习率").note


def test_asynchronous_training_keeps_its_bound() -> None:
    text = "trainer: {v1: {trainer_mode: separate_async, separate_async: {parameter_sync_step: 3}, "
    conversion = rl(text + "sampler: {max_off_policy_threshold: 6}}}")
    assert ours(conversion, f"{POLICY}.on_policy") is False
    assert ours(conversion, f"{POLICY}.allowed_outdated_steps") == 6
    assert ours(conversion, "train.sync_weight_interval") == 3
    assert ours(conversion, "placement.share") is None  # none, as by default
    old = rl(text + "sampler: {max_off_policy_threshold: 6}}, use_v1: false}")
    assert ours(old, f"{POLICY}.on_policy") is True
    assert ours(old, f"{POLICY}.allowed_outdated_steps") is None


def test_adapters_of_both_backends() -> None:
    flat = rl("actor_rollout_ref: {model: {lora_rank: 8, lora: {rank: 0, alpha: 32}}}")
    assert ours(flat, "policy.lora") == {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
    assert not flat.warnings
    text = "actor_rollout_ref: {model: {lora: {rank: 4, alpha: 8, target_modules: [linear_qkv, linear_proj, "
    nested = rl(text + "linear_fc1, linear_fc2]}}}")
    assert ours(nested, "policy.lora") == {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


# --- what is wrong --------------------------------------------------------------------------------------------


def test_an_unknown_key_is_reported_with_a_suggestion() -> None:
    conversion = rl("actor_rollout_ref: {actor: {clip_ration: 0.3}}")
    entry = conversion.entry("actor_rollout_ref.actor.clip_ration")
    assert entry.outcome is Outcome.UNKNOWN
    assert "did you mean `actor_rollout_ref.actor.clip_ratio`" in entry.note
    assert "clip_ration" in to_toml(conversion)


@pytest.mark.parametrize(
    "text",
    [
        "actor_rollout_ref: {rollout: {n: many}}",
        "actor_rollout_ref: {actor: {optim: {lr: fast}}}",
        "data: {train_batch_size: [1, 2]}",
        "trainer: {logger: 7}",
        "trainer: {resume_mode: sometimes}",
        "data: {truncation: wildly}",
        "actor_rollout_ref: {actor: {optim: 3}}",
        "actor_rollout_ref: {rollout: {n: {deep: 1}}}",
    ],
)
def test_a_value_that_cannot_be_understood_is_an_entry(text: str) -> None:
    unknown = rl(text).of(Outcome.UNKNOWN)
    assert len(unknown) == 1
    assert unknown[0].note


def test_kinds_are_detected() -> None:
    kinds = {file.stem: convert(file).kind for file in EXAMPLES}
    assert kinds == {
        "verl_evaluation": "evaluation",
        "verl_grpo": "rl",
        "verl_megatron": "rl",
        "verl_ppo": "rl",
        "verl_ppo_old": "rl",
        "verl_recent": "rl",
        "verl_sft": "sft",
        "verl_translated": "sft",
    }
    assert set(kinds.values()) == set(READER.kinds)
