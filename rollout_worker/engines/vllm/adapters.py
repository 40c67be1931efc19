"""Inside of vLLM's worker processes: an adapter that is published alone, in vLLM's low-rank layers, and its proof.

    published A, B ─▶ vLLM's manager ─▶ one slot of each adapted layer's stacked tensors, read by every request

vLLM scales B as it loads, joins what it fuses (q, k and v, say) and cuts for its ranks, so what a slot must hold is
computed here from the published tensors and compared, bit by bit, with what it holds. The rest of a slot must be 0:
a larger adapter of before would show there. Layers are those of the manager: published tensors of others are named.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name

from rollout_worker.engines.vllm.arguments import SLOT_ID

Pair = tuple[torch.Tensor, torch.Tensor]


def load(model: torch.nn.Module, settings: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Replace the adapter. Nothing runs meanwhile. Raises what vLLM raises for names and shapes that it cannot use.

    settings: fields of peft's configuration, as JSON.
    """
    manager: Any = model.lora_manager
    adapter = LoRAModel.from_lora_tensors(
        SLOT_ID,
        {name: tensor.clone() for name, tensor in tensors.items()},  # which are scaled in place
        _helper(settings),
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=_mapper(model),
    )
    manager.remove_adapter(SLOT_ID)
    manager.add_adapter(adapter)
    manager.activate_adapter(SLOT_ID)


def problems(model: torch.nn.Module, settings: str, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Where the adapter in use is not this one."""
    manager: Any = model.lora_manager
    if SLOT_ID not in manager.lora_index_to_id:
        return ["no adapter is in use"]
    slot = manager.lora_index_to_id.index(SLOT_ID)
    wanted, faults = _scaled(model, settings, tensors), []
    for name, layer in manager.modules.items():
        pairs = [wanted.pop(part, None) for part in manager.packed_modules.get(name, [name])]
        faults += [f"{name}: {fault}" for fault in _faults(layer, slot, pairs)]
    return faults + [f"vLLM has no place for the adapter of {name}" for name in wanted]


def _helper(settings: str) -> PEFTHelper:
    return PEFTHelper.from_dict(json.loads(settings))


def _mapper(model: torch.nn.Module) -> Any:
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    return None if mapper is None else mapper.get_rename_mapper()


def _scaled(model: torch.nn.Module, settings: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, Pair]:
    """By module: A and scaling · B in the type that vLLM computes with."""
    helper, mapper, dtype = _helper(settings), _mapper(model), model.lora_manager.lora_config.lora_dtype
    sides: dict[str, dict[bool, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        module, is_a = parse_fine_tuned_lora_name(name, mapper)
        _, scaling = helper.get_rank_and_scaling(parse_fine_tuned_lora_name(name)[0])
        cast = tensor.to(dtype)
        sides.setdefault(module, {})[is_a] = cast if is_a or scaling == 1 else cast * scaling
    return {module: (of[True], of[False]) for module, of in sides.items()}


def _faults(layer: Any, slot: int, pairs: list[Pair | None]) -> Iterator[str]:
    """pairs: of each module that vLLM has fused into the layer."""
    stacked = layer.lora_a_stacked, layer.lora_b_stacked
    if not isinstance(stacked[0], tuple):  # embeddings, output layers and experts have other layouts
        if any(pairs):
            yield "an adapter of such a layer cannot be compared"
        elif any(bool(part[slot].any()) for side in stacked for part in _list(side)):
            yield "holds an adapter that was not published"
        return
    slices = len(stacked[0])
    if len(pairs) == 1 and slices > 1 and pairs[0] is not None:  # fused in the model's own files
        a, b = pairs[0]
        pairs = [(a, part) for part in b.split(layer.base_layer.output_sizes)]
    pairs = pairs if any(pairs) else [None] * slices
    if len(pairs) != slices:
        yield f"an adapter of {len(pairs)} parts in {slices} slices cannot be compared"
        return
    for word, number, held in (("A", 0, stacked[0]), ("B", 1, stacked[1])):
        side = [None if pair is None else pair[number] for pair in pairs]
        if layer.tp_size > 1 and any(part is not None for part in side):
            cut = layer.slice_lora_b if number else layer.slice_lora_a
            side = [cut(side[0])] if slices == 1 else cut(side)
        for i, (part, expected) in enumerate(zip(held, side, strict=True)):
            if not _holds(part[slot, 0], expected):
                yield f"slice {i} of {word} is not what was published"


def _list(side: Any) -> list[torch.Tensor]:
    return [side] if isinstance(side, torch.Tensor) else list(side)


def _holds(held: torch.Tensor, expected: torch.Tensor | None) -> bool:
    """Whether a matrix has these values in its first rows and columns, and zeros beyond."""
    whole = torch.zeros_like(held)
    if expected is not None:
        rows, columns = expected.shape
        whole[:rows, :columns].copy_(expected)
    return bool(torch.equal(held, whole))
