"""How verl shards a trained model: `fsdp_config`, `megatron` and Ulysses, for actor, critic and reference."""

from __future__ import annotations

from dataclasses import replace

from convert.engine import to, values
from convert.engine.model import Outcome, Result, implicit, mapped
from convert.engine.rules import ABSENT, ConversionContext, Converter, KeyPath, Rule, When, computed
from convert.verl.facts import (
    ACTOR,
    KEYS,
    compiled,
    has_adapters,
    is_megatron,
    is_veomni,
    lacking,
    router_replay,
    sharding,
    widths,
)

_TABLES = ("fsdp_config", "fsdp", "model.fsdp_config")  # the last two: of the critic, newer and older
_SIZES = {"tp": "tp_size", "pp": "pp_size", "cp": "cp_size", "ep": "ep_size"}


def parallelism(context: ConversionContext, role: str, ours: str) -> dict[str, int]:
    """The whole mesh of a role under our names."""
    replicate, shard = sharding(context, role)
    sizes = {f"{ours}.parallelism.{_SIZES[short]}": size for short, size in widths(context, role).items()}
    sizes[f"{ours}.parallelism.dp_shard_size"] = shard
    sizes[f"{ours}.parallelism.dp_replicate_size"] = replicate
    return sizes


def mesh(role: str, ours: str, speed: str, when: When | None = None) -> tuple[Rule, ...]:
    """The rules of one role. role: its prefix in verl; ours: `policy`, `critic` or `reference`.

    speed: the section with our keys of offload and wrapping (`train`, `critic`, `reference`). Other roles
    than the policy have a mesh of their own only where it differs from the policy's.
    """
    names = (Mesh(role, ours, speed, when), globals())
    fsdp = [
        replace(rule, also=tuple(rule.key.replace("fsdp_config", table, 1) for table in _TABLES[1:]))
        for rule in KEYS.rules("fsdp", *names)
    ]
    sizes = [*KEYS.rules("mesh", *names), *fsdp]
    if ours != "policy":
        sizes = [replace(rule, default=ABSENT) for rule in sizes]
    tables = [rule for table in _TABLES for rule in KEYS.rules("fsdp tables", {"table": table}, *names)]
    return (*sizes, *tables, *KEYS.rules("megatron", *names), *KEYS.rules("veomni", *names))


class Mesh:
    """Names that the rows of the mesh of one role use; see `mesh`."""

    def __init__(self, role: str, ours: str, speed: str, when: When | None) -> None:
        self.role, self.ours, self.speed, self.when = role, ours, speed, when
        self.trained = "frozen" if ours == "reference" else "trained"
        self.megatron = "the reference" if ours == "reference" else ours
        self.offload = "offload" if ours == "reference" else "fsdp_offload"

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
            if (own_mesh := self._own_mesh(context)).outcome is Outcome.IMPLICIT:
                return own_mesh
        elif size == 1:
            return implicit("one stage per rank")
        return leaf.to(max(size, 1))

    def _width(self, key: str, engine: str) -> Converter:
        """A size of the mesh, from the table of one engine: `fsdp`, `megatron` or `veomni`."""
        short = key.rpartition(".")[2].removesuffix("_size")

        @computed(key, words="")
        def convert(context: ConversionContext, leaf: KeyPath) -> Result:
            size = 1 if leaf.value is None else values.integer(leaf.value)
            if self._engine(context) != engine:
                return implicit("no effect with this strategy")
            if self.ours == "policy":
                taken = widths(context, self.role)[short]
                if taken != max(size, 1) and context.has(leaf.key):
                    return implicit(f"{taken} is taken: {self.role}'s own size counts where it is above 1")
                return leaf.to(taken)
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
            return leaf.to(shard, note=note)
        if self.ours != "policy":
            return self._own_mesh(context)
        note = f"sharded over all {shard} ranks"
        if replicate > 1:
            note = f"{replicate} copies, each over {shard} ranks"
        return leaf.to(shard, replicate, note=note)

    def _replay(self) -> Converter:
        return router_replay if self.role == ACTOR else lacking("disabled")

    def _compile(self, ours: str) -> Converter:
        if self.role != ACTOR:
            return to.flag(ours)
        return computed(ours, words="false with `router_replay.mode = R3`", null="null: the default")(compiled)

    def _wrapped(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value in (None, [], "None"):
            return implicit("null: the model's layers, as always")
        least = "wrap_policy.min_num_params"
        if any(context.get(f"{self.role}.{table}.{least}", None) for table in _TABLES):
            return implicit("min_num_params chooses, as in verl")
        return leaf.to(values.texts(leaf.value))

    def _recompute_modules(self, context: ConversionContext, leaf: KeyPath) -> Result:
        granularity = f"{self.role}.megatron.override_transformer_config.recompute_granularity"
        if leaf.value is None or context.text(granularity) != "selective":
            return implicit("no effect without recompute_granularity = selective")
        return leaf.to("moe" in values.texts(leaf.value), note="attention is always among them")

    def _sequence_parallel(self, context: ConversionContext, leaf: KeyPath) -> Result:
        value = False if leaf.value is None else values.flag(leaf.value)
        if widths(context, self.role)["tp"] == 1:
            return implicit("no effect without tensor parallelism of its own")
        if self.ours != "policy" and (own_mesh := self._own_mesh(context)).outcome is Outcome.IMPLICIT:
            return own_mesh
        return leaf.to(value)


def _megatron_packing(context: ConversionContext, leaf: KeyPath) -> Result:
    return leaf.to(True if leaf.value is None else values.flag(leaf.value))


def _seed(context: ConversionContext, leaf: KeyPath) -> Result:
    """The job has one seed: data.seed names it, else the model's."""
    if leaf.value is None or leaf.value == 42:
        return implicit("the seed of a job is 42 unless another is written")
    if context.integer("data.seed", None) is not None:
        return implicit("the job has one seed: data.seed")
    return leaf.to(abs(values.integer(leaf.value)) % 2**32)
