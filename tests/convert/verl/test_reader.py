"""verl's files: every key of the pages is placed, and what is computed agrees with sums done by hand."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from convert import convert, convert_text
from convert.engine.model import Conversion, Outcome
from convert.engine.registry import reader
from convert.engine.rules import ConversionContext, KeyPath
from convert.engine.source import Source
from convert.verl.reader import READER
from schema.config import ConfigError, check_config
from schema.config.availability import UNAVAILABLE
from tests.convert.files import HERE, VERL, nest, value_of, yaml_text
from tests.convert.verl.pages import PAGES

POLICY = "train.train_policy"


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")


@cache
def converted(file: Path) -> Conversion:
    """The conversion of an example, made once."""
    return convert(file)


def example(name: str) -> Conversion:
    """The conversion of an example by its name."""
    return converted(HERE / f"verl_{name}.yaml")


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
    for file in VERL:
        for entry in converted(file).entries:
            outcomes.setdefault(entry.source, set()).add(entry.outcome)
    for key in PAGES[page]:
        inside = [source for source in outcomes if source == key or source.startswith(f"{key}.")]
        assert inside, f"{key} is in no example"
        for source in inside:
            assert Outcome.UNKNOWN not in outcomes[source], f"{source} is not understood"


@pytest.mark.parametrize("file", VERL, ids=lambda file: file.stem)
def test_what_is_converted_lacks_only_parts_that_are_not_built(file: Path) -> None:
    """Beside parts to come, only files that are not here are missed."""
    try:
        check_config(converted(file).config)
        problems = []
    except ConfigError as error:
        problems = list(error.problems)
    absent = ("does not exist", "cannot be read", "cannot be found", "no dataset is named", "this build cannot")
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


OWN_CLASS = """
actor_rollout_ref: {model: {path: m}}
data:
  train_files: a.parquet
  val_files: b.parquet
  custom_cls: {path: mine.py, name: Mine}
  mine: 7
  nested: {deep: [1, 2]}
  max_promt_length: 9
"""


def test_a_dataset_class_makes_the_rows_of_both_roles_and_reads_its_own_keys(tmp_path: Path) -> None:
    for text, names in ((OWN_CLASS, {"mine", "nested"}), (OWN_CLASS.replace("mine.py", "null"), set())):
        path = tmp_path / f"{len(names)}.yaml"
        path.write_text(text)
        config = converted(path).config
        policy = config["train"]["train_policy"]
        classes = [part["dataset"].get("custom_class") for part in (policy, config["validation"])]
        assert classes == (["mine.py:Mine"] * 2 if names else [None, None])
        assert config.get("custom", {}) == ({"mine": 7, "nested": {"deep": [1, 2]}} if names else {})
        strange = set(config["unsupported"])
        assert strange == {"data.max_promt_length"} | (set() if names else {"data.mine", "data.nested.deep"})


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


# --- what a file comes to -------------------------------------------------------------------------------------

NAMES = {file.stem.removeprefix("verl_") for file in VERL}
MESH, ENGINES, CKPT = "policy.parallelism", "rollout.parallelism", "train.ckpt"
OPTIM = "actor_rollout_ref: {{actor: {{optim: {{{}}}}}}}\n"
MEGATRON = "actor_rollout_ref: {{actor: {{strategy: megatron, optim: {{{}}}}}}}"
ACTOR = "actor_rollout_ref: {{actor: {{{}}}}}"
ASYNC = (
    "trainer: {{v1: {{trainer_mode: separate_async, separate_async: {{parameter_sync_step: 3}}, "
    "sampler: {{max_off_policy_threshold: 6}}}}{}}}"
)
COSINE = OPTIM.format("lr_warmup_steps: 20, warmup_style: cosine")
LINEAR = "lr_warmup_steps: 10, lr_decay_steps: 110, lr_decay_style: linear, lr: 1e-5, min_lr: 1e-6"
WSD = "lr_decay_style: WSD, lr_wsd_decay_steps: 30, lr_wsd_decay_style: exponential"
CLIPS = ACTOR.format("clip_ratio: 0.1, clip_ratio_high: 0.3, clip_ratio_c: 5.0")
LOSS_TERM = "kl_loss_coef: 0.04, kl_loss_type: mse"
REWARD_TERM = {"beta": 0.02, "type": "k3", "controller": "adaptive", "target": 0.2, "horizon": 5000}
PENALTY = {"enable_overlong_penalty": True, "buffer_length": 512, "penalty_factor": 0.5}
CORRECTION = {
    "weights": "token",
    "cap": 3.0,
    "reject": "geometric",
    "reject_below": 0.990099009901,
    "reject_above": 1.010101010101,
}
GREEDY = "actor_rollout_ref: {rollout: {val_kwargs: {do_sample: false, temperature: 1.0, top_p: 0.5}}}"
MEGATRONS_MESH = {
    **{"tp_size": 2, "pp_size": 2, "cp_size": 2, "ep_size": 4, "dp_shard_size": 4},
    **{"virtual_pp_size": 2, "pp_micro_batch_size": 1, "sequence_parallel": True},
}
FACTS: list[tuple[str, str, dict[str, Any]]] = [
    # batches count samples, budgets of tokens those of all ranks of a sequence; the critic's own switch is off
    ("ppo", "train", {"train_batch_per_replica": 96 * 4}),
    (
        "ppo",
        POLICY,
        {"batch_size_per_optimize": 24 * 4, "max_token_len_per_mini_batch": 6000 * 2, "mini_batch": None},
    ),
    ("ppo", "critic", {"batch_size_per_optimize": 24 * 4, "mini_batch": 5}),
    ("ppo", "rollout", {"n_generation": 4, "max_response_length": 500}),
    # a pipeline takes its micro-batches at once
    ("megatron", POLICY, {"mini_batch": 1 * 2}),
    ("megatron", MESH, {"pp_micro_batch_size": 1}),
    # lengths add up
    ("ppo", f"{POLICY}.dataset", {"max_prompt_length": 1000}),
    ("ppo", "policy", {"model_max_length": 1500}),
    # 16 GPUs, 2 share a sequence, shards of 4; 32 GPUs = tp 2 × pp 2 × cp 2 × dp 4
    ("ppo", MESH, {"cp_size": 2, "dp_shard_size": 2, "dp_replicate_size": 4, "tp_size": 1}),
    ("megatron", "policy", {"parallelism": MEGATRONS_MESH}),
    # engines are GPUs over the size of one: verl's defaults are 8 GPUs and tp 2
    ("ppo", ENGINES, {"n_init_replicas": 16 // 4, "tp_size": 4}),
    ("", ENGINES, {"n_init_replicas": 8 // 2}),
    ("trainer: {n_gpus_per_node: 1}", ENGINES, {"n_init_replicas": 1}),
    # warm-up is steps or a share; verl's default is 0, ours is 20
    (OPTIM.format("lr: 1e-6"), "train", {"optm_warmup_steps": 0}),
    (OPTIM.format("lr_warmup_steps: 12, lr_warmup_steps_ratio: 0.5"), "train", {"optm_warmup_steps": 12}),
    (OPTIM.format("lr_warmup_steps: -1, lr_warmup_steps_ratio: 0.05"), "train", {"optm_warmup_steps": 0.05}),
    # a cosine after steps of warm-up needs the number of steps; a floor without decay is not written
    (COSINE + "trainer: {total_training_steps: 200}", "train", {"optm_decay_ratio": 0.9}),
    (COSINE, "train", {"optm_decay_ratio": 1.0}),
    (OPTIM.format("min_lr_ratio: 0.1, warmup_style: constant"), "train", {"optm_min_lr_factor": None}),
    # megatron's optimizer warms up from 1e-6 / 1e-5; its decay counts the warm-up
    ("megatron", "train", {"optm_name": "AdamW", "optm_decay_type": "inverse_sqrt", "optm_decay_steps": None}),
    ("megatron", "train", {"optm_warmup_start_factor": 0.1, "optm_min_lr_factor": 0.1, "optm_grad_norm_clip": 0.5}),
    (MEGATRON.format(LINEAR), "train", {"optm_decay_type": "linear", "optm_decay_steps": 100}),
    (OPTIM.format("optimizer: Adam"), "train", {"optm_name": "Adam"}),
    (
        OPTIM.format("optimizer: SGD, override_optimizer_config: {momentum: 0.5}"),
        *("train", {"optm_name": "SGD", "optm_momentum": 0.5}),
    ),
    (OPTIM.format("optimizer: AdamW8bit, optimizer_impl: torchao.optim"), "train", {"optm_name": "AdamW8bit"}),
    (MEGATRON.format("optimizer: sgd"), "train", {"optm_name": "SGD", "optm_momentum": 0.9}),
    (MEGATRON.format("optimizer: muon, muon_momentum: 0.9"), *("train", {"optm_name": "Muon", "optm_momentum": 0.9})),
    (MEGATRON.format("optimizer: adam, muon_momentum: 0.9"), "train", {"optm_momentum": None}),
    (MEGATRON.format(LINEAR), "train", {"optm_min_lr_factor": 0.1, "optm_decay_ratio": None}),
    (MEGATRON.format(WSD), "train", {"optm_decay_type": "wsd", "optm_decay_steps": 30}),
    (MEGATRON.format(WSD), "train", {"optm_wsd_decay_type": "exponential"}),
    # SFT decays over a tenth of what warm-up leaves; the optimizer's epsilon is torch's
    ("sft", "train", {"optm_decay_type": "wsd", "optm_decay_ratio": pytest.approx(0.1 * 0.8)}),
    ("sft", "train", {"optm_betas": [0.9, 0.95]}),
    ("", "train", {"epsilon": 1e-8}),
    # types and kernels act; masters are never float16
    (
        ACTOR.format("fsdp_config: {model_dtype: fp16, dtype: float16, mixed_precision: {reduce_dtype: half}}"),
        "train",
        {"master_dtype": "float32", "param_dtype": "float16", "fsdp_reduce_dtype": "float16"},
    ),
    (ACTOR.format("use_torch_compile: true"), "train", {"compile": True}),
    ("sft", "policy", {"enable_liger_kernel": True}),
    # clipping, Dr. GRPO, KL in the loss and in the reward
    (ACTOR.format("clip_ratio: 0.1"), POLICY, {"epsilon_low": 0.1, "epsilon_high": 0.1}),
    (CLIPS, POLICY, {"epsilon_low": 0.1, "epsilon_high": 0.3, "lower_bound_ratio": 5.0}),
    ("megatron", POLICY, {"loss_type": "seq-mean-token-mean", "unbiased_loss_max_tokens": 2000}),
    ("megatron", POLICY, {"unbiased_advantage": True}),
    (ACTOR.format("use_kl_loss: true, " + LOSS_TERM), POLICY, {"kl_beta": 0.04, "kl_type": "k2"}),
    (ACTOR.format("use_kl_loss: false, " + LOSS_TERM), POLICY, {"kl_beta": None, "kl_type": None}),
    ("ppo", POLICY, {"kl_in_reward": REWARD_TERM}),
    # dynamic sampling, the overlong penalty, correction
    ("recent", POLICY, {"filter_reward_metric": ["by_source"], "max_retry_for_on_policy": 10}),
    ("recent", POLICY, {"overlong_reward": PENALTY, "rollout_correction": CORRECTION}),
    ("recent", "controller", {"oversample": 3.0}),
    # rewards by source or by the user's function
    ("", POLICY, {"reward_function": "by_source", "response_column_name": "reward_model.ground_truth"}),
    ("ppo", POLICY, {"reward_function": "code/scores.py:polite"}),
    ("custom_reward_function: {path: my.py, name: null}", POLICY, {"reward_function": "my.py:compute_score"}),
    # greedy validation ignores its sampling keys
    (GREEDY, "validation", {"temperature": 0.0, "top_p": None}),
    ("ppo", "validation", {"temperature": 0.6, "top_k": 40, "top_p": 0.95, "n_generation": 3}),
    # checkpoints
    ("ppo", CKPT, {"enable_checkpoint": True, "save_freq": 25, "max_keep": 1, "export_safetensors": True}),
    ("ppo", "train", {"resume": "runs/helpful/ppo-7b/step_50"}),
    ("grpo", "train", {"resume": False}),
    # engine arguments pass through or go to their own key
    ("recent", "rollout", {"max_num_seqs": 64, "engine_kwargs": {"limit_mm_per_prompt": {"image": 2}}}),
    ("ppo", "rollout", {"engine_kwargs": {"mm_processor_cache_gb": 0}}),
    # SFT reads columns inside structs
    ("sft", POLICY, {"type": "sft", "prompt_column_name": "extra_info.question"}),
    ("sft", POLICY, {"response_column_name": "extra_info.answer"}),
    # asynchronous training keeps its bound, and shares nothing, as by default
    (ASYNC.format(""), POLICY, {"on_policy": False, "allowed_outdated_steps": 6}),
    (ASYNC.format(""), "train", {"sync_weight_interval": 3}),
    (ASYNC.format(""), "placement", {"share": None}),
    (ASYNC.format(", use_v1: false"), POLICY, {"on_policy": True, "allowed_outdated_steps": None}),
]
"""An example or the lines of a small file, one of our sections, and what it holds then."""


@pytest.mark.parametrize(("source", "section", "expected"), FACTS)
def test_a_file_comes_to_these_values(source: str, section: str, expected: dict[str, Any]) -> None:
    found = example(source) if source in NAMES else rl(source)
    assert {key: value_of(found, f"{section}.{key}") for key in expected} == expected


FILTERED = "actor_rollout_ref: {{rollout: {{top_p: 0.9, top_k: {}, repetition_penalty: 1.05, min_p: 0.1}}}}"


def test_filters_and_penalties_of_training_are_kept() -> None:
    found = rl(FILTERED.format(50))
    expected = {"top_p": 0.9, "top_k": 50, "min_p": 0.1, "repetition_penalty": 1.05}
    assert {key: value_of(found, f"rollout.sampling_config.{key}") for key in expected} == expected
    assert not any("top_p" in warning for warning in found.warnings)
    assert any("top_p below 1 without a top_k" in warning for warning in rl(FILTERED.format(-1)).warnings)


def test_evaluation() -> None:
    assert example("evaluation").config["evaluation"] == {
        "dataset": {"files": ["results/answers.parquet"]},
        "prompt_column_name": "question",
        "responses_column_name": "completions",
        "data_source_column_name": "origin",
        "reference_column_name": "truth.ground_truth",
        "reward_function": "code/scores.py:exact",
    }


# --- batches --------------------------------------------------------------------------------------------------


def test_a_mini_batch_of_everything_is_one_optimizer_step() -> None:
    conversion = example("grpo")
    assert value_of(conversion, f"{POLICY}.batch_size_per_optimize") is None
    entry = conversion.entry("actor_rollout_ref.actor.ppo_mini_batch_size")
    assert entry.targets == ((f"{POLICY}.batch_size_per_optimize", None),)


def test_the_deprecated_twin_is_divided_by_the_ranks() -> None:
    conversion = example("ppo_old")
    assert value_of(conversion, f"{POLICY}.mini_batch") == 32 // 4
    twin = conversion.entry("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu")
    assert twin.outcome is Outcome.IMPLICIT


def test_two_twins_are_a_conflict_that_is_reported() -> None:
    conversion = rl("actor_rollout_ref: {actor: {ppo_micro_batch_size: 64, ppo_micro_batch_size_per_gpu: 4}}")
    assert value_of(conversion, f"{POLICY}.mini_batch") == 4
    assert any("ppo_micro_batch_size" in warning for warning in conversion.warnings)


# --- meshes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "expected"), [(-1, (8, 1)), (8, (8, 1)), (64, (8, 1)), (1, (1, 8)), (2, (2, 4))])
def test_fsdp_size_by_verls_rule(size: int, expected: tuple[int, int]) -> None:
    sizes = value_of(rl(f"actor_rollout_ref: {{actor: {{fsdp_config: {{fsdp_size: {size}}}}}}}"), MESH)
    assert (sizes["dp_shard_size"], sizes.get("dp_replicate_size", 1)) == expected


def test_memory_is_traded_as_in_verl() -> None:
    """Offloads and recomputation are taken as they are; of two ways to name units the size counts."""
    found = dict(target for entry in example("megatron").entries for target in entry.targets)
    names = ["fsdp_offload", "fsdp_gradient_offload", "optimizer_offload", "recompute_moe_layers"]
    assert all(found[f"train.{name}"] is True for name in names)
    assert (found["train.recompute_granularity"], found["train.overlap_grad_reduce"]) == ("selective", False)
    found = dict(target for entry in example("ppo").entries for target in entry.targets)
    assert found["reference.fsdp_wrap_min_params"] == 50000
    assert "reference.fsdp_wrap_layers" not in found


def test_the_hybrid_engine_shares_gpus() -> None:
    entry = example("ppo").entry("actor_rollout_ref.hybrid_engine")
    assert dict(entry.faithful or entry.targets)["placement.share"] == "time"
    assert value_of(example("ppo_old"), "placement.share") == "memory"  # free_cache_engine: False


# --- schedules ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.1, 0.07, 0.3, 0.05, 1.0, 0.123456789])
def test_a_cosine_takes_what_warm_up_leaves(share: float) -> None:
    text = OPTIM.format(f"lr_warmup_steps_ratio: {share}, warmup_style: cosine, min_lr_ratio: 0.1")
    keys = rl(text).config["train"]
    assert keys["optm_decay_type"] == "cosine"
    assert math.isclose(keys["optm_decay_ratio"] + share, 1.0)
    assert keys["optm_decay_ratio"] + share <= 1.0
    assert keys["optm_min_lr_factor"] == 0.1
    assert keys["optm_warmup_start_factor"] == 0.1


# --- the loss -------------------------------------------------------------------------------------------------


def test_an_old_file_says_that_its_kl_is_gone() -> None:
    conversion = example("ppo_old")
    assert "kl_in_reward" not in conversion.config["train"]["train_policy"]
    assert any("kl_in_reward.beta = 0.005" in warning for warning in conversion.warnings)


@pytest.mark.parametrize(
    ("theirs", "our"), [("gae", "gae"), ("rloo", "rloo"), ("grpo_passk", "pass_at_k"), ("opo", "opo")]
)
def test_estimators(theirs: str, our: str) -> None:
    text = f"algorithm: {{adv_estimator: {theirs}}}\nactor_rollout_ref: {{rollout: {{n: 4}}}}"
    conversion = rl(text)
    assert value_of(conversion, f"{POLICY}.advantage_estimator") == our
    assert value_of(conversion, "critic.enable") is (True if theirs == "gae" else None)


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
    assert {key: value_of(conversion, key) for key in expected} == expected
    assert value_of(conversion, "train.optm_lr") is None  # the same as ours
    assert {addition.key for addition in conversion.additions} >= set(expected)


def test_validation_before_training_only() -> None:
    conversion = rl("data: {val_files: v.parquet}\ntrainer: {test_freq: -1}")
    keys = value_of(conversion, "validation")
    assert keys["enable"] is True
    assert keys["freq"] >= 10**9
    assert value_of(rl("trainer: {test_freq: 5}"), "validation.enable") is None  # nothing to validate on


def test_sglang_becomes_vllm_loudly() -> None:
    conversion = example("ppo_old")
    assert value_of(conversion, "rollout.backend") == "vllm"
    assert any("sglang" in warning for warning in conversion.warnings)


def test_home_is_written_out_and_said() -> None:
    conversion = example("ppo")
    files = value_of(conversion, f"{POLICY}.dataset.files")
    assert files == [f"/home/somebody/corpora/helpful/train-{index}.parquet" for index in (0, 1)]
    assert "`~`" in conversion.entry("data.train_files").note
    assert value_of(conversion, "rollout.custom_server") == "/home/somebody/code/server.py:HouseServer"


def test_sft_on_conversations() -> None:
    text = "model: {partial_pretrain: m}\ndata: {multiturn: {enable: true, messages_key: turns}, prompt_key: q}"
    keys = convert_text(text, "sft.yaml").config["train"]["train_policy"]
    assert keys["conversation_column_name"] == "turns"
    assert "prompt_column_name" not in keys


@pytest.mark.parametrize(
    ("written", "rule"),
    [
        ("", "error"),
        ("truncation: error, pad_mode: right", "error"),
        ("truncation: left", "left"),
        ("truncation: right", "right"),
        ("truncation: error, pad_mode: no_padding", "right"),
        ("truncation: middle", "middle"),
    ],
)
def test_sft_cuts_conversations_as_verl_does(written: str, rule: str | None) -> None:
    text = f"model: {{partial_pretrain: m}}\ntrainer: {{test_freq: 1}}\ndata: {{val_files: v.parquet, {written}}}"
    found = convert_text(text, "sft.yaml")
    keys = [f"{section}.overlong_prompts" for section in (f"{POLICY}.dataset", "validation.dataset")]
    assert [value_of(found, key) for key in keys] == [rule, rule]
    assert list(found.unsupported) == ([] if rule else ["data.truncation"])


def test_rows_that_are_used_at_most() -> None:
    text = "data: {train_files: a.parquet, val_files: b.parquet, train_max_samples: 500, val_max_samples: -1}"
    config = convert_text(text, "a.yaml").config
    assert config["train"]["train_policy"]["dataset"]["max_samples"] == 500
    assert "max_samples" not in config["validation"]["dataset"]


def test_translated_keys_are_named_with_the_real_one() -> None:
    conversion = example("translated")
    for entry in conversion.entries:
        assert entry.outcome is Outcome.NONE, entry.source
        assert "machine translation" in entry.note
    assert "data.path" in conversion.entry("数据.路径").note
    assert "optim.lr" in conversion.entry("优化器配置.学习率").note


def test_adapters_of_both_backends() -> None:
    flat = rl("actor_rollout_ref: {model: {lora_rank: 8, lora: {rank: 0, alpha: 32}}}")
    assert value_of(flat, "policy.lora") == {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
    assert not flat.warnings
    text = "actor_rollout_ref: {model: {lora: {rank: 4, alpha: 8, target_modules: [linear_qkv, linear_proj, "
    nested = rl(text + "linear_fc1, linear_fc2]}}}")
    assert value_of(nested, "policy.lora") == {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


# --- what is wrong --------------------------------------------------------------------------------------------


A, REPLAY = "actor_rollout_ref.actor", f"{POLICY}.routing_replay"
MODE, RECORDED = f"{A}.router_replay.mode", "actor_rollout_ref.rollout.enable_rollout_routing_replay"


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize(
    "others", [{}, {f"{A}.megatron.router_replay.mode": "R3"}, {f"{A}.fsdp_config.use_torch_compile": True}]
)
def test_the_experts_of_the_engine_are_replayed(others: dict[str, Any], recorded: bool) -> None:
    found = rl(yaml_text(nest({MODE: "R3", RECORDED: recorded} | others)))
    assert (value_of(found, REPLAY), value_of(found, "train.compile")) == ("ids", False)
    assert not found.unsupported
    (entry,) = [entry for entry in found.entries if entry.source == MODE]
    assert ("ends at the first batch" in entry.note) is not recorded


@pytest.mark.parametrize(
    ("key", "mode", "words"),
    [
        (MODE, "R2", "R2 replays what the trainer itself chose"),
        (f"{A}.megatron.router_replay.mode", "R2", "R2 replays what the trainer itself chose"),
        (MODE, "R4", "expected disabled, R2 or R3"),
        ("actor_rollout_ref.ref.router_replay.mode", "R3", "choose for themselves"),
        ("critic.megatron.router_replay.mode", "R2", "choose for themselves"),
    ],
)
def test_other_replays_are_refused(key: str, mode: str, words: str) -> None:
    gae = "algorithm: {adv_estimator: gae}\n"
    found = rl(gae + yaml_text(nest({key: mode, f"{A}.use_kl_loss": True})))
    assert found.unsupported == {key: mode}
    assert value_of(found, REPLAY) is None
    (note,) = [entry.note for entry in found.entries if entry.source == key]
    assert words in note


def test_recording_alone_replays_nothing() -> None:
    found = rl(yaml_text(nest({MODE: "disabled", RECORDED: True})))
    assert (value_of(found, REPLAY), found.unsupported) == (None, {})
    assert {entry.outcome for entry in found.entries[1:]} == {Outcome.IMPLICIT}


OLDER_RATIOS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("rollout_is: false, rollout_is_threshold: 2.0, rollout_is_level: token", {}, []),
    ("rollout_is: true, rollout_is_threshold: null, rollout_is_level: token, rollout_is_mode: mask", {}, []),
    ("rollout_is: true, rollout_is_threshold: 2.0, rollout_is_level: token", {"weights": "token", "cap": 2.0}, []),
    (
        "rollout_is: true, rollout_is_threshold: 2.0, rollout_is_level: sequence, rollout_is_mode: mask",
        {"weights": "sequence", "cap": 2.0},
        ["algorithm.rollout_is_mode"],
    ),
]


@pytest.mark.parametrize(("keys", "correction", "lost"), OLDER_RATIOS)
def test_ratios_of_verl_0_6_weigh_where_they_are_switched_on(
    keys: str, correction: dict[str, Any], lost: list[str]
) -> None:
    found = rl(f"algorithm: {{adv_estimator: grpo, rollout_is_veto_threshold: null, {keys}}}")
    assert (value_of(found, f"{POLICY}.rollout_correction") or {}) == correction
    assert list(found.unsupported) == lost


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
    found = rl(text)
    (entry,) = [entry for entry in found.entries if not entry.understood]
    assert entry.note
    assert (entry.outcome is Outcome.UNKNOWN) is text.startswith("trainer")


def test_answers_of_training_and_validation_have_one_directory() -> None:
    apart = rl("trainer: {rollout_data_dir: ~/a, validation_data_dir: /b}\n")
    assert value_of(apart, "logging.samples_dir") == "/home/somebody/a"
    assert any("/home/somebody/a, not /b" in warning for warning in apart.warnings)
    alone = rl("trainer: {rollout_data_dir: null, validation_data_dir: /b}\n")
    assert value_of(alone, "logging.samples_dir") == "/b"
    assert not any("/b" in warning for warning in alone.warnings)


@pytest.mark.parametrize(("written", "thinks"), [("", True), ("true", True), ("false", False)])
def test_a_template_thinks_unless_it_is_told_not_to(written: str, thinks: bool) -> None:
    text = f"data: {{apply_chat_template_kwargs: {{enable_thinking: {written}}}}}" if written else ""
    assert value_of(rl(text), "rollout.multi_turn_config.enable_thinking") is thinks
