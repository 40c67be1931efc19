"""A pretrained model, of which each rank reads only what it holds.

    skeleton     structure, types and names, on the meta device: no memory
    Weights      where each tensor is in the safetensors files, known from their headers alone
    [ freeze ─▶ shard: tensors become DTensors, still on the meta device ]
    fill         every tensor is made on its device, and this rank's box of it is read

So host memory holds this rank's shard and a block of what is being read. What transformers stores in another form
than it computes with is converted in between: then the stored tensors that become one tensor, of experts only those
that this rank holds.

`from_pretrained` of transformers is what this equals bit by bit: in names, conversions, types, ties and buffers.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModel, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from policy_worker.memory.offload import mapped
from policy_worker.model.lora import plain_name
from weight_sync.errors import WeightError
from weight_sync.publishing.gather import Box, box_at
from weight_sync.stored import StoredTensor, all_of, blocks, stored_tensors

log = logging.getLogger(__name__)

CPU = torch.device("cpu")
ADAPTER = "adapter_config.json"


def skeleton(
    auto: type[AutoModel | AutoModelForCausalLM],
    config: PretrainedConfig,
    dtype: torch.dtype,
    revision: str | None,
    trust: bool,
) -> PreTrainedModel:
    """The model of a configuration on the meta device, tensors that are to be tied still apart.

    revision: of its own code. trust: whether that may run."""
    its_own = trust and auto.__name__ in (getattr(config, "auto_map", None) or {})
    own_code = {"code_revision": revision} if its_own and revision is not None else {}
    with torch.device("meta"), init.no_tie_weights(), init.meta_device_safe_creation_ops():
        lm: PreTrainedModel = auto.from_config(config, dtype=dtype, trust_remote_code=trust, **own_code)
    return lm


def weight_files(name: str, revision: str | None) -> list[Path]:
    """The safetensors files of a model, fetched where they are not here; none: it has none that are read in parts.

    Raises `WeightError`: it comes with adapters."""

    def cached_path(file: str) -> str | None:
        path: str | None = cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=False)
        return path

    single = cached_path(SAFE_WEIGHTS_NAME)
    if cached_path(ADAPTER) is not None:  # transformers would load them as well
        raise WeightError(f"it comes with adapters ({ADAPTER}), which are not read: merge them into their base")
    if single is not None:
        return [Path(single)]
    index = cached_path(SAFE_WEIGHTS_INDEX_NAME)
    if index is None:
        return []
    paths, _ = get_checkpoint_shard_files(name, index, revision=revision)
    return [Path(path) for path in paths]


class StoredWeights:
    """The stored tensors of a model, and those of its skeleton that they become.

    what: the key and value that name the model, for messages.

    missing, surplus: names of tensors that are in one of both alone. restored: whether a checkpoint will be read into
    the model, so that these weights need not be: until then they are NaN.

    Raises `OSError`, `FrameError`, `WeightError`: a file cannot be read; `ValueError`: it has another shape than the
    model."""

    def __init__(self, what: str, lm: PreTrainedModel, files: Sequence[Path], dtype: torch.dtype) -> None:
        self._what, self._lm, self.restored = what, lm, False
        self._stored = stored_tensors(files)
        self._moved: dict[str, str] = {}
        self._converted: dict[str, tuple[WeightConverter, list[tuple[str, str]]]] = {}
        self._made_with: dict[str, str] = {}
        """By name of a tensor that is converted: the one that its converter is known by."""
        self._stored_as: dict[str, str] = {}
        self._last: tuple[tuple[str, slice | None], dict[str, Tensor]] = ("", None), {}
        """The tensors that were converted last: those of one converter come one after the other."""
        _keep_in_float32(lm, dtype)
        self._held: dict[str, Tensor] = dict(lm.state_dict(keep_vars=True))
        unexpected = self._assign()
        self._check_shapes()
        missing = self._tie()
        result = SimpleNamespace(missing_keys=set(missing), unexpected_keys=unexpected)
        lm._adjust_missing_and_unexpected_keys(result)
        self.missing, self.surplus = sorted(result.missing_keys), sorted(result.unexpected_keys)
        _initialise(lm, missing - result.missing_keys)
        self._share_names()

    def fill(self, lm: nn.Module, device: torch.device) -> None:
        """Make what is on the meta device on this one, and read this rank's part of it.

        lm: the model of the skeleton, sharded or not, cut or not, with adapters that have numbers or without."""
        tensors = itertools.chain(lm.named_parameters(), lm.named_buffers())
        with torch.no_grad():
            for name, tensor in [(name, tensor) for name, tensor in tensors if tensor.is_meta]:
                made = self._part(plain_name(name), tensor, device)
                if isinstance(tensor, nn.Parameter):
                    made = nn.Parameter(made, tensor.requires_grad)
                torch.utils.swap_tensors(tensor, made)  # who has the tensor, such as a tie, keeps it

    # ---- which stored tensors become which of the model ----

    def _assign(self) -> set[str]:
        """Find the place of each stored tensor, as transformers does; names without one."""
        transforms = get_model_conversion_mapping(self._lm)
        renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, WeightConverter)]
        of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        prefix, unexpected = self._lm.base_model_prefix, set[str]()
        for name in sorted(self._stored, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, prefix, self._held)
            if target not in self._held and name in self._held:
                target, pattern = rename_source_key(name, [], [], prefix, self._held)
            if target not in self._held:
                targets = [target] if pattern is None else _targets(of_pattern[pattern], target)
                unexpected.update(targets)
            elif pattern is None:
                self._moved.setdefault(target, name)
            else:
                self._converted.setdefault(target, (of_pattern[pattern], []))[1].append((name, pattern))
        # What `revert_weight_conversion`, and so `HubNames`, goes by:
        self._lm._weight_conversions = [each for each in transforms if each.was_used()]
        return unexpected

    def _check_shapes(self) -> None:
        shapes = {target: self._stored[name].shape for target, name in self._moved.items()}
        for first in self._converted:
            made = self._convert(first, lambda stored: torch.empty(stored.shape, device="meta"))
            self._made_with |= dict.fromkeys(made, first)
            shapes |= {target: tuple(tensor.shape) for target, tensor in made.items()}
        for target, shape in shapes.items():
            if target in self._held and shape != self._held[target].shape:
                raise ValueError(
                    f"its {target} is {list(shape)} in the safetensors files and {list(self._held[target].shape)} by "
                    f"its config.json: they are of different models"
                )

    def _tie(self) -> set[str]:
        """Tie what is declared to be one tensor, unless two different ones are stored; names that nothing became."""
        ties: dict[str, str] = self._lm.all_tied_weights_keys
        for alias, source in list(ties.items()):
            if self._has(alias) and self._has(source):
                if self._are_equal(alias, source):
                    self._moved.pop(alias, None)
                    self._made_with.pop(alias, None)
                else:
                    log.warning(
                        "%s: its config ties %s to %s, and they are stored with different values: they are not tied",
                        self._what, alias, source,
                    )  # fmt: skip
                    del ties[alias]
        present = {id(self._held[name]) for name in self._held if self._has(name)}  # own code shares modules
        missing = {name for name, tensor in self._held.items() if id(tensor) not in present}
        self._lm.tie_weights(missing_keys=missing, recompute_mapping=False)
        return missing

    def _has(self, name: str) -> bool:
        return name in self._moved or name in self._made_with

    def _are_equal(self, alias: str, source: str) -> bool:
        """Whether two tensors are stored with the same values, as the model has them."""
        held = self._held[alias]
        for rows in blocks(held.shape):
            first, *rest = held.shape
            box = Box((rows.start, *[0] * len(rest)), (len(range(first)[rows]), *rest))
            a, b = (self._read(name, box, held.dtype, CPU) for name in (alias, source))
            if not torch.equal(a, b):
                return False
        return True

    def _share_names(self) -> None:
        """A tied tensor is found under each of its names."""
        tensors = list(self._lm.named_parameters(remove_duplicate=False))
        stored = {id(tensor): name for name, tensor in tensors if self._has(name)}
        self._stored_as = {name: stored.get(id(tensor), name) for name, tensor in tensors}

    # ---- reading ----

    def _part(self, name: str, tensor: Tensor, device: torch.device) -> Tensor:
        """This rank's part of a tensor, on its device."""
        if not isinstance(tensor, DTensor):
            return self._read(name, all_of(tensor.shape), tensor.dtype, device)
        mesh = tensor.device_mesh
        place = mesh.get_coordinate()
        assert place is not None
        box = box_at(tensor.shape, tuple(mesh.shape), place, tensor.placements)
        assert box.sizes == tuple(tensor.to_local().shape)
        part = self._read(name, box, tensor.dtype, device)
        made: Tensor = mapped(tensor, lambda _: part)
        return made

    def _read(self, name: str, box: Box, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A box of a tensor of the model, contiguous, in memory of its own."""
        if self.restored:
            nothing = math.nan if dtype.is_floating_point else 0
            return torch.full(box.sizes, nothing, dtype=dtype, device=device)
        name = self._stored_as.get(name, name)
        kept_dtype = self._held[name].dtype
        if dtype is not kept_dtype:  # trained whole next to adapters: begins as the rest of the model has it
            return self._read(name, box, kept_dtype, device).to(dtype)
        if name in self._moved:
            return self._stored[self._moved[name]].read(box, dtype, device)
        if not box.count:
            return torch.empty(box.sizes, dtype=dtype, device=device)
        first, slices = self._made_with[name], box.slices()
        rows = None
        if self._is_by_rows(first):
            rows, slices = slices[0], (slice(None), *slices[1:])
        if self._last[0] != (first, rows):
            self._last = ("", None), {}
            kind = self._held[first].dtype
            made = self._convert(first, lambda stored: stored.read(all_of(stored.shape), kind, CPU), rows)
            self._last = (first, rows), made
        return self._last[1][name][slices].to(device, dtype, copy=True, memory_format=torch.contiguous_format)

    def _convert(
        self, first: str, get: Callable[[StoredTensor], Tensor], rows: slice | None = None
    ) -> dict[str, Tensor]:
        """Return what a converter makes of its stored tensors, by name. rows: all that is made, see `_is_by_rows`."""
        template, sources = self._converted[first]
        converter = deepcopy(template)
        for pattern in dict.fromkeys(pattern for _, pattern in sources):
            for name in [name for name, of in sources if of == pattern][rows or slice(None)]:
                converter.add_tensor(first, name, pattern, get(self._stored[name]))
        made = converter.convert(first, model=self._lm, config=self._lm.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}

    def _is_by_rows(self, first: str) -> bool:
        """Whether each row of what a converter makes is of one stored tensor of each kind: that of an expert."""
        merge, *others = self._converted[first][0].operations
        return (isinstance(merge, MergeModulelist) and merge.dim == 0) and all(
            isinstance(each, Concatenate) and each.dim > 0 for each in others
        )


def _targets(converter: WeightConverter, first: str) -> list[str]:
    return [first.replace(converter.target_patterns[0], each) for each in converter.target_patterns]


def _keep_in_float32(lm: PreTrainedModel, dtype: torch.dtype) -> None:
    """Tensors that the model's class wants in float32 whatever the type of the others."""
    globs = lm._get_dtype_plan(dtype)
    for name, tensor in lm.state_dict(keep_vars=True).items():
        if any(re.search(glob.replace("*", ".*"), name) for glob in globs):
            tensor.data = tensor.data.float()


def _initialise(lm: PreTrainedModel, begun: set[str]) -> None:
    """Compute what no file holds as the model's class does: buffers that are not stored, and these names."""
    stored: Mapping[str, Tensor] = lm.state_dict(keep_vars=True)
    for name, tensor in stored.items():
        tensor._is_hf_initialized = name not in begun
    for name in [*begun, *(name for name, _ in lm.named_non_persistent_buffers())]:
        module, _, last = name.rpartition(".")
        owner = lm.get_submodule(module)
        made = torch.empty_like(getattr(owner, last), device="cpu")
        setattr(owner, last, nn.Parameter(made) if last in owner._parameters else made)
    lm.initialize_weights()
