"""How much memory a rank of a trainer takes: formulas over the model's counts, nothing is measured.

N parameters, W shards of one copy (of layers, stages, data and sequence), G what a rank has of N where data-parallel
shards are gathered (N / tp, of experts N / (tp · ep)), T tokens of a micro-batch on a rank (of its piece, with cp):

    one rank of a trainer    weights N·master/W + gradients N·master/W + moments 2·N·master/W
                             + gathered weights (outside the layers + two layers of G)·param, if sharded or cast
                             + gradients before reduction G·reduce: in their place, if a step has several
                             micro-batches that add up whole; next to them, if each is reduced after its backward
                             + activations + output layer
    activations              T·param·(L·K + R), where A = 6·H + (2·heads·dim + 2·kv·dim + 4·I) / tp numbers of one
                             layer are needed per token: K = A and R = 0; of recomputed layers K = H and R = A, and
                             where parts of them are, R the larger of attention, (2·heads·dim + 2·kv·dim) / tp, and
                             experts, 4·I / tp, and K = A without these; all H divided by tp where sequences are split
                             between layers
    output layer             4·Z / tp bytes of logits, Z = min(T·V, logits_at_once), + param·Z / tp of their gradient
                             in another type + 4·V·H / tp of the gradient of the matrix, param·V·H / tp where it comes
                             in parts
                             + N'·param/W of each local teacher, which has N' parameters
    with adapters            weights N·param/W, and weights, gradients and moments as above of the A that train;
                             a reference within the policy A·master/W
    A                        r·L·Σ(in + out) over the linear layers of a layer, and V·H for each of embeddings and
                             output layer that are trained whole: at most, where only some layers have adapters
    in host memory           weights, gradients and moments with fsdp_offload, and then no weights but the gathered
                             ones on the device; gradients or moments alone, which come back for the step (moments of
                             STEPPED numbers and the largest matrix at a time) and count as far as they are more than
                             activations and output layer, which are gone by then; T·param·L·K of activations, of
                             which those of two layers are on the device

`benchmarks/trainer/memory.py` compares them with what ranks of models of more than 100M parameters take. Left out:
fragmentation, CUDA contexts (about half a gigabyte each) and what the allocator keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from launcher.preflight.models import LocalModel
from schema.config import Config, CriticConfig, TrainingConfig
from schema.config.layout import mesh_of, reference_is_within
from schema.config.sections.optimizer import OptimizerKeys, PrecisionKeys
from schema.config.sections.policy import LoraConfig, ParallelismConfig
from schema.util.gpus import logits_at_once

HOST = "host"
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PROGRAM_BYTES = {"policy": 420 * 2**20, "rollout": 420 * 2**20, "controller": 75 * 2**20}
"""A process before it holds anything: Python with torch and transformers, or with the web service (measured)."""
STEPPED = 2**24
"""Parameters whose state is on the device at once with optimizer_offload (policy_worker.memory.offload)."""
NOWHERE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One line of an estimate. device: where it is, if not on the device of its process."""

    name: str
    bytes: int
    formula: str
    device: str = ""


def trainer(
    config: Config,
    model: LocalModel,
    shards: int,
    data_ranks: int,
    apart: Mapping[str, str] = NOWHERE,
    teachers: Mapping[str, LocalModel] = MappingProxyType({}),
    of_gpu: int = 0,
) -> tuple[MemoryPart, ...]:
    """One rank of a policy replica. shards: ranks that share one copy. data_ranks: ranks with data of their own.

    apart: role to its device, of `reference` and `critic`, where they have devices of their own. teachers: local ones
    that are on this machine, by name; the others are taken to be as large as the policy. of_gpu: bytes of its GPU; 0:
    unknown, or none.
    """
    n, param = model.parameters, BYTES[config.train.param_dtype]
    learns = learning(model, config.policy.lora)
    mesh = config.policy.parallelism
    gathered, fsdp_ranks = _gathered_on(mesh, model), data_ranks * mesh.cp_size
    parts = _trained(config.train, model, gathered, shards, fsdp_ranks, config.policy.lora)
    keys = config.train
    if _is_cast(keys, fsdp_ranks):
        whole = learning(gathered, config.policy.lora) * BYTES[keys.fsdp_reduce_dtype]
        of_shard = learns * BYTES[keys.master_dtype] // shards
        parts += _unreduced(keys, whole, of_shard, several=_micro_batches(config, data_ranks) > 1)
    where = HOST if keys.fsdp_offload else ""
    if keys.ema_decay is not None:
        words = f"{learns:,} x 4 B" + (f" / {shards}" if shards > 1 else "")
        parts.append(MemoryPart("moving average of the weights", learns * 4 // shards, words, where))
    if config.has_critic:
        cut = _cut_of(config, "critic", shards, fsdp_ranks)
        differs = config.critic.model_name_or_path not in (None, config.policy.model_name_or_path)
        parts += [
            replace(
                part,
                name=f"critic: {part.name}",
                formula=part.formula + (", if as large" if differs else ""),
                device=part.device or apart.get("critic", ""),
            )
            for part in _trained(config.critic, model, _gathered_on(cut.mesh, model), *cut[1:], config.critic.lora)
        ]
    if reference_is_within(config):
        master = BYTES[config.train.master_dtype]
        words = f"{learns:,} x {master} B" + (f" / {shards}" if shards > 1 else "")
        parts.append(MemoryPart("adapters of the reference", learns * master // shards, words, where))
    elif config.has_reference:
        alone = apart.get("reference", "")
        differs = config.reference.model_name_or_path not in (None, config.policy.model_name_or_path)
        parted = 1 if alone else _cut_of(config, "reference", shards, fsdp_ranks).shards
        words = f"{n:,} x {param} B" + (f" / {parted}" if parted > 1 else "") + (", if as large" if differs else "")
        place = HOST if config.reference.offload else alone
        parts.append(MemoryPart("reference model", n * param // parted, words, place))
    for teacher in config.local_teachers:
        teacher_model = teachers.get(teacher.name)
        count = (teacher_model or model).parameters
        words = f"{count:,} x {param} B" + (f" / {shards}" if shards > 1 else "")
        place = HOST if teacher.offload else ""
        size = count * param // shards
        parts.append(
            MemoryPart(f"teacher {teacher.name}", size, words + ("" if teacher_model else ", if as large"), place)
        )
    kept = _activations(config, model, param, data_ranks, of_gpu)
    return (*parts, *_back_for_a_step(keys, learns, model, shards, kept), *kept)


def _unreduced(keys: PrecisionKeys, whole: int, of_shard: int, *, several: bool) -> Iterator[MemoryPart]:
    """Count gradients of all parameters that a rank gathers, or say what they would take.

    whole: their bytes; of_shard: those of the shard, which come later where all micro-batches are reduced at once.
    several: whether there are more micro-batches than one."""
    name, in_shards = "gradients before reduction", keys.fsdp_accumulation == "sharded" and several
    if keys.overlap_grad_reduce and (in_shards or not several):
        if in_shards and whole > of_shard:
            difference = size_text(whole - of_shard)
            yield MemoryPart(name, 0, f'train.fsdp_accumulation = "whole" would take {difference} more')
        return
    in_place = not in_shards and not keys.fsdp_offload and not keys.fsdp_gradient_offload
    if (extra := whole - in_place * of_shard) > 0:
        yield MemoryPart(name, extra, f"{whole:,} B" + " in the place of gradients" * in_place)


def _back_for_a_step(
    keys: TrainingConfig, learns: int, model: LocalModel, shards: int, kept: list[MemoryPart]
) -> Iterator[MemoryPart]:
    """Count what comes from host memory for an optimizer step, beyond what a backward has in its place.

    learns: how many numbers train.
    """
    if keys.fsdp_offload:
        return
    master, back = BYTES[keys.master_dtype], 0
    if keys.fsdp_gradient_offload:
        back += learns * master // shards
    if keys.optimizer_offload:
        matrix = 0 if model.shape is None else model.shape.vocabulary * model.shape.hidden
        of_rank = learns // shards
        (state,) = [part.bytes for part in _optimizer(keys, _of(model, learns), master, shards)] or [0]
        back += state * min(of_rank, STEPPED + min(matrix, learns) // shards) // max(of_rank, 1)
    back -= sum(part.bytes for part in kept if not part.device)
    if back > 0:
        yield MemoryPart("gradients and moments in a step", back, f"{back:,} B more than activations")


def _of(model: LocalModel, learns: int) -> LocalModel:
    """The part of a model that trains."""
    return model if learns == model.parameters else replace(model, parameters=learns, rest=0)


class _Cut(NamedTuple):
    """A model on a mesh. shards: ranks that share one copy. fsdp_ranks: see `trainer`."""

    mesh: ParallelismConfig
    shards: int
    fsdp_ranks: int


def _cut_of(config: Config, role: str, shards: int, fsdp_ranks: int) -> _Cut:
    """Cut the reference model or the critic. shards, fsdp_ranks: of the policy, on whose ranks it is."""
    mesh, policy = mesh_of(config, role), config.policy.parallelism
    if mesh is policy:
        return _Cut(policy, shards, fsdp_ranks)
    ranks = shards * policy.dp_replicate_size
    return _Cut(mesh, max(1, ranks // mesh.dp_replicate_size), max(1, ranks // (mesh.tp_size * mesh.pp_size)))


def _is_cast(keys: PrecisionKeys, fsdp_ranks: int) -> bool:
    return fsdp_ranks > 1 or keys.param_dtype != keys.master_dtype or keys.fsdp_offload


def _gathered_on(mesh: ParallelismConfig, model: LocalModel) -> LocalModel:
    """Return a rank's part of a model whose data-parallel shards are gathered. Layers are taken to be alike."""
    in_layers = model.parameters - model.rest
    ep = 1 if mesh.ep_size == mesh.tp_size else mesh.ep_size  # where layers are cut, experts are anyway
    shared = in_layers - model.experts + model.experts // ep
    layers = shared // mesh.tp_size
    rest = model.rest // mesh.tp_size
    return replace(
        model, parameters=layers // mesh.pp_size + rest, layer=model.layer * layers // max(in_layers, 1), rest=rest
    )


def learning(model: LocalModel, lora: LoraConfig | None) -> int:
    """Count the numbers that train: the parameters, or those of adapters on every linear layer."""
    shape = model.shape
    if lora is None or shape is None:
        return model.parameters
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    ends = 4 * shape.hidden + 2 * query + 2 * key + 3 * (shape.hidden + shape.intermediate)
    whole = len({"lm_head", "embed_tokens"} & {name.rpartition(".")[2] for name in lora.modules_to_save or ()})
    rank = max([lora.r, *(lora.r_pattern or {}).values()])
    return rank * shape.layers * ends + whole * shape.vocabulary * shape.hidden


def _trained(
    keys: TrainingConfig | CriticConfig,
    model: LocalModel,
    gathered: LocalModel,
    shards: int,
    fsdp_ranks: int,
    lora: LoraConfig | None,
) -> list[MemoryPart]:
    """Weights, gradients and optimizer of a model that learns. gathered: see `_gathered_on`."""
    n, master, param = learning(model, lora), BYTES[keys.master_dtype], BYTES[keys.param_dtype]
    by = f" / {shards}" if shards > 1 else ""
    each = f"{n:,} x {master} B{by}"
    where = HOST if keys.fsdp_offload else ""
    of_gradients = HOST if keys.fsdp_gradient_offload else where
    of_state = HOST if keys.optimizer_offload else where
    parts = [
        MemoryPart("weights that are updated", n * master // shards, each, where),
        MemoryPart("gradients", n * master // shards, each, of_gradients),
        *(
            replace(part, device=of_state)
            for part in _optimizer(keys, model if lora is None else _of(model, n), master, shards)
        ),
    ]
    if lora is not None:
        words = f"{model.parameters:,} x {param} B{by}"
        parts.append(MemoryPart("weights of the base", model.parameters * param // shards, words, where))
    return [*parts, _gathered(keys, gathered, param)] if _is_cast(keys, fsdp_ranks) else parts


def _optimizer(keys: OptimizerKeys, model: LocalModel, master: int, shards: int) -> Iterator[MemoryPart]:
    """Count the optimizer's state. Outside the layers Muon keeps what AdamW does; in 8 bits blocks have scales."""
    n, name = model.parameters, keys.optm_name
    layers = n - model.rest
    numbers, size = {
        "SGD": (n if keys.optm_momentum else 0, float(master)),
        "Muon": (layers + 2 * model.rest, float(master)),
        "AdamW8bit": (2 * n, 1 + 4 / 64),
        "Adam8bit": (2 * n, 1 + 4 / 64),
    }.get(name, (2 * n, float(master)))
    words = f"{numbers:,} x {size:g} B" if numbers != 2 * n else f"2 x {n:,} x {size:g} B"
    if numbers:
        yield MemoryPart(
            f"optimizer ({name})", int(numbers * size) // shards, words + (f" / {shards}" if shards > 1 else "")
        )


def _gathered(keys: PrecisionKeys, model: LocalModel, param: int) -> MemoryPart:
    if keys.fsdp_reshard_after_forward == "never":
        return MemoryPart("gathered weights", model.parameters * param, f"{model.parameters:,} x {param} B")
    unit, words = model.layer, "(outside the layers + two layers)"
    if keys.fsdp_wrap_min_params > unit:
        unit, words = keys.fsdp_wrap_min_params, "(outside the layers + two units)"
    elif keys.fsdp_wrap_layers:
        words = "(outside the layers + two layers, if units are as large)"
    held = model.rest + min(2 * unit, model.parameters - model.rest)
    return MemoryPart("gathered weights", held * param, f"{words} {held:,} x {param} B")


def micro_batch_tokens(config: Config, data_ranks: int) -> int:
    """The most tokens of one micro-batch, if all samples are as long as they may be."""
    policy, mesh, longest = (config.train.train_policy, config.policy.parallelism, config.policy.model_max_length)
    samples = policy.mini_batch if mesh.pp_size == 1 else mesh.pp_micro_batch_size
    most = policy.max_token_len_per_mini_batch or samples * longest
    return min(most, _samples_of_rank(config, data_ranks) * longest)


def _samples_of_rank(config: Config, data_ranks: int) -> int:
    """Samples of one optimizer step on one rank."""
    samples = config.train.train_batch_per_replica
    if config.is_grpo and config.grpo.batch_size_per_optimize is not None:
        samples = config.grpo.batch_size_per_optimize
    return -(-samples // data_ranks)


def _micro_batches(config: Config, data_ranks: int) -> int:
    """Micro-batches of an optimizer step on one rank, if all samples are as long as they may be."""
    tokens = _samples_of_rank(config, data_ranks) * config.policy.model_max_length
    return -(-tokens // micro_batch_tokens(config, data_ranks))


def _activations(config: Config, model: LocalModel, param: int, data_ranks: int, of_gpu: int) -> list[MemoryPart]:
    shape = model.shape
    if shape is None:
        return []
    mesh, hidden = config.policy.parallelism, shape.hidden
    tokens = -(-micro_batch_tokens(config, data_ranks) // mesh.cp_size)
    inner = 2 * shape.head_dim * (shape.heads + shape.kv_heads) + 4 * shape.intermediate
    between = hidden // mesh.tp_size if mesh.sequence_parallel else hidden
    layers, keys = -(-shape.layers // mesh.pp_size), config.train
    layer = 6 * between + inner // mesh.tp_size
    attention = 2 * shape.head_dim * (shape.heads + shape.kv_heads) // mesh.tp_size
    kept, again = layer, 0
    if config.policy.model_gradient_checkpointing:
        parts = [attention] if keys.recompute_granularity == "selective" else []
        parts += [inner // mesh.tp_size - attention] if keys.recompute_moe_layers else []
        kept, again = (layer - sum(parts), max(parts)) if parts else (between, layer)
    resident = min(layers, 2) if keys.activation_offload else layers
    lora = config.policy.lora
    logits, most = tokens * shape.vocabulary, logits_at_once(of_gpu)
    chunk = min(most, logits)
    matrix = shape.vocabulary * hidden if lora is None or "lm_head" in (lora.modules_to_save or ()) else 0
    each = f"{tokens:,} tokens x {param} B"
    of_layers = MemoryPart(
        "activations", tokens * param * (resident * kept + again), f"{each} x ({resident} x {kept} + {again})"
    )
    away = MemoryPart("offloaded activations", tokens * param * layers * kept, f"{each} x {layers} x {kept}", HOST)
    return [
        of_layers,
        *([away] if keys.activation_offload else []),
        _output_layer(chunk, matrix, param, mesh, alone=logits > most and tokens < shape.vocabulary),
    ]


def _output_layer(chunk: int, matrix: int, param: int, mesh: ParallelismConfig, *, alone: bool) -> MemoryPart:
    """Count logits, in float32 and as a gradient in the type of products, and the gradient of the output matrix.

    alone: whether each row of the matrix gets its gradient at once, in its own type; else it adds up in float32."""
    each, of_matrix = 4 + (param if param < 4 else 0), param if alone else 4
    words = f"{each} B x {chunk:,} logits + {of_matrix} B x {matrix:,}"
    by = f"({words}) / {mesh.tp_size}" if mesh.tp_size > 1 else words
    return MemoryPart("output layer", (each * chunk + of_matrix * matrix) // mesh.tp_size, by)


def size_text(n_bytes: int) -> str:
    """`1.5 GiB`."""
    amount, unit = float(n_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(amount) < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.3g} {unit}"
