"""How verl shards a trained model: `fsdp_config`, `megatron` and Ulysses, for actor, critic and reference."""

from __future__ import annotations

from typing import Any

from convert.engine import to, values
from convert.engine.fallback import MEGATRON_SPEED
from convert.engine.keys import words
from convert.engine.model import Outcome, Result, implicit, mapped
from convert.engine.rules import (
    ABSENT,
    ConversionContext,
    Converter,
    KeyPath,
    Rule,
    When,
    computed,
    rules_below,
)
from convert.verl.facts import (
    ACTOR,
    compiled,
    has_adapters,
    is_megatron,
    is_veomni,
    lacking,
    router_replay,
    sharding,
    widths,
)

_PADDING = "padding never changes a number here"
_FORWARD_ONLY = "the reference model never trains, the others always do"
_TABLES = ("fsdp_config", "fsdp", "model.fsdp_config")  # the last two: of the critic, newer and older
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
    """The rules of one role. role: its prefix in verl; ours: `policy`, `critic` or `reference`.

    speed: the section with our keys of offload and wrapping (`train`, `critic`, `reference`). Other roles
    than the policy have a mesh of their own only where it differs from the policy's.
    """

    def __init__(self, role: str, ours: str, speed: str, when: When | None = None) -> None:
        self.role, self.ours, self.speed, self.when = role, ours, speed, when

    def rules(self) -> tuple[Rule, ...]:
        """All rules of the role."""
        return (*self._sizes(), *self._fsdp(), *self._megatron(), *self._veomni())

    # --- sizes --------------------------------------------------------------------------------------------

    def _sizes(self) -> tuple[Rule, ...]:
        ulysses = self._width("cp", "fsdp", words="the ring of ranks that share a sequence")
        words = "< 0 or ≥ world: shard over all ranks; 1: replicate; else replicate × shard"
        size = Converter(self._fsdp_size, self._ours("dp_shard_size", "dp_replicate_size"), words)
        return (
            Rule(f"{self.role}.ulysses_sequence_parallel_size", ulysses, self._default(1), when=self.when),
            self._fsdp_rule("fsdp_size", size, self._default(-1)),
        )

    def _fsdp_rule(self, name: str, converter: Converter, default: Any = ABSENT) -> Rule:
        """A key of `fsdp_config`, and where other versions have it."""
        key, *others = (f"{self.role}.{table}.{name}" for table in _TABLES)
        return Rule(key, converter, default, tuple(others), self.when)

    def _default(self, value: Any) -> Any:
        return value if self.ours == "policy" else ABSENT

    def _ours(self, *names: str) -> tuple[str, ...]:
        return tuple(f"{self.ours}.parallelism.{name}" for name in names)

    def _own_mesh(self, context: ConversionContext) -> Result:
        """The mesh of another role than the policy, written where it is not the policy's."""
        own = parallelism(context, self.role, self.ours)
        if list(own.values()) == list(parallelism(context, ACTOR, "policy").values()):
            return implicit("the same mesh as the policy's")
        if self.ours == "reference" and has_adapters(context):
            return implicit("the reference model is the policy without its adapters, in its mesh")
        return mapped(*own.items())

    def _virtual(self, context: ConversionContext, leaf: KeyPath) -> Result:
        """Stages of each rank: of another role than the policy only next to a mesh of its own."""
        size = 1 if leaf.value is None else values.integer(leaf.value)
        if self.ours != "policy":
            if (found := self._own_mesh(context)).outcome is Outcome.IMPLICIT:
                return found
        elif size == 1:
            return implicit("one stage per rank")
        return mapped((self._ours("virtual_pp_size")[0], max(size, 1)))

    def _width(self, short: str, engine: str, words: str = "") -> Converter:
        """A size of the mesh, from the table of one engine: `fsdp`, `megatron` or `veomni`."""

        @computed(*self._ours(_SIZES[short]), words=words)
        def convert(context: ConversionContext, leaf: KeyPath) -> Result:
            size = 1 if leaf.value is None else values.integer(leaf.value)
            if self._engine(context) != engine:
                return implicit("no effect with this strategy")
            if self.ours == "policy":
                taken = widths(context, self.role)[short]
                if taken != max(size, 1) and context.has(leaf.key):
                    return implicit(f"{taken} is taken: {self.role}'s own size counts where it is above 1")
                return mapped((f"policy.parallelism.{_SIZES[short]}", taken))
            return self._own_mesh(context)

        return convert

    def _engine(self, context: ConversionContext) -> str:
        if is_veomni(context, self.role):
            return "veomni"
        return "megatron" if is_megatron(context, self.role) else "fsdp"

    def _fsdp_size(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is not None:
            values.integer(leaf.value)
        replicate, shard = sharding(context, self.role)
        if is_veomni(context, self.role) and ".veomni." not in leaf.key:
            return implicit("no effect with this strategy")
        if is_megatron(context, self.role):
            if self.ours != "policy":
                return implicit("no effect with Megatron")
            note = "Megatron's distributed optimizer shards over all data-parallel ranks"
            return mapped(("policy.parallelism.dp_shard_size", shard), note=note)
        if self.ours != "policy":
            return self._own_mesh(context)
        note = f"sharded over all {shard} ranks"
        if replicate > 1:
            note = f"{replicate} copies, each over {shard} ranks"
        return mapped(
            ("policy.parallelism.dp_shard_size", shard),
            ("policy.parallelism.dp_replicate_size", replicate),
            note=note,
        )

    # --- FSDP ---------------------------------------------------------------------------------------------

    def _fsdp(self) -> tuple[Rule, ...]:
        """Rules of `fsdp_config` and of its other names."""
        least = to.unless([0], "0: by layer, as always", to.integer(f"{self.speed}.fsdp_wrap_min_params"))
        own = {
            "wrap_policy.min_num_params": least,
            "wrap_policy.transformer_layer_cls_to_wrap": self._wrapped(),
            "wrap_policy.disable": lacking(False),
            "forward_prefetch": to.always("FSDP2 prefetches by itself"),
            "use_orig_params": to.always("FSDP2 always keeps the model's own parameters"),
            "forward_only": to.always(_FORWARD_ONLY),
            "strategy": to.always("how a model is sharded follows from its parallelism"),
            "entropy_from_logits_with_chunking entropy_from_logits_chunk_size": to.always(
                "log-probs and entropy are always computed in chunks"
            ),
            "entropy_checkpointing": to.always("entropy is always recomputed in backward"),
            "use_no_sync_for_gradient_accumulation": to.always(
                "gradients are reduced once per optimizer step"
            ),
            "pad_to_length pad_to_length_bucket": to.always(_PADDING),
            "ulysses_sequence_parallel_size": self._width("cp", "fsdp"),
            "full_determinism": to.unless([False], "false: off", to.flag("train.deterministic")),
            "seed": _seed,
            "param_offload offload_policy": self._param_offload("either of the two switches"),
            **(self._fsdp_reference() if self.ours == "reference" else self._fsdp_trained()),
        }
        rules = [self._fsdp_rule(name, how) for names, how in own.items() for name in names.split()]
        for prefix in (f"{self.role}.{table}" for table in _TABLES):
            other = to.always("settings of another sharding library")
            tables = {"qat.*": _qat(f"{prefix}.qat.enable"), "turbo_config.*": other}
            rules += rules_below(prefix, tables, self.when)
        return tuple(rules)

    def _wrapped(self) -> Converter:
        ours, least = f"{self.speed}.fsdp_wrap_layers", "wrap_policy.min_num_params"

        @computed(ours, words="one name becomes a list")
        def convert(context: ConversionContext, leaf: KeyPath) -> Result:
            if leaf.value in (None, [], "None"):
                return implicit("null: the model's layers, as always")
            if any(context.get(f"{self.role}.{table}.{least}", None) for table in _TABLES):
                return implicit("min_num_params chooses, as in verl")
            return mapped((ours, values.texts(leaf.value)))

        return convert

    def _fsdp_reference(self) -> dict[str, Converter]:
        """What differs for a model that is not trained."""
        return {
            "grad_offload": to.always("the reference model has no gradients"),
            "optimizer_offload": to.always("the reference model has no optimizer"),
            "reshard_after_forward": to.always("sharded again after forward, unless pipelined"),
            "use_torch_compile": to.always("the reference model is compiled like the policy"),
            "model_dtype dtype mixed_precision.*": to.always(
                "the reference model computes in the policy's types"
            ),
        }

    def _fsdp_trained(self) -> dict[str, Converter]:
        """Keys of a model that is trained."""
        speed = self.speed
        reshard = to.choice(f"{speed}.fsdp_reshard_after_forward", {True: "always", False: "never"})
        return {
            "grad_offload": to.unless([False], "false: off", to.flag(f"{speed}.fsdp_gradient_offload")),
            "optimizer_offload": to.unless([False], "false: off", to.flag(f"{speed}.optimizer_offload")),
            "reshard_after_forward": to.unless([True], "true: the default, unless pipelined", reshard),
            "use_torch_compile": (compiled if self.role == ACTOR else to.flag)(f"{speed}.compile"),
            "model_dtype": to.choice(f"{speed}.master_dtype", values.MASTERS),
            "dtype mixed_precision.param_dtype": to.choice(f"{speed}.param_dtype", values.DTYPES),
            "mixed_precision.reduce_dtype": to.choice(f"{speed}.fsdp_reduce_dtype", values.DTYPES),
            "mixed_precision.buffer_dtype": to.always("buffers keep the model's own type"),
        }

    def _param_offload(self, words: str) -> Converter:
        name = "offload" if self.ours == "reference" else "fsdp_offload"
        return to.switch((f"{self.speed}.{name}", True), words=words)

    # --- Megatron -----------------------------------------------------------------------------------------

    def _megatron(self) -> tuple[Rule, ...]:
        prefix, words = f"{self.role}.megatron", "with tensor parallelism only"
        virtual = Converter(self._virtual, self._ours("virtual_pp_size"), "null: one stage per rank")
        sequence = Converter(self._sequence_parallel, self._ours("sequence_parallel"), words)
        sizes = {name: self._width(short, "megatron") for name, short in _MEGATRON_SIZES.items()}
        table = {
            **sizes,
            "virtual_pipeline_model_parallel_size": virtual,
            "expert_tensor_parallel_size": lacking(1),
            "sequence_parallel": sequence,
            "use_distributed_optimizer": to.always("the optimizer's state is sharded like the parameters"),
            "use_dist_checkpointing dist_checkpointing_path dist_checkpointing_prefix": lacking(
                False, "", words="loads Megatron's own checkpoints"
            ),
            "dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient": to.always(
                "checkpoints can always be resharded"
            ),
            "use_mbridge vanilla_mbridge": to.always("models are always loaded from the hub's format"),
            "use_remove_padding": _packing,
            "entropy_from_logits_with_chunking entropy_from_logits_chunk_size": to.always(
                "entropy is always computed in chunks"
            ),
            "pad_bshd_to_minibatch_max pad_to_length pad_to_length_bucket": to.always(_PADDING),
            "forward_only": to.always(_FORWARD_ONLY),
            "seed": _seed,
            "use_megatron_fsdp": to.always("sharding follows from parallelism.dp_shard_size"),
            "override_mcore_model_config override_transformer_config": lacking({}),
            "dynamic_context_parallel": lacking(False),
            "max_seqlen_per_dp_cp_rank": to.always("no effect while dynamic_context_parallel = false"),
            "router_replay.mode": router_replay if self.role == ACTOR else lacking("disabled"),
            "qat.*": _qat(f"{prefix}.qat.enable"),
            "override_transformer_config.recompute_method override_transformer_config.recompute_num_layers": (
                to.always("recomputation goes layer by layer")
            ),
            "override_transformer_config.attention_backend": to.always(
                "attention is chosen by torch and transformers"
            ),
            _SPEED: to.always("how Megatron computes changes speed, memory and rounding alone"),
            "num_layers_per_virtual_pipeline_stage router_replay.* override_mcore_model_config.* "
            "override_transformer_config.* override_ddp_config.*": lacking(),
        }
        table["param_offload"] = self._param_offload("as it is")
        own = self._megatron_reference() if self.ours == "reference" else self._megatron_trained()
        return rules_below(prefix, table | own, self.when)

    def _megatron_reference(self) -> dict[str, Converter]:
        """What differs for a model that is not trained."""
        return {
            "dtype": to.always("the policy's type"),
            "grad_offload optimizer_offload override_ddp_config.overlap_grad_reduce "
            "override_transformer_config.recompute_granularity override_transformer_config.recompute_modules": (
                to.always("the reference model has no gradients and no optimizer")
            ),
        }

    def _megatron_trained(self) -> dict[str, Converter]:
        """Keys of a model that is trained; those of its experts for the policy only."""
        speed, transformer = self.speed, "override_transformer_config"
        granularity = f"{self.role}.megatron.{transformer}.recompute_granularity"
        table = {
            "grad_offload": to.unless([False, None], "off", to.flag(f"{speed}.fsdp_gradient_offload")),
            "optimizer_offload": to.unless([False, None], "off", to.flag(f"{speed}.optimizer_offload")),
            "dtype": to.choice(f"{speed}.param_dtype", values.DTYPES),
            "override_ddp_config.overlap_grad_reduce": to.flag(f"{speed}.overlap_grad_reduce"),
            f"{transformer}.recompute_granularity": to.unless(
                [None],
                "null: as model.enable_gradient_checkpointing says",
                to.choice(f"{speed}.recompute_granularity", {"full": "full", "selective": "selective"}),
            ),
            f"{transformer}.recompute_modules": _recompute_modules(
                granularity, f"{speed}.recompute_moe_layers"
            ),
        }
        if self.ours != "policy":
            return table
        dispatch = {"allgather": "allgather", "alltoall": "alltoall", "flex": "alltoall"}
        return table | {
            f"{transformer}.moe_token_dispatcher_type": to.choice("policy.moe_token_dispatcher", dispatch),
            f"{transformer}.moe_grouped_gemm": to.flag("policy.moe_grouped_gemm"),
            f"{transformer}.moe_shared_expert_overlap": to.flag("policy.moe_shared_expert_overlap"),
        }

    def _sequence_parallel(self, context: ConversionContext, leaf: KeyPath) -> Result:
        value = False if leaf.value is None else values.flag(leaf.value)
        if widths(context, self.role)["tp"] == 1:
            return implicit("no effect without tensor parallelism of its own")
        if self.ours != "policy" and (found := self._own_mesh(context)).outcome is Outcome.IMPLICIT:
            return found
        return mapped((self._ours("sequence_parallel")[0], value))

    # --- VeOmni -------------------------------------------------------------------------------------------

    def _veomni(self) -> tuple[Rule, ...]:
        """Rules of `veomni`, of verl's newest engine: sharding as FSDP's, and kernels that change no number."""
        prefix = f"{self.role}.veomni"
        words = "< 0 or ≥ the ranks with data of their own: shard over all; else replicate × shard"
        table = {
            "fsdp_size": Converter(self._fsdp_size, self._ours("dp_shard_size", "dp_replicate_size"), words),
            "ulysses_parallel_size": self._width("cp", "veomni"),
            "expert_parallel_size": self._width("ep", "veomni"),
            "param_offload enable_fsdp_offload": self._param_offload("either of the two switches"),
            "forward_only": to.always(_FORWARD_ONLY),
            "seed": _seed,
            "full_determinism": to.unless([False], "false: off", to.flag("train.deterministic")),
            "pad_to_length pad_to_length_bucket": to.always(_PADDING),
            "strategy init_device enable_full_shard ckpt_manager forward_prefetch basic_modules "
            "activation_gpu_limit enable_reentrant": to.always(
                "how VeOmni loads, shards and recomputes a model"
            ),
            "force_use_huggingface": to.always("models are always those of transformers"),
            "entropy_from_logits_with_chunking entropy_from_logits_chunk_size entropy_checkpointing": to.always(
                "log-probs and entropy are always computed in chunks"
            ),
            _KERNELS: to.always("which kernel computes it changes speed alone"),
            "load_checkpoint_path": lacking(""),
            "router_replay.mode": router_replay if self.role == ACTOR else lacking("disabled"),
            "router_replay.*": lacking(),
        }
        if self.ours == "reference":
            unread = to.always("follows the policy's, or concerns training")
            table["optimizer_offload mixed_precision use_torch_compile"] = unread
        else:
            table |= {
                "optimizer_offload": to.unless(
                    [False], "false: off", to.flag(f"{self.speed}.optimizer_offload")
                ),
                "mixed_precision": to.choice(
                    f"{self.speed}.param_dtype",
                    {True: "bfloat16", False: "float32"},
                    null="null: the default",
                ),
                "use_torch_compile": (compiled if self.role == ACTOR else to.flag)(f"{self.speed}.compile"),
            }
        return rules_below(prefix, table, self.when)


_KERNELS = " ".join(
    f"{name}_implementation"
    for name in words(
        "attn moe cross_entropy_loss rms_norm swiglu_mlp rotary_pos_emb rms_norm_gated causal_conv1d "
        "chunk_gated_delta_rule load_balancing_loss dsa_indexer dsa_attention mhc"
    )
)


_SPEED = " ".join(f"override_transformer_config.{name}" for name in MEGATRON_SPEED)


def _qat(switch: str) -> Converter:
    @computed(words="with `enable: true` only")
    def convert(context: ConversionContext, leaf: KeyPath) -> Result:
        if not context.flag(switch):
            return implicit(f"off: {switch} is not true")
        return lacking().run(context, leaf)

    return convert


@computed("train.sequence_packing", words="as it is")
def _packing(context: ConversionContext, leaf: KeyPath) -> Result:
    return mapped(("train.sequence_packing", True if leaf.value is None else values.flag(leaf.value)))


def _recompute_modules(granularity: str, ours: str) -> Converter:
    @computed(ours, words="`moe` among them → true")
    def convert(context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is None or context.text(granularity) != "selective":
            return implicit("no effect without recompute_granularity = selective")
        modules = values.texts(leaf.value)
        return mapped((ours, "moe" in modules), note="attention is always among them")

    return convert


@computed("train.seed", words="where data.seed is not written")
def _seed(context: ConversionContext, leaf: KeyPath) -> Result:
    """The job has one seed: data.seed names it, else the model's."""
    if leaf.value is None or leaf.value == 42:
        return implicit("the seed of a job is 42 unless another is written")
    if context.integer("data.seed", None) is not None:
        return implicit("the job has one seed: data.seed")
    return mapped(("train.seed", abs(values.integer(leaf.value)) % 2**32))
