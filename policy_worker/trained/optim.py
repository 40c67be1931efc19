"""The optimizers of one model, with clipping by global norm; refuses gradients that would destroy the weights.

AdamW, Adam, SGD       one optimizer of torch's over all parameters that train
Muon                   over the matrices of the layers; AdamW over embeddings, output layer, norms and biases
AdamW8bit, Adam8bit    torchao's, over the matrices that its blocks fit; AdamW or Adam over the rest

What an optimizer keeps of a parameter is saved as plain tensors, slots, that any number of ranks can save and load.
torchao's moments are blocks of 8-bit codes with a scale each. A block lies in one row, so that a cut between rows
cuts codes and scales alike:

    exp_avg [N, D] in 8 bits   ->   exp_avg.codes [N, D] uint8,  exp_avg.scale [N, D / block] float32
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from policy_worker.errors import NonFiniteGradientError, SettingsError
from policy_worker.memory.offload import in_parts, mapped, states_here, synchronise
from schema.config import CriticConfig, TrainingConfig

TrainedKeys = TrainingConfig | CriticConfig

EIGHT_BIT = {"AdamW8bit": "AdamW", "Adam8bit": "Adam"}
"""Optimizers of torchao, and what takes the parameters that they leave."""
LEAST_NUMBERS = 4096
"""torchao leaves smaller parts of a parameter in float32 (as arXiv 2110.02861)."""
LEAST_BLOCK = 64
Slots = dict[str, Tensor]


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer keys of `[train]` or `[critic]`.

    lrs: peak of each optimizer; one is for all. impl: of torch's own. weight_decay: at the end of its ramp, which
    begins at weight_decay_start. momentum None: the optimizer's usual. grad_norm_clip 0: gradients are not clipped.
    offload: state is in host memory between steps."""

    lrs: tuple[float, ...]
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float
    impl: str
    grad_norm_clip: float
    name: str = "AdamW"
    momentum: float | None = None
    weight_decay_ramp: str = "constant"
    weight_decay_start: float = 0.0
    section: str = "train"
    offload: bool = False

    @staticmethod
    def of_config(keys: TrainedKeys, section: str = "train") -> OptimizerSettings:
        """Read a section's keys; a list of implementations ends with that of torch's AdamW."""
        impl = keys.optm_impl
        return OptimizerSettings(
            lrs=tuple(keys.optm_lr) if isinstance(keys.optm_lr, list) else (keys.optm_lr,),
            betas=(keys.optm_betas[0], keys.optm_betas[1]),
            epsilon=keys.epsilon,
            weight_decay=keys.optm_weight_decay,
            impl=impl[-1] if isinstance(impl, list) else impl,
            grad_norm_clip=keys.optm_grad_norm_clip,
            name=keys.optm_name,
            momentum=keys.optm_momentum,
            weight_decay_ramp=keys.optm_weight_decay_ramp,
            weight_decay_start=keys.optm_weight_decay_start or 0.0,
            section=section,
            offload=keys.optimizer_offload and not keys.fsdp_offload,  # which moves the step as well
        )

    def weight_decay_at(self, progress: float) -> float:
        """progress: 0 at the run's first step, 1 at its last. The ramp is a line, or half a wave of a cosine."""
        if self.weight_decay_ramp == "constant":
            return self.weight_decay
        share = (1 - math.cos(math.pi * progress)) / 2 if self.weight_decay_ramp == "cosine" else progress
        return self.weight_decay_start + (self.weight_decay - self.weight_decay_start) * share


class Optimizer:
    """See the module's docstring. matrices: those that Muon may take (`PolicyModel.hidden_matrices`)."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], settings: OptimizerSettings, matrices: Collection[nn.Parameter] = ()
    ) -> None:
        """Raises `SettingsError`: the optimizer is not possible here, or its library is not installed."""
        self._settings = settings
        self.parameters = [p for p in parameters if p.requires_grad]
        for device, dtype in {(p.device, p.dtype) for p in self.parameters}:
            _check_possible(settings, torch.zeros(1, device=device, dtype=dtype))
        self.optimizers = [optimizer for optimizer in _make(self.parameters, settings, matrices) if optimizer]
        """Each of torch's kind; together they have every parameter once."""
        self._lrs = settings.lrs * len(self.optimizers) if len(settings.lrs) == 1 else settings.lrs
        self.copies: Collection[nn.Parameter] = ()
        """Parameters whose gradients are counted in the norm of another rank."""
        self.total_norm: Callable[[float], float] = lambda norm: norm
        """The norm of the whole model's gradients from that of this rank's."""
        self.skips: Callable[[float], bool] = lambda norm: False
        """Whether gradients of this norm are forgotten instead of applied (see `LossScaler`)."""

    @staticmethod
    def of_model(model: Any, keys: TrainedKeys, section: str = "train") -> Optimizer:
        """The optimizer of a model on its devices. Raises as the constructor."""
        matrices = model.hidden_matrices() if keys.optm_name == "Muon" else ()
        return Optimizer(model.parameters(), OptimizerSettings.of_config(keys, section), matrices)

    @property
    def peak_lr(self) -> float:
        """The learning rate of the first optimizer at factor 1."""
        return self.peak_lrs[0]

    @property
    def peak_lrs(self) -> tuple[float, ...]:
        """The learning rates that the settings name, at factor 1."""
        return self._settings.lrs

    def set_peak_lrs(self, lrs: tuple[float, ...]) -> None:
        """Go on with the peaks of a restored schedule instead of the configured ones."""
        self._settings = replace(self._settings, lrs=lrs)
        self._lrs = lrs * len(self.optimizers) if len(lrs) == 1 else lrs

    def forget(self) -> None:
        """Begin anew: moments and step counts are those of an optimizer that was just made."""
        for optimizer in self.optimizers:
            optimizer.state.clear()

    def slots(self) -> Iterator[tuple[nn.Parameter, Slots]]:
        """Yield what is kept of each parameter, the tensors themselves; zeros before its first step. A collective."""
        for optimizer in self.optimizers:
            fresh = [p for group in optimizer.param_groups for p in group["params"] if p not in optimizer.state]
            if fresh:
                self._begin(optimizer, fresh)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield parameter, slots_of(parameter, optimizer.state.get(parameter, {}))

    def _begin(self, optimizer: torch.optim.Optimizer, fresh: list[nn.Parameter]) -> None:
        """Let the optimizer make its state, by a step of nothing at a rate of 0 that is then not counted."""
        gradients = [(parameter, parameter.grad) for parameter in self.parameters]
        optimizer.zero_grad(set_to_none=True)
        for parameter in fresh:
            parameter.grad = torch.zeros_like(parameter)
        _set(optimizer, 0.0, 0.0)
        self._advance(optimizer)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for parameter in fresh:
            if "step" in optimizer.state.get(parameter, {}):
                optimizer.state[parameter]["step"].zero_()

    def step(self, lr_factor: float, progress: float = 1.0) -> float:
        """Clip, apply, forget the gradients. A collective on sharded parameters.

        progress: of the run, for a weight decay that changes.

        Returns:
            The global gradient norm before clipping; NaN where the step was skipped.

        Raises `NonFiniteGradientError`: on all ranks alike; nothing was applied."""
        alike = _by_layout((p for p in self.parameters if p.grad is not None), lambda p: p.grad)
        copies = {id(p) for p in self.copies}
        norms = [_norm(p for p in parameters if id(p) not in copies) for parameters in alike]
        norm = torch.tensor(self.total_norm(math.hypot(*norms)))
        value = float(norm)
        if self.skips(value):
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=True)
            return math.nan
        if not math.isfinite(value):
            raise NonFiniteGradientError(
                f"the gradient norm is {value}: nothing was applied; look at the loss of the last steps, lower "
                f"{self._settings.section}.optm_lr or .optm_grad_norm_clip, or check the model's weights for NaN"
            )
        if 0 < self._settings.grad_norm_clip < value:
            for parameters in alike:
                clip_grads_with_norm_(parameters, self._settings.grad_norm_clip, norm)
        for optimizer, lr in zip(self.optimizers, self._lrs, strict=True):
            _set(optimizer, lr * lr_factor, self._settings.weight_decay_at(progress))
            self._advance(optimizer)
            optimizer.zero_grad(set_to_none=True)
        return value

    def _advance(self, optimizer: torch.optim.Optimizer) -> None:
        """One step of it; of some parameters after others where state has to come from the host."""
        if not self._settings.offload:
            optimizer.step()
            return
        groups = optimizer.param_groups
        try:
            for group in groups:
                for parameters in in_parts(group["params"]):
                    with states_here(optimizer.state, parameters):
                        optimizer.param_groups = [{**group, "params": parameters}]
                        optimizer.step()
        finally:
            optimizer.param_groups = groups
        for device in {parameter.device for parameter in self.parameters}:
            synchronise(device)


def _set(optimizer: torch.optim.Optimizer, lr: float, weight_decay: float) -> None:
    for group in optimizer.param_groups:
        group["weight_decay"] = weight_decay
        if isinstance(group["lr"], Tensor):  # torchao compiles its step around this very tensor
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def _make(
    parameters: list[nn.Parameter], settings: OptimizerSettings, matrices: Collection[nn.Parameter]
) -> list[torch.optim.Optimizer | None]:
    """The optimizers, in the order of `optm_lr`; None: there is nothing for it."""
    name, lr, decay = settings.name, settings.lrs[0], settings.weight_decay_at(0.0)
    if not parameters:  # nothing trains in this stage of the model
        return []
    if name == "Muon":
        chosen, rest = _parted(parameters, matrices)
        if not chosen:
            raise SettingsError(
                f'{settings.section}.optm_name = "Muon": the model has no matrices in layers; write "AdamW"'
            )
        momentum = 0.95 if settings.momentum is None else settings.momentum
        muon = Muon(chosen, lr, decay, momentum, adjust_lr_fn="match_rms_adamw")
        return [muon, _torch_optimizer("AdamW", rest, settings) if rest else None]
    if name in EIGHT_BIT:
        chosen, rest = _parted(parameters, [p for p in parameters if fits_blocks(p)])
        kind = _torchao(settings)
        arguments = {"lr": lr, "betas": settings.betas, "eps": settings.epsilon, "weight_decay": decay}
        return [
            kind(chosen, block_size=math.gcd(256, *(p.shape[-1] for p in chosen)), **arguments) if chosen else None,
            _torch_optimizer(EIGHT_BIT[name], rest, settings) if rest else None,
        ]  # fmt: skip
    return [_torch_optimizer(name, parameters, settings)]


def _parted(
    parameters: list[nn.Parameter], matrices: Collection[nn.Parameter]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Part parameters into those among the matrices, and the others; both in order."""
    ids = {id(matrix) for matrix in matrices}
    return [p for p in parameters if id(p) in ids], [p for p in parameters if id(p) not in ids]


def _torchao(settings: OptimizerSettings) -> Any:
    name, key = settings.name, f"{settings.section}.optm_name"
    try:
        import torchao.optim
    except ImportError as error:
        raise SettingsError(
            f'{key} = "{name}" needs the package torchao, which cannot be imported ({error}): install '
            f'the extra `8bit` (pip install ".[8bit]" in the checkout), or write {key} = '
            f'"{EIGHT_BIT[name]}"'
        ) from error
    return getattr(torchao.optim, name)


def _torch_optimizer(name: str, parameters: list[nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    groups = [{"params": alike} for alike in _by_layout(parameters, lambda p: p)]
    common: dict[str, Any] = {
        "lr": settings.lrs[-1],
        "weight_decay": settings.weight_decay_at(0.0),
        "fused": settings.impl == "fused",
        "foreach": settings.impl == "foreach",
    }
    if name == "SGD":
        return torch.optim.SGD(groups, momentum=settings.momentum or 0.0, **common)
    kind = torch.optim.Adam if name == "Adam" else torch.optim.AdamW  # the latter: arXiv 1711.05101
    return kind(groups, betas=settings.betas, eps=settings.epsilon, **common)


def _check_possible(settings: OptimizerSettings, like: Tensor) -> None:
    """Try a step on one number: torch finds out at the first step, by then a batch would be lost."""
    probe = nn.Parameter(like)
    probe.grad = torch.zeros_like(like)
    name, key = "SGD" if settings.name == "SGD" else "AdamW", f"{settings.section}.optm_impl"
    try:
        _torch_optimizer(name, [probe], settings).step()
    except (RuntimeError, NotImplementedError) as error:
        raise SettingsError(
            f'{key} = "{settings.impl}" is not possible for {like.dtype} on {like.device}: {error}; '
            f'write {key} = "foreach" or "for-loop"'
        ) from error


def _by_layout(
    parameters: Iterable[nn.Parameter], tensor_of: Callable[[nn.Parameter], Tensor | None]
) -> list[list[nn.Parameter]]:
    """Parameters by mesh and placements of a tensor of theirs: one operation takes only tensors laid out alike."""
    by_layout: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        tensor = tensor_of(parameter)
        layout = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        by_layout.setdefault(layout, []).append(parameter)
    return list(by_layout.values())


def _norm(alike: Iterable[nn.Parameter]) -> float:
    """The norm of whole gradients. A collective of their mesh."""
    norm = get_total_norm([p.grad for p in alike if p.grad is not None])
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


class Muon(torch.optim.Muon):
    """torch's over matrices that are all whole, or all sharded: Newton-Schulz takes a whole matrix, momentum
    and decay do not.

        gradient, momentum, parameter    each rank its rows
        update in bfloat16               gathered, one matrix at a time; orthogonalised alike on every rank

    K. Jordan 2024. A step is scaled by 0.2 √(larger side), so that its root mean square is that of AdamW's and both
    take the same learning rate and weight decay (arXiv 2502.16982, eq. 4)."""

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
        local = update.to_local()  # in host memory where the parameter is
        narrow = DTensor.from_local(
            local.bfloat16().to(update.device_mesh.device_type), update.device_mesh, update.placements,
            run_check=False, shape=update.shape, stride=update.stride(),
        )  # fmt: skip
        whole = _orthogonal(narrow.full_tensor(), group).to(parameter.dtype)
        # every rank has computed the same matrix, so that nothing is sent to cut it
        share = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.to_local().add_(share.to_local().to(local.device), alpha=group["lr"])


def _orthogonal(update: Tensor, group: dict[str, Any]) -> Tensor:
    """The change of a whole matrix at a rate of 1: torch's own step from zero, without momentum or decay."""
    change = nn.Parameter(torch.zeros_like(update, dtype=torch.float32))
    change.grad = update.float()
    same = {name: group[name] for name in ("ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
    torch.optim.Muon([change], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, **same).step()
    return change.detach()


def fits_blocks(parameter: nn.Parameter) -> bool:
    """Whether torchao keeps a parameter in 8 bits on every rank alike, with blocks that lie in one whole row."""
    if parameter.ndim != 2 or parameter.shape[1] % LEAST_BLOCK:
        return False
    if isinstance(parameter, DTensor) and parameter.to_local().shape[1] != parameter.shape[1]:
        return False
    shards = 1
    if isinstance(parameter, DTensor):
        sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
        for placement, size in sizes:
            shards *= 1 if placement.is_replicate() else size
    return parameter.shape[0] % shards == 0 and parameter.numel() // shards >= LEAST_NUMBERS


def slots_of(parameter: nn.Parameter, state: Mapping[str, Any]) -> Slots:
    """The tensors of a parameter's state: writing into them changes it."""
    slots: Slots = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            continue
        local = value._local_tensor if isinstance(value, DTensor) else value
        if not hasattr(local, "codes"):
            slots[name] = value
            continue
        rows = local.codes.shape[0]
        for part in ("codes", "scale"):
            slots[f"{name}.{part}"] = _laid_out_as(parameter, getattr(local, part).view(rows, -1))
    return slots


def _laid_out_as(parameter: Tensor, local: Tensor) -> Any:
    """A tensor [rows of this rank, n] as the parameter's rows lie on the ranks."""
    if not isinstance(parameter, DTensor):
        return local
    size = torch.Size((parameter.shape[0], local.shape[1]))
    empty = DTensor.from_local(
        torch.empty_like(local, device="meta"), parameter.device_mesh, parameter.placements,
        run_check=False, shape=size, stride=(size[1], 1),
    )  # fmt: skip
    return mapped(empty, lambda _: local)
