"""Memory estimates against numbers worked out by hand for a model of 1,000 parameters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.plan.machine import find_capacity, host_memory, parse_gpus
from launcher.preflight.memory import size_text, trainer
from launcher.preflight.models import LocalModel, Shape
from launcher.preflight.serving_memory import (
    host_copy,
    published_on_device,
    rollout_cache,
    rollout_weights,
    snapshots,
)
from schema.config.sections.policy import LoraConfig
from schema.config.sections.teacher import TeacherConfig
from tests.launcher.samples import config

SHAPE = Shape(layers=2, hidden=8, heads=4, kv_heads=2, head_dim=4, intermediate=12, vocabulary=20)
MODEL = LocalModel(Path("m"), parameters=1000, layer=400, rest=200, source="by hand", shape=SHAPE)
PER_LAYER = 6 * 8 + 2 * 4 * (4 + 2) + 4 * 12
"""Numbers that one layer keeps per token: 48 + 48 + 48."""


def job(**train: Any) -> Any:
    policy = {"model_max_length": 10, "model_gradient_checkpointing": True}
    training = {"param_dtype": "float32", "train_batch_per_replica": 8, **train}
    training.setdefault("train_policy", {"mini_batch": 4})
    return config(train=training, policy=policy)


def on_mesh(**sizes: int) -> Any:
    """A job on a mesh, of two micro-batches of 20 tokens on each of two data ranks."""
    made = job(train_policy={"mini_batch": 2})
    mesh = made.policy.parallelism.model_copy(update={"tp_size": 1, "dp_shard_size": 1, **sizes})
    return made.model_copy(update={"policy": made.policy.model_copy(update={"parallelism": mesh})})


def parts(*arguments: Any) -> dict[str, int]:
    return {part.name: part.bytes for part in trainer(*arguments)}


def test_one_rank_in_float32() -> None:
    found = parts(job(), MODEL, 1, 1)
    tokens = 4 * 10
    assert found == {
        "weights that are updated": 4000,
        "gradients": 4000,
        "optimizer (AdamW)": 8000,
        "activations": tokens * 4 * (2 * 8 + PER_LAYER),
        "output layer": 4 * tokens * 20 + 4 * 20 * 8,
    }


WEIGHTS, GRADIENTS, MOMENTS = "weights that are updated", "gradients", "optimizer (AdamW)"
GATHERED, WHOLE, ACTIVATIONS, OUTPUT = "gathered weights", "gradients before reduction", "activations", "output layer"
HALF: dict[str, Any] = {"param_dtype": "bfloat16"}
OF_EXPERTS = replace(MODEL, experts=600)
DEEP = replace(MODEL, parameters=3000)
ATTENTION, EXPERTS = 2 * 4 * (4 + 2), 4 * 12
"""Bytes per token that a layer keeps for attention, and for the rest between its norms."""
SELECTIVE, OF_EXPERTS_ALONE = {"recompute_granularity": "selective"}, {"recompute_moe_layers": True}
KEPT_WHOLE = config(
    train={"param_dtype": "float32", "train_batch_per_replica": 8, "train_policy": {"mini_batch": 4}},
    policy={"model_max_length": 10, "model_gradient_checkpointing": False},
)
"""Nothing is recomputed."""
MEMORY: list[tuple[Any, LocalModel, int, int, dict[str, int | None]]] = [
    # what optimizers and the average keep: two moments, one, or numbers of 8 bits; Muon one for its matrices
    (job(optm_name="Adam"), MODEL, 1, 1, {"optimizer (Adam)": 8000}),
    (job(optm_name="Adam"), MODEL, 2, 2, {"optimizer (Adam)": 4000}),
    (job(optm_name="SGD"), MODEL, 1, 1, {"optimizer (SGD)": None}),
    (job(optm_name="SGD", optm_momentum=0.9), MODEL, 1, 1, {"optimizer (SGD)": 4000}),
    (job(optm_name="Muon"), MODEL, 1, 1, {"optimizer (Muon)": (800 + 2 * 200) * 4}),
    (job(optm_name="AdamW8bit"), MODEL, 1, 1, {"optimizer (AdamW8bit)": 2125}),
    (job(optm_name="AdamW8bit"), MODEL, 2, 2, {"optimizer (AdamW8bit)": 2125 // 2}),
    (job(ema_decay=0.9), MODEL, 1, 1, {"moving average of the weights": 4000}),
    (job(ema_decay=0.9), MODEL, 2, 2, {"moving average of the weights": 2000}),
    # shards; one micro-batch of 4 samples on each of 2 ranks
    (job(**HALF), MODEL, 2, 2, {WEIGHTS: 2000, GRADIENTS: 2000, MOMENTS: 4000, GATHERED: 2 * (200 + 2 * 400)}),
    (job(**HALF), MODEL, 2, 2, {WHOLE: None, ACTIVATIONS: 40 * 2 * (2 * 8 + PER_LAYER)}),
    # several micro-batches add up in shards, or are kept whole, unless shards are as large
    (job(**HALF), MODEL, 2, 1, {GRADIENTS: 2000, WHOLE: 0}),
    (job(**HALF, fsdp_accumulation="whole"), MODEL, 2, 1, {GRADIENTS: 2000, WHOLE: 2000}),
    (job(**HALF, fsdp_accumulation="whole", fsdp_reduce_dtype="bfloat16"), MODEL, 2, 1, {WHOLE: None}),
    (job(), MODEL, 1, 1, {WHOLE: None}),
    # ranks that share layers: nothing is cut over data, or both ways
    (on_mesh(tp_size=2), MODEL, 2, 1, {WEIGHTS: 2000, GRADIENTS: 2000, GATHERED: None, WHOLE: None}),
    (on_mesh(tp_size=2), MODEL, 2, 1, {ACTIVATIONS: 20 * 4 * (2 * 8 + 48 + (48 + 48) // 2)}),
    (on_mesh(tp_size=2), MODEL, 2, 1, {OUTPUT: (4 * 20 * 20 + 4 * 20 * 8) // 2}),
    (on_mesh(tp_size=2, dp_shard_size=2), MODEL, 4, 2, {WEIGHTS: 1000, GATHERED: 2 * (200 + 2 * 400), WHOLE: 0}),
    # in a type of its own the gradient of logits is there next to them, and that of the matrix adds up
    (job(**HALF), MODEL, 1, 1, {OUTPUT: (4 + 2) * 40 * 20 + 4 * 20 * 8}),
    # ranks that share sequences
    (on_mesh(cp_size=2), MODEL, 2, 1, {ACTIVATIONS: 10 * 4 * (2 * 8 + PER_LAYER), OUTPUT: 4 * 10 * 20 + 4 * 20 * 8}),
    (on_mesh(cp_size=2), MODEL, 2, 1, {GATHERED: 4 * (200 + 2 * 400), WHOLE: 0}),
    # ranks that share experts, three quarters of a layer; where layers are cut, experts are anyway
    (
        on_mesh(dp_shard_size=2, ep_size=2), OF_EXPERTS, 2, 2,
        {WEIGHTS: 2000, GATHERED: 4 * (200 + 2 * (400 - 300 + 300 // 2)), WHOLE: 0},
    ),
    (on_mesh(tp_size=2, ep_size=2), OF_EXPERTS, 2, 1, {WEIGHTS: 2000}),
    # copies of the shards gather too
    (on_mesh(dp_replicate_size=2), MODEL, 1, 2, {WEIGHTS: 4000, GATHERED: 4 * (200 + 2 * 400)}),
    # what is never sharded again is whole; larger units are gathered as a whole
    (job(**HALF, fsdp_reshard_after_forward="never"), MODEL, 2, 2, {GATHERED: 2000}),
    (job(**HALF, fsdp_wrap_min_params=500), MODEL, 2, 2, {GATHERED: 2 * (200 + 800)}),
    *(
        (job(**HALF, fsdp_wrap_min_params=least), DEEP, 2, 2, {GATHERED: 2 * held})
        for least, held in ((0, 200 + 800), (500, 200 + 1000), (10**6, 3000))
    ),
    # gradients that are reduced late are whole, and with those on the host both are there
    (job(**HALF, overlap_grad_reduce=False), MODEL, 2, 2, {WHOLE: 4000 - 2000}),
    (job(**HALF, overlap_grad_reduce=False), MODEL, 2, 1, {WHOLE: 4000}),
    (job(**HALF, overlap_grad_reduce=False, fsdp_accumulation="whole"), MODEL, 2, 1, {WHOLE: 4000 - 2000}),
    (job(**HALF, overlap_grad_reduce=False, fsdp_offload=True), MODEL, 2, 2, {WHOLE: 4000}),
    (job(**HALF, overlap_grad_reduce=False, fsdp_gradient_offload=True), MODEL, 2, 2, {WHOLE: 4000}),
    # activations without recomputation, and with a part of it
    (KEPT_WHOLE, MODEL, 1, 1, {ACTIVATIONS: 40 * 4 * 2 * PER_LAYER}),
    *(
        (job(**keys), MODEL, 1, 1, {ACTIVATIONS: 40 * 4 * numbers})
        for keys, numbers in (
            (SELECTIVE, 2 * (PER_LAYER - ATTENTION) + ATTENTION),
            (OF_EXPERTS_ALONE, 2 * (PER_LAYER - EXPERTS) + EXPERTS),
            (SELECTIVE | OF_EXPERTS_ALONE, 2 * (PER_LAYER - ATTENTION - EXPERTS) + EXPERTS),
        )
    ),
    # tokens of a micro-batch; a batch has 8 samples
    *(
        (job(train_policy=policy), MODEL, ranks, ranks, {ACTIVATIONS: tokens * 4 * (2 * 8 + PER_LAYER)})
        for policy, ranks, tokens in (
            ({"mini_batch": 4}, 1, 40),
            ({"mini_batch": 100}, 1, 80),
            ({"mini_batch": 100}, 4, 20),
            ({"max_token_len_per_mini_batch": 25}, 1, 25),
            ({"max_token_len_per_mini_batch": 1000}, 1, 80),
            ({"mini_batch": 100, "batch_size_per_optimize": 2}, 1, 20),
        )
    ),
]  # fmt: skip
"""Rows of job, model, ranks, data ranks and the bytes of each part; None: the job has no such part."""


@pytest.mark.parametrize(("job", "model", "ranks", "data_ranks", "expected"), MEMORY)
def test_what_parts_hold(
    job: Any, model: LocalModel, ranks: int, data_ranks: int, expected: dict[str, int | None]
) -> None:
    found = parts(job, model, ranks, data_ranks)
    assert {name: found.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("train", "others", "copy", "kept"),
    [
        (HALF, {}, 2000, 2 * 2000),
        ({"transfer_dtype": "float32"}, {}, 4000, 2 * 4000),
        (HALF, {"weight_sync": {"encoding": "full"}}, 2000, 2000),
    ],
)
def test_copies_have_the_transfer_type_and_deltas_need_the_version_before(
    train: dict[str, Any], others: dict[str, Any], copy: int, kept: int
) -> None:
    job = config(train=train, **others)
    assert (host_copy(job, MODEL).bytes, snapshots(job, MODEL).bytes) == (copy, kept)


@pytest.mark.parametrize(
    ("others", "memory", "kept"),
    [
        ({}, 0, 500),
        ({}, 16_000, 500),
        ({}, 1600, 100),
        ({"weight_sync": {"encoding": "full"}}, 0, 0),
        ({"placement": {"share": "memory"}}, 0, 0),
        ({"train": {**HALF, "fsdp_offload": True}}, 0, 0),
    ],
)
def test_a_gpu_holds_the_version_that_deltas_are_made_against(others: dict[str, Any], memory: int, kept: int) -> None:
    found = published_on_device(config(**{"train": HALF, **others}), MODEL, 4, memory)
    assert sum(part.bytes for part in found) == kept


def test_a_reference_model_is_kept_as_well() -> None:
    with_kl = {"param_dtype": "bfloat16", "train_policy": {"mini_batch": 4, "kl_beta": 0.1}}
    assert parts(job(**with_kl), MODEL, 2, 2)["reference model"] == 1000
    own = {"reference": "GPU 3"}
    *_, apart = (part for part in trainer(job(**with_kl), MODEL, 2, 2, own) if part.device)
    assert (apart.name, apart.bytes, apart.device) == ("reference model", 2000, "GPU 3")


def test_adapters_train_next_to_a_base_in_half_precision() -> None:
    plain = job(param_dtype="bfloat16", train_policy={"mini_batch": 4, "kl_beta": 0.1}, ema_decay=0.9)
    keys = LoraConfig(r=2, r_pattern={"q_proj": 4}, modules_to_save=["lm_head"])
    wanted = plain.model_copy(update={"policy": plain.policy.model_copy(update={"lora": keys})})
    adapters = 4 * 2 * (4 * 8 + 2 * 16 + 2 * 8 + 3 * (8 + 12)) + 20 * 8
    found = parts(wanted, MODEL, 2, 2)
    assert found["weights of the base"] == 1000
    for name in ("weights that are updated", "gradients", "adapters of the reference"):
        assert found[name] == adapters * 2
    assert found["optimizer (AdamW)"] == adapters * 4
    assert found["moving average of the weights"] == adapters * 2
    assert "reference model" not in found
    assert host_copy(wanted, MODEL).bytes == 2000
    alone = wanted.model_copy(update={"weight_sync": wanted.weight_sync.model_copy(update={"lora": "adapter"})})
    assert host_copy(alone, MODEL).bytes == adapters * 2


def test_a_critic_is_trained_as_well() -> None:
    with_critic = job(train_policy={"mini_batch": 4, "advantage_estimator": "gae"})
    with_critic = with_critic.model_copy(
        update={"critic": with_critic.critic.model_copy(update={"enable": True, "param_dtype": "float32"})}
    )
    alone, found = parts(job(), MODEL, 1, 1), parts(with_critic, MODEL, 1, 1)
    for name in ("weights that are updated", "gradients", "optimizer (AdamW)"):
        assert found[f"critic: {name}"] == alone[name]
    there = {part.device for part in trainer(with_critic, MODEL, 2, 2, {"critic": "GPU 4"}) if part.device}
    assert there == {"GPU 4"}


def test_models_with_a_mesh_of_their_own_are_cut_by_it() -> None:
    with_critic = job(
        param_dtype="bfloat16", train_policy={"mini_batch": 4, "advantage_estimator": "gae", "kl_beta": 0.1}
    )
    mesh = with_critic.policy.parallelism.model_copy(update={"tp_size": 1})
    stages, copies = (mesh.model_copy(update=size) for size in ({"pp_size": 2}, {"dp_replicate_size": 2}))
    critic = {"enable": True, "parallelism": stages}
    config = with_critic.model_copy(
        update={
            "critic": with_critic.critic.model_copy(update=critic),
            "reference": with_critic.reference.model_copy(update={"parallelism": copies}),
        }
    )
    found = parts(config, MODEL, 2, 2)
    assert found["reference model"] == 2000
    assert found["critic: weights that are updated"] == 2000
    assert found["critic: gathered weights"] == 2 * (200 + 400), "what one of two stages has outside the layers"


def test_local_teachers_are_kept_as_well() -> None:
    one, far = {"name": "one", "model": "a/b", "offload": True}, {"name": "far", "url": "http://a:1"}
    config = job(param_dtype="bfloat16").model_copy(
        update={"teacher": [TeacherConfig(**one), TeacherConfig(name="two", model="c/d"), TeacherConfig(**far)]}
    )
    large = replace(MODEL, parameters=7 * MODEL.parameters)
    found = {part.name: part for part in trainer(config, MODEL, 2, 2, teachers={"two": large})}
    assert (found["teacher one"].bytes, found["teacher one"].device) == (1000, "host")
    assert found["teacher one"].formula.endswith(", if as large")
    assert (found["teacher two"].bytes, found["teacher two"].device) == (7000, "")
    assert "teacher far" not in found


def test_activations_of_two_layers_are_on_the_device() -> None:
    deep = replace(MODEL, shape=replace(SHAPE, layers=5))
    found = {part.name: part for part in trainer(job(activation_offload=True), deep, 1, 1)}
    assert found["activations"].bytes == 40 * 4 * (2 * 8 + PER_LAYER)
    assert found["offloaded activations"].bytes == 40 * 4 * 5 * 8
    assert found["offloaded activations"].device == "host"


def test_what_is_offloaded_is_in_host_memory() -> None:
    def on_host(**keys: Any) -> dict[str, int]:
        return {part.name: part.bytes for part in trainer(job(**keys), MODEL, 2, 2) if part.device == "host"}

    everything = {"weights that are updated": 2000, "gradients": 2000, "optimizer (AdamW)": 4000}
    assert on_host(fsdp_offload=True) == everything
    assert on_host(fsdp_offload=True, ema_decay=0.9)["moving average of the weights"] == 2000
    assert on_host(fsdp_gradient_offload=True) == {"gradients": 2000}
    assert on_host(optimizer_offload=True) == {"optimizer (AdamW)": 4000}
    assert parts(job(fsdp_offload=True), MODEL, 1, 1)["gathered weights"] == 4 * (200 + 2 * 400)
    with_kl = job(train_policy={"mini_batch": 4, "kl_beta": 0.1})
    away = with_kl.model_copy(update={"reference": with_kl.reference.model_copy(update={"offload": True})})
    assert [part.name for part in trainer(away, MODEL, 2, 2) if part.device] == ["reference model"]


def test_what_comes_back_for_a_step_takes_the_place_of_activations() -> None:
    small, large = MODEL, replace(MODEL, parameters=10**9)
    both = {"fsdp_gradient_offload": True, "optimizer_offload": True}
    name = "gradients and moments in a step"
    assert name not in parts(job(**both), small, 1, 1), "less than the activations"
    found = parts(job(**both), large, 1, 1)
    gone = found["activations"] + found["output layer"]
    assert found[name] == 4 * 10**9 + 2 * 4 * (2**24 + 20 * 8) - gone
    assert parts(job(optimizer_offload=True), large, 2, 2)[name] == 2 * 4 * (2**24 + 10 * 8) - gone


def test_a_model_of_unknown_shape_has_no_activations() -> None:
    shapeless = LocalModel(Path("m"), 1000, 400, 200, "by hand", None)
    assert set(parts(job(), shapeless, 1, 1)) == {"weights that are updated", "gradients", "optimizer (AdamW)"}
    assert rollout_cache(job(), shapeless, 1, 10**6, on_gpu=False) is None


def test_rollout_weights_and_cache() -> None:
    rollout = {"max_concurrent_samples": 16, "backend": "transformers"}
    made = config(train={"param_dtype": "bfloat16"}, policy={"model_max_length": 10}, rollout=rollout)
    assert rollout_weights(made, MODEL, 1).bytes == 2000
    cache = rollout_cache(made, MODEL, 1, 100_000, on_gpu=False)
    assert cache is not None
    assert cache.per_token == 2 * 2 * 2 * 4 * 2, "keys and values, layers, heads, numbers, bytes"
    assert cache.tokens == 25_000 // 64
    assert (cache.sequences, cache.sequence_tokens) == (16, 10)
    assert cache.bytes == 16 * 10 * 64, "more than all sequences need is never taken"
    on_gpu = rollout_cache(made, MODEL, 1, 100_000, on_gpu=True)
    assert on_gpu is not None
    assert on_gpu.room == 80_000 - 2000


def test_vllm_takes_its_share_and_splits_heads() -> None:
    rollout = {"backend": "vllm", "gpu_memory_utilization": 0.5, "dtype": "float32", "max_num_seqs": 3}
    made = config(rollout=rollout, policy={"model_max_length": 10})
    cache = rollout_cache(made, MODEL, 2, 100_000, on_gpu=True)
    assert cache is not None
    assert cache.per_token == 2 * 2 * 1 * 4 * 4
    assert cache.room == 50_000 - 1000 * 4 // 2
    assert cache.sequences == 3
    tight = rollout_cache(made, MODEL, 1, 4000, on_gpu=True)
    assert tight is not None
    assert (tight.room, tight.tokens) == (0, 0)


def test_stages_copies_and_quantised_weights_of_vllm() -> None:
    experts = replace(MODEL, experts=600)

    def needs(model: LocalModel, ranks: int, quantization: str = "none", **mesh: int) -> tuple[int, int]:
        rollout = {"backend": "vllm", "dtype": "bfloat16", "quantization": quantization, "parallelism": mesh}
        made = config(rollout=rollout)
        cache = rollout_cache(made, model, ranks, 10**6, on_gpu=True)
        assert cache is not None
        return rollout_weights(made, model, ranks).bytes, cache.per_token

    assert needs(MODEL, 1, tp_size=1) == (2000, 64)
    assert needs(MODEL, 2, tp_size=1, pp_size=2) == (1000, 32)
    assert needs(MODEL, 2, tp_size=1, dp_shard_size=2) == (2000, 64)
    assert needs(experts, 4, tp_size=2, dp_shard_size=2, ep_size=4) == (400 + 300, 32)
    assert needs(MODEL, 1, "fp8", tp_size=1) == (1000, 64)
    assert needs(experts, 1, "int8_per_channel_weight_only", tp_size=1) == (800 + 600, 64)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (5 * 2**30, "5 GiB"), (3 * 2**50, "3072 TiB")],
)
def test_sizes_in_words(size: int, text: str) -> None:
    assert size_text(size) == text


# ---- what there is ----------------------------------------------------------------------------------------


def test_host_memory_is_that_of_the_control_group(tmp_path: Path) -> None:
    info, most, used = (tmp_path / name for name in ("meminfo", "max", "current"))
    assert host_memory(info, most, used) == (0, 0)
    info.write_text("MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:  600 kB\n")
    assert host_memory(info, most, used) == (1_024_000, 614_400)
    most.write_text("max\n")
    assert host_memory(info, most, used) == (1_024_000, 614_400)
    most.write_text("500000\n")
    used.write_text("100000\n")
    assert host_memory(info, most, used) == (500_000, 400_000)


def test_gpus_are_known_by_index_and_uuid() -> None:
    found = parse_gpus("0, GPU-a1, 81559\n1, GPU-b2, [N/A]\nno devices\n")
    assert found == {"0": 81559 * 2**20, "GPU-a1": 81559 * 2**20}


def test_this_machine_has_memory() -> None:
    there = find_capacity(())
    assert 0 < there.host_free <= there.host_total
    assert there.gpus == {}
