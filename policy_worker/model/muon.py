"""torch's Muon where FSDP2 shards the matrices: Newton-Schulz takes a whole matrix, momentum and decay do not.

    gradient, momentum, parameter    each rank its rows
    update in bfloat16               gathered, one matrix at a time; orthogonalised alike on every rank

Muon: K. Jordan 2024. A step is scaled by 0.2 √(larger side), so that its root mean square is that of AdamW's and
both take the same learning rate and weight decay (arXiv 2502.16982, eq. 4).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


class Muon(torch.optim.Muon):
    """torch's optimizer over matrices that are all whole, or all sharded."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step on the gradients. A collective on sharded matrices."""
        if not any(isinstance(p, DTensor) for group in self.param_groups for p in group["params"]):
            return super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_sharded(parameter, group)
        return None

    def _step_sharded(self, parameter: DTensor, group: dict[str, Any]) -> None:
        gradient, momentum, state = parameter.grad, group["momentum"], self.state[parameter]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        moving = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        update = gradient.lerp(moving, momentum) if group["nesterov"] else moving
        whole = _orthogonal(update.bfloat16().full_tensor(), group).to(parameter.dtype)
        # every rank has computed the same matrix, so that nothing is sent to cut it
        mine = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(mine, alpha=group["lr"])


def _orthogonal(update: Tensor, group: dict[str, Any]) -> Tensor:
    """The change of a whole matrix at a rate of 1: torch's own step from zero, without momentum or decay."""
    change = nn.Parameter(torch.zeros_like(update, dtype=torch.float32))
    change.grad = update.float()
    same = {name: group[name] for name in ("ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
    torch.optim.Muon([change], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, **same).step()
    return change.detach()
