"""Expert parallelism: each rank has some experts of a mixture, whole, and computes what they say to all tokens.

    shared       ranks of tensor parallelism have the same tokens: each computes its experts', and all are added up
                 (not with sequence parallelism, where they have other ones)
    allgather    every rank gets the tokens of all; what its experts say to them is added up where they are from
    alltoall     each token travels to the ranks of its experts, and what they say back

`shared` and `allgather` send tokens of other ranks' experts to one that is not there, which transformers' layers of
experts skip. Every rank takes part in every exchange, with or without tokens, and gives its experts a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from policy_worker.errors import SettingsError
from policy_worker.model.model import AnyModel
from policy_worker.model.sequence import pattern
from policy_worker.parallel.parts import ROWS, Add, Copy, Gather, Scatter, Travel, cut, gathered, wrap

EXPERTS = "moe_tp_experts"
"""What a plan of transformers calls a layer of experts."""
Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(tokens [T, D], ids of their experts [T, k], weights of these [T, k]) → what they say, weighted and added up."""
Dispatch = Callable[[Forward, Tensor, Tensor, Tensor, int, dist.ProcessGroup], Tensor]
"""The same of all ranks, by a forward that knows `n` experts: (forward, tokens, ids, weights, n, group)."""


def apply_ep(model: AnyModel, mesh: DeviceMesh, dispatcher: str) -> AnyModel:
    """Spread the experts of `model`, if it has any, in place over the ep dimension; every rank has all before."""
    for layer in expert_layers(model.lm):
        spread_experts(layer, mesh, dispatcher)
    return model


def expert_layers(lm: PreTrainedModel) -> list[nn.Module]:
    """The layers of experts, as the model's plan for tensor parallelism names them."""
    plan = lm.tp_plan or {}
    return [layer for name, layer in lm.named_modules() if plan.get(pattern(name)) == EXPERTS]


def spread_experts(layer: nn.Module, mesh: DeviceMesh, dispatcher: str) -> None:
    """Keep this rank's experts of one layer. Raises `SettingsError` if their number cannot be divided."""
    count, ranks, dispatch, group = layer.num_experts, mesh.size(), DISPATCHERS[dispatcher], mesh.get_group()
    if count % ranks:
        raise SettingsError(
            f"{ranks} ranks cannot share the {count} experts of a layer: choose a divisor of {count}"
        )
    cut(layer, mesh, ROWS)
    layer.num_experts = n = count // ranks
    layer._is_expert_parallel = True

    def compute(forward: Forward, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return dispatch(forward, tokens, ids, weights, n, group)

    wrap(layer, compute)


def _of_own(forward: Forward, tokens: Tensor, ids: Tensor, weights: Tensor, n: int, rank: int) -> Tensor:
    """What this rank's experts say to tokens."""
    others = ids // n != rank
    found = forward(tokens, (ids - rank * n).masked_fill(others, n), weights.masked_fill(others, 0))
    if torch.is_grad_enabled() and not found.requires_grad:  # nobody asked them: their gradients are zeros
        found = found + 0 * forward(tokens[:1], ids[:1] * 0, weights[:1] * 0)
    return found


def _shared(
    forward: Forward, tokens: Tensor, ids: Tensor, weights: Tensor, n: int, group: dist.ProcessGroup
) -> Tensor:
    tokens, weights = Copy.apply(tokens, group), Copy.apply(weights, group)
    return Add.apply(_of_own(forward, tokens, ids, weights, n, group.rank()), group)


def _allgather(
    forward: Forward, tokens: Tensor, ids: Tensor, weights: Tensor, n: int, group: dist.ProcessGroup
) -> Tensor:
    count = len(tokens)
    longest = int(gathered(torch.tensor([count], device=tokens.device), group).max())
    rows = (
        nn.functional.pad(x, (0, 0, 0, longest - count), value=v) for x, v in ((tokens, 0.0), (weights, 0.0))
    )
    all_tokens, all_weights = (Gather.apply(x, group) for x in rows)
    all_ids = gathered(nn.functional.pad(ids, (0, 0, 0, longest - count), value=-1), group)
    return Scatter.apply(_of_own(forward, all_tokens, all_ids, all_weights, n, group.rank()), group)[:count]


def _alltoall(
    forward: Forward, tokens: Tensor, ids: Tensor, weights: Tensor, n: int, group: dist.ProcessGroup
) -> Tensor:
    ranks, each = group.size(), ids.shape[1]
    order = ids.flatten().argsort(stable=True)
    counts = torch.bincount(ids.flatten(), minlength=n * ranks).view(ranks, n)
    theirs = torch.empty_like(counts)  # of my experts, by the ranks that ask them
    dist.all_to_all_single(theirs, counts, group=group)
    sent, received = torch.stack([counts.sum(1), theirs.sum(1)]).tolist()
    guests = Travel.apply(tokens[order // each], sent, received, group)
    experts = torch.arange(n, device=ids.device).repeat(ranks).repeat_interleave(theirs.flatten())
    said = _to_each(forward, guests, experts)
    said = Travel.apply(said, received, sent, group)
    mine = torch.empty_like(said).index_copy(0, order, said).view(len(tokens), each, -1)
    return (mine * weights[..., None]).sum(1).to(tokens.dtype)


def _to_each(forward: Forward, tokens: Tensor, experts: Tensor) -> Tensor:
    """What one expert says to each token. Where there are none, the experts still get a gradient, of zeros."""
    if len(tokens):
        return forward(tokens, experts[:, None], tokens.new_ones(len(tokens), 1))
    nobody = tokens.sum(0, keepdim=True)
    return forward(nobody, experts.new_zeros(1, 1), nobody.new_zeros(1, 1))[:0]


DISPATCHERS: dict[str, Dispatch] = {"shared": _shared, "allgather": _allgather, "alltoall": _alltoall}
