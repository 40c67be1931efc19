"""How verl shards a trained model: `fsdp_config`, `megatron` and Ulysses, for actor, critic and reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schema.interop.engine.rules import (
    ABSENT,
    ConversionContext,
    Converter,
    KeyPath,
    Result,
    Rule,
    always,
    as_flag,
    as_integer,
    as_texts,
    choice,
    flag,
    implicit,
    integer,
    mapped,
    unless,
)
from schema.interop.verl.facts import ACTOR, is_megatron, lacking, sharding, widths

DTYPES = {
    "fp32": "float32",
    "float32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "half": "float16",
}

_TABLES = ("fsdp", "model.fsdp_config")  # what newer and older versions call the critic's `fsdp_config`
_SIZES = {"tp": "tp_size", "pp": "pp_size", "cp": "cp_size", "ep": "ep_size"}
_MEGATRON_SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
}


def parallelism(context: ConversionContext, role: str, ours: str) -> dict[str, int]:
    """The whole mesh of a role under our names."""
    replicate, shard = sharding(context, role)
    sizes = {f"{ours}.parallelism.{_SIZES[short]}": size for short, size in widths(context, role).items()}
    sizes[f"{ours}.parallelism.dp_shard_size"] = shard
    sizes[f"{ours}.parallelism.dp_replicate_size"] = replicate
    return sizes


class Mesh:
    """The rows of one role. role: its prefix in verl; ours: `policy`, `critic` or `reference`.

    speed: the section with our keys of offload and wrapping (`train`, `critic`, `reference`). Other roles
    than the policy have a mesh of their own only where it differs from the policy's.
    """

    def __init__(
        self, role: str, ours: str, speed: str, when: Callable[[ConversionContext], str] | None = None
    ) -> None:
        self.role, self.ours, self.speed, self.when = role, ours, speed, when

    def rules(self) -> tuple[Rule, ...]:
        """All rows of the role."""
        return (*self._sizes(), *self._fsdp("fsdp_config", _TABLES), *self._megatron())

    # --- sizes --------------------------------------------------------------------------------------------

    def _sizes(self) -> tuple[Rule, ...]:
        ulysses = Converter(
            self._width("cp", megatron=False),
            self._ours("cp_size"),
            "the ring of ranks that share a sequence",
        )
        rule = Rule(f"{self.role}.ulysses_sequence_parallel_size", ulysses, self._default(1), when=self.when)
        words = "< 0 or ≥ world: shard over all ranks; 1: replicate; else replicate × shard"
        size = Converter(self._fsdp_size, self._ours("dp_shard_size", "dp_replicate_size"), words)
        return (
            rule,
            Rule(
                f"{self.role}.fsdp_config.fsdp_size",
                size,
                self._default(-1),
                tuple(f"{self.role}.{table}.fsdp_size" for table in _TABLES),
                self.when,
            ),
        )

    def _default(self, value: Any) -> Any:
        return value if self.ours == "policy" else ABSENT

    def _ours(self, *names: str) -> tuple[str, ...]:
        return tuple(f"{self.ours}.parallelism.{name}" for name in names)

    def _own_mesh(self, context: ConversionContext) -> tuple[tuple[str, Any], ...] | None:
        """The mesh of a role beside the policy; None where it is the policy's."""
        own = parallelism(context, self.role, self.ours)
        policy = parallelism(context, ACTOR, "policy")
        return None if list(own.values()) == list(policy.values()) else tuple(own.items())

    def _width(self, short: str, megatron: bool) -> Callable[[ConversionContext, KeyPath], Result]:
        def run(context: ConversionContext, leaf: KeyPath) -> Result:
            size = 1 if leaf.value is None else as_integer(leaf.value)
            if is_megatron(context, self.role) is not megatron:
                return implicit("no effect with this strategy")
            if self.ours == "policy":
                taken = widths(context, self.role)[short]
                if taken != max(size, 1) and context.has(leaf.key):
                    return implicit(f"{taken} is taken: {self.role}'s own size counts where it is above 1")
                return mapped((f"policy.parallelism.{_SIZES[short]}", taken))
            own = self._own_mesh(context)
            return implicit("the same mesh as the policy's") if own is None else mapped(*own)

        return run

    def _fsdp_size(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is not None:
            as_integer(leaf.value)
        if is_megatron(context, self.role):
            replicate, shard = sharding(context, self.role)
            if self.ours != "policy":
                return implicit("no effect with Megatron")
            note = "Megatron's distributed optimizer shards over all data-parallel ranks"
            return mapped(("policy.parallelism.dp_shard_size", shard), note=note)
        if self.ours != "policy":
            own = self._own_mesh(context)
            return implicit("the same mesh as the policy's") if own is None else mapped(*own)
        replicate, shard = sharding(context, self.role)
        note = (
            f"{replicate} copies, each over {shard} ranks"
            if replicate > 1
            else f"sharded over all {shard} ranks"
        )
        return mapped(
            ("policy.parallelism.dp_shard_size", shard),
            ("policy.parallelism.dp_replicate_size", replicate),
            note=note,
        )

    # --- FSDP ---------------------------------------------------------------------------------------------

    def _fsdp(self, table: str, also: tuple[str, ...]) -> tuple[Rule, ...]:
        """Rows of `fsdp_config` and of its other names."""
        speed, reference = self.speed, self.ours == "reference"
        offload = f"{speed}.offload" if reference else f"{speed}.fsdp_offload"
        on_host = Converter(self._param_offload(offload), (offload,), "either of the two switches")
        own: dict[str, Converter] = {
            "wrap_policy.min_num_params": unless(
                [0], "0: by layer, as always", integer(f"{speed}.fsdp_wrap_min_params")
            ),
            "wrap_policy.transformer_layer_cls_to_wrap": Converter(
                _wrapped(f"{speed}.fsdp_wrap_layers"),
                (f"{speed}.fsdp_wrap_layers",),
                "one name becomes a list",
            ),
            "wrap_policy.disable": lacking(False),
            "param_offload": on_host,
            "offload_policy": on_host,
            "grad_offload": always("the reference model has no gradients")
            if reference
            else unless([False], "false: off", flag(f"{speed}.fsdp_gradient_offload")),
            "optimizer_offload": always("the reference model has no optimizer")
            if reference
            else unless([False], "false: off", flag(f"{speed}.optimizer_offload")),
            "reshard_after_forward": always("sharded again after forward, unless pipelined")
            if reference
            else unless(
                [True],
                "true: the default, unless pipelined",
                choice(f"{speed}.fsdp_reshard_after_forward", {True: "always", False: "never"}),
            ),
            "forward_prefetch": always("FSDP2 prefetches by itself"),
            "use_orig_params": always("FSDP2 always keeps the model's own parameters"),
            "forward_only": always("the reference model never trains, the others always do"),
            "strategy": always("how a model is sharded follows from its parallelism"),
            "entropy_from_logits_with_chunking": always(
                "log-probs and entropy are always computed in chunks"
            ),
            "entropy_from_logits_chunk_size": always("log-probs and entropy are always computed in chunks"),
            "entropy_checkpointing": always("entropy is always recomputed in backward"),
            "use_no_sync_for_gradient_accumulation": always("gradients are reduced once per optimizer step"),
            "pad_to_length": always("padding never changes a number here"),
            "pad_to_length_bucket": always("padding never changes a number here"),
            "ulysses_sequence_parallel_size": Converter(
                self._width("cp", megatron=False), self._ours("cp_size"), ""
            ),
            "use_torch_compile": always("the reference model is compiled like the policy")
            if reference
            else flag(f"{speed}.compile"),
            "full_determinism": unless([False], "false: off", flag("train.deterministic")),
            "seed": Converter(_seed, ("train.seed",), "where data.seed is not written"),
        }
        if not reference:
            own |= {
                "model_dtype": choice(f"{speed}.master_dtype", DTYPES),
                "dtype": choice(f"{speed}.param_dtype", DTYPES),
                "mixed_precision.param_dtype": choice(f"{speed}.param_dtype", DTYPES),
                "mixed_precision.reduce_dtype": choice(f"{speed}.fsdp_reduce_dtype", DTYPES),
                "mixed_precision.buffer_dtype": always("buffers keep the model's own type"),
            }
        else:
            same = always("the reference model computes in the policy's types")
            own |= {"model_dtype": same, "dtype": same, "mixed_precision.*": same}
        rules = [
            Rule(
                f"{self.role}.{table}.{name}",
                converter,
                also=tuple(f"{self.role}.{other}.{name}" for other in also),
                when=self.when,
            )
            for name, converter in own.items()
        ]
        for name in (table, *also):
            prefix = f"{self.role}.{name}"
            qat = Converter(_qat(f"{prefix}.qat.enable"), (), "with `enable: true` only")
            rules.append(Rule(f"{prefix}.qat.*", qat, when=self.when))
            other = always("settings of another sharding library")
            rules.append(Rule(f"{prefix}.turbo_config.*", other, when=self.when))
        return tuple(rules)

    def _param_offload(self, ours: str) -> Callable[[ConversionContext, KeyPath], Result]:
        def run(context: ConversionContext, leaf: KeyPath) -> Result:
            if leaf.value is None or not as_flag(leaf.value):
                return implicit("false: off")
            return mapped((ours, True))

        return run

    # --- Megatron -----------------------------------------------------------------------------------------

    def _megatron(self) -> tuple[Rule, ...]:
        speed, prefix, reference = self.speed, f"{self.role}.megatron", self.ours == "reference"
        model = "policy" if self.ours == "policy" else self.ours
        offload = f"{speed}.offload" if reference else f"{speed}.fsdp_offload"
        checkpoints = lacking(False, "", words="loads Megatron's own checkpoints")
        own: dict[str, tuple[Converter, Any]] = {
            name: (Converter(self._width(short, megatron=True), self._ours(_SIZES[short]), ""), ABSENT)
            for name, short in _MEGATRON_SIZES.items()
        }
        own["tensor_model_parallel_size"] = (own["tensor_model_parallel_size"][0], ABSENT)
        off = always("the reference model has no gradients and no optimizer")
        own |= {
            "virtual_pipeline_model_parallel_size": (
                unless([None, 1], "one stage per rank", integer(f"{self.ours}.parallelism.virtual_pp_size")),
                ABSENT,
            ),
            "expert_tensor_parallel_size": (lacking(1), ABSENT),
            "sequence_parallel": (
                Converter(
                    self._sequence_parallel, self._ours("sequence_parallel"), "with tensor parallelism only"
                ),
                ABSENT,
            ),
            "param_offload": (Converter(self._param_offload(offload), (offload,), "as it is"), ABSENT),
            "grad_offload": (
                off if reference else unless([False, None], "off", flag(f"{speed}.fsdp_gradient_offload")),
                ABSENT,
            ),
            "optimizer_offload": (
                off if reference else unless([False, None], "off", flag(f"{speed}.optimizer_offload")),
                ABSENT,
            ),
            "use_distributed_optimizer": (
                always("the optimizer's state is sharded like the parameters"),
                ABSENT,
            ),
            "use_dist_checkpointing": (checkpoints, ABSENT),
            "dist_checkpointing_path": (checkpoints, ABSENT),
            "dist_checkpointing_prefix": (checkpoints, ABSENT),
            "dist_ckpt_optim_fully_reshardable": (always("checkpoints can always be resharded"), ABSENT),
            "distrib_optim_fully_reshardable_mem_efficient": (
                always("checkpoints can always be resharded"),
                ABSENT,
            ),
            "use_mbridge": (always("models are always loaded from the hub's format"), ABSENT),
            "vanilla_mbridge": (always("models are always loaded from the hub's format"), ABSENT),
            "use_remove_padding": (Converter(_packing, ("train.sequence_packing",), "as it is"), ABSENT),
            "entropy_from_logits_with_chunking": (always("entropy is always computed in chunks"), ABSENT),
            "entropy_from_logits_chunk_size": (always("entropy is always computed in chunks"), ABSENT),
            "pad_bshd_to_minibatch_max": (always("padding never changes a number here"), ABSENT),
            "pad_to_length": (always("padding never changes a number here"), ABSENT),
            "pad_to_length_bucket": (always("padding never changes a number here"), ABSENT),
            "forward_only": (always("the reference model never trains, the others always do"), ABSENT),
            "seed": (Converter(_seed, ("train.seed",), "where data.seed is not written"), ABSENT),
            "dtype": (
                always("the policy's type") if reference else choice(f"{speed}.param_dtype", DTYPES),
                ABSENT,
            ),
            "use_megatron_fsdp": (always("sharding follows from parallelism.dp_shard_size"), ABSENT),
            "override_mcore_model_config": (lacking({}), ABSENT),
            "dynamic_context_parallel": (lacking(False), ABSENT),
            "max_seqlen_per_dp_cp_rank": (always("no effect while dynamic_context_parallel = false"), ABSENT),
            "num_layers_per_virtual_pipeline_stage": (lacking(), ABSENT),
            "router_replay.mode": (lacking("disabled"), ABSENT),
            "router_replay.*": (lacking(), ABSENT),
            "qat.*": (Converter(_qat(f"{prefix}.qat.enable"), (), "with `enable: true` only"), ABSENT),
            "override_mcore_model_config.*": (lacking(), ABSENT),
            "override_ddp_config.overlap_grad_reduce": (
                off if reference else flag(f"{speed}.overlap_grad_reduce"),
                ABSENT,
            ),
            "override_ddp_config.*": (lacking(), ABSENT),
            "override_transformer_config.recompute_granularity": (
                off
                if reference
                else unless(
                    [None],
                    "null: as model.enable_gradient_checkpointing says",
                    choice(f"{speed}.recompute_granularity", {"full": "full", "selective": "selective"}),
                ),
                ABSENT,
            ),
            "override_transformer_config.recompute_modules": (
                off
                if reference
                else Converter(
                    _recompute_modules(
                        f"{prefix}.override_transformer_config.recompute_granularity",
                        f"{speed}.recompute_moe_layers",
                    ),
                    (f"{speed}.recompute_moe_layers",),
                    "`moe` among them → true",
                ),
                ABSENT,
            ),
            "override_transformer_config.recompute_method": (
                always("recomputation goes layer by layer"),
                ABSENT,
            ),
            "override_transformer_config.recompute_num_layers": (
                always("recomputation goes layer by layer"),
                ABSENT,
            ),
            "override_transformer_config.attention_backend": (
                always("attention is chosen by torch and transformers"),
                ABSENT,
            ),
            "override_transformer_config.*": (lacking(False), ABSENT),
        }
        if model == "policy":
            dispatch = {"allgather": "allgather", "alltoall": "alltoall", "flex": "alltoall"}
            own |= {
                "override_transformer_config.moe_token_dispatcher_type": (
                    choice("policy.moe_token_dispatcher", dispatch),
                    ABSENT,
                ),
                "override_transformer_config.moe_grouped_gemm": (flag("policy.moe_grouped_gemm"), ABSENT),
                "override_transformer_config.moe_shared_expert_overlap": (
                    flag("policy.moe_shared_expert_overlap"),
                    ABSENT,
                ),
            }
        return tuple(
            Rule(f"{prefix}.{name}", converter, default, when=self.when)
            for name, (converter, default) in own.items()
        )

    def _sequence_parallel(self, context: ConversionContext, leaf: KeyPath) -> Result:
        value = False if leaf.value is None else as_flag(leaf.value)
        if widths(context, self.role)["tp"] == 1 or self.ours != "policy":
            return implicit("no effect without tensor parallelism of its own")
        return mapped(("policy.parallelism.sequence_parallel", value))


def _wrapped(ours: str) -> Callable[[ConversionContext, KeyPath], Result]:
    def run(context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value in (None, [], "None"):
            return implicit("null: the model's layers, as always")
        return mapped((ours, as_texts(leaf.value)))

    return run


def _qat(switch: str) -> Callable[[ConversionContext, KeyPath], Result]:
    converter = lacking()

    def run(context: ConversionContext, leaf: KeyPath) -> Result:
        return (
            converter.run(context, leaf) if context.flag(switch) else implicit(f"off: {switch} is not true")
        )

    return run


def _packing(context: ConversionContext, leaf: KeyPath) -> Result:
    return mapped(("train.sequence_packing", True if leaf.value is None else as_flag(leaf.value)))


def _recompute_modules(granularity: str, ours: str) -> Callable[[ConversionContext, KeyPath], Result]:
    def run(context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is None or context.text(granularity) != "selective":
            return implicit("no effect without recompute_granularity = selective")
        modules = as_texts(leaf.value)
        return mapped((ours, "moe" in modules), note="attention is always among them")

    return run


def _seed(context: ConversionContext, leaf: KeyPath) -> Result:
    """The job has one seed: data.seed names it, else the model's."""
    if leaf.value is None or leaf.value == 42:
        return implicit("the seed of a job is 42 unless another is written")
    if context.integer("data.seed", None) is not None:
        return implicit("the job has one seed: data.seed")
    return mapped(("train.seed", abs(as_integer(leaf.value)) % 2**32))
