"""Sequence parallelism, next to tensor parallelism: between layers each rank has a part of the positions.

    embeddings ─scatter─▶ norm ─gather─▶ attention ─scatter─▶ + ─▶ norm ─gather─▶ MLP ─scatter─▶ + … ─gather─▶ head
    [R, L, D]             own part       all positions        own part

A block is a module whose own layers the model's plan for tensor parallelism cuts by their outputs: it gets all
positions, and the layers that it ends with give each rank its part of their sum. What is outside of blocks acts on
single positions, which a probe proves.

Source: arXiv 2205.05198 (Megatron), section 4.2.2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

KEY = "policy.parallelism.sequence_parallel"
BY_OUTPUTS, BY_INPUTS = ("colwise", "colwise_gather_output"), ("rowwise", "rowwise_split_input")
"""Names in a plan of transformers of layers that are cut by their outputs, or by their inputs."""
EXPERTS = "moe_tp_experts"
"""Its name for a layer of experts."""
Exchange = Callable[[Tensor], Tensor]
"""States [R, n, D], or tokens [n, D], of some positions → those of other positions."""


def pattern(name: str) -> str:
    """The name of a module as a plan has it."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def layers_of(lm: PreTrainedModel) -> dict[str, str]:
    """By name of a module what the plan says of it, but for embeddings and output head, which are cut by tokens."""
    plan, ends = lm.tp_plan or {}, (lm.get_input_embeddings(), lm.get_output_embeddings())
    named = ((name, plan.get(pattern(name))) for name, layer in lm.named_modules() if layer not in ends)
    return {name: style for name, style in named if style is not None}


def blocks_of(lm: PreTrainedModel) -> dict[str, nn.Module]:
    """By name, the modules that get all positions."""
    names = (name.rpartition(".")[0] for name, style in layers_of(lm).items() if style in BY_OUTPUTS)
    return {name: lm.get_submodule(name) for name in dict.fromkeys(names)}


def gather_into(block: nn.Module, gather: Exchange) -> RemovableHandle:
    """Let a block get all positions of the states that it is called with."""

    def enter(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if inputs:
            return (gather(inputs[0]), *inputs[1:]), named
        return inputs, {**named, "hidden_states": gather(named["hidden_states"])}

    return block.register_forward_pre_hook(enter, with_kwargs=True)


@contextmanager
def scattered(lm: PreTrainedModel, places: Tensor, length: int) -> Iterator[None]:
    """Outside of blocks positions are scattered among `length`, at `places`: then the model computes the same as
    without, if nothing there sees other positions."""

    def gather(states: Tensor) -> Tensor:
        return states.index_select(-2, places)

    def scatter(_: nn.Module, __: Any, states: Tensor) -> Tensor:
        wide = states.new_ones(*states.shape[:-2], length, states.shape[-1])
        return wide.index_copy_(-2, places, states)

    ends = [lm.get_submodule(name) for name, style in layers_of(lm).items() if style in BY_INPUTS]
    with ExitStack() as hooks:
        for block in blocks_of(lm).values():
            hooks.enter_context(gather_into(block, gather))
        for layer in (lm.get_input_embeddings(), *ends):
            hooks.enter_context(layer.register_forward_hook(scatter))
        yield
