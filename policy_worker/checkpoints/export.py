"""The trained model as a directory that `transformers` loads: safetensors shards, config, and copied `source_files`.

Exported weights are bit for bit those of the last published version: same names, same type
(`train.transfer_dtype`). Written under a hidden name and renamed, so a directory of this name is always whole.

Of a model with adapters the export has them merged in, and next to it, in `adapter/`, they are as peft saves them, in
the type that they train in; not where they began with a part of the base, which lacks it without them.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import TRANSFORMERS_DYNAMIC_MODULE_NAME

from policy_worker.checkpoints.source_files import Files, source_files
from policy_worker.errors import ExportError, SettingsError
from policy_worker.model import lora
from policy_worker.model.model import DTYPES, PolicyModel
from policy_worker.parallel.pipeline_stages import names_of_all
from policy_worker.trained.trainer import Trainer
from schema.config import Config
from schema.config.modules import CANNOT_LOAD
from schema.config.sections.policy import ALTERING
from schema.util.atomic_file import remove_unfinished, replacing_directory, usual_mode
from weight_sync import gather_full
from weight_sync.hf_names import Gather

log = logging.getLogger(__name__)

ADAPTER = "adapter"
Progress = Callable[[Iterator[tuple[str, torch.Tensor]]], Iterator[tuple[str, torch.Tensor]]]
SHARD_BYTES = 4 * 1024**3
"""A shard ends before it grows beyond this; it is also the most that is held in memory at once."""


def export_model(trainer: Trainer, config: Config, target: Path, files: Files, *, average: bool = False) -> None:
    """Write the model to `target`, replacing what is there. A collective; rank 0 writes.

    files: as of `write_export`, on rank 0. average: with the moving average of its weights.

    Raises `ExportError`: `target` cannot be written; nothing there was changed."""
    dtype = DTYPES[config.train.effective_transfer_dtype]
    names = ExportNames(trainer.model)
    gather = trainer.gather_to_first(_average_of(trainer) if average else gather_full)
    if not trainer.group.leads:
        for _ in itertools.chain(names.tensors(gather, dtype), names.adapter(gather)):
            pass
        return
    try:
        remove_unfinished(target)
        write_export(names, gather, config, target, files)
    except (OSError, SafetensorError) as error:
        raise ExportError(
            f"the model could not be exported to {target}: {error}. Nothing there was changed, and checkpoints are "
            f"whole; make room or mend the directory, then resume"
        ) from error
    log.info("exported the model to %s", target)


def _average_of(trainer: Trainer) -> Gather:
    assert trainer.ema is not None
    averages = trainer.ema.average
    return lambda name, tensor: gather_full(name, averages.get(f"lm.{name}", tensor))


class ExportNames:
    """The tensors of an export of a model: as `HubNames`, found out at once, so that the model may train on."""

    def __init__(self, model: PolicyModel) -> None:
        self.model, self._merged = model, names_of_all(model)
        self.settings = _adapter_settings(model)
        self._adapter = None if self.settings is None else names_of_all(model, lora="adapter")

    def tensors(self, gather: Gather, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's, adapters merged in. As `HubNames.tensors`."""
        return self._merged.tensors(gather, dtype=dtype)

    def adapter(self, gather: Gather) -> Iterator[tuple[str, torch.Tensor]]:
        """The adapter's own, under peft's saved names; nothing where there is none."""
        return iter(()) if self._adapter is None else self._adapter.tensors(gather)


def prepare_export(model: PolicyModel, config: Config, template: str | None) -> Files:
    """Read what `write_export` copies. Before training: proves that all but weights can be written, too.

    template: the job's own, that training uses. Raises `SettingsError`: it cannot."""
    try:
        files = source_files(config, model.lm.config, template)
        with TemporaryDirectory(prefix="export-") as scratch:
            _write_settings(model, config, files, Path(scratch))
            if (settings := _adapter_settings(model)) is not None:
                _write_adapter_settings(settings, config, Path(scratch))
    except (*CANNOT_LOAD, RecursionError, AssertionError) as error:
        name = config.policy.model_name_or_path
        raise SettingsError(
            f"policy.model_name_or_path = {name!r}: the trained model could not be exported: {error}; mend "
            f"what this names, in a copy of the model where it is not yours"
        ) from error
    return files


def write_export(
    names: ExportNames, gather: Gather, config: Config, target: Path, files: Files, progress: Progress = iter
) -> None:
    """Write a model in `train.transfer_dtype`, with all that makes it one; in one process.

    files: what `prepare_export` has found. progress: passes the model's tensors on.

    Raises `OSError`: `target` cannot be written; nothing there was changed."""
    dtype = DTYPES[config.train.effective_transfer_dtype]
    with replacing_directory(target) as unfinished:
        write_shards(progress(names.tensors(gather, dtype)), unfinished)
        _write_settings(names.model, config, files, unfinished)
        if names.settings is not None:
            _write_adapter(names, gather, config, unfinished / ADAPTER)


def _write_adapter(names: ExportNames, gather: Gather, config: Config, directory: Path) -> None:
    """Write an adapter as `PeftModel.save_pretrained` lays it out."""
    directory.mkdir()
    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in names.adapter(gather)}
    with usual_mode(directory / "adapter_model.safetensors"):
        save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
    assert names.settings is not None
    _write_adapter_settings(names.settings, config, directory)


def _adapter_settings(model: PolicyModel) -> Any:
    """Return peft's settings of adapters that can be saved next to the base; None without such."""
    settings = lora.adapters_of(model.lm)
    if settings is not None and str(settings.init_lora_weights).startswith(ALTERING):
        return None
    return settings


def _write_adapter_settings(settings: Any, config: Config, directory: Path) -> None:
    settings = copy.copy(settings)
    if not isinstance(settings.target_modules, str):
        settings.target_modules = sorted(settings.target_modules)  # a set has another order in each process
    settings.base_model_name_or_path = config.policy.model_name_or_path
    settings.revision, settings.inference_mode = config.policy.model_revision, True
    settings.save_pretrained(directory)


def write_shards(
    tensors: Iterable[tuple[str, torch.Tensor]], directory: Path, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write tensors as transformers lays them out: one file, or numbered shards and an index."""
    shards: list[dict[str, int]] = []
    pending: dict[str, torch.Tensor] = {}
    size = 0

    def flush() -> None:
        with usual_mode(directory / _part(len(shards))):
            save_file(pending, directory / _part(len(shards)), {"format": "pt"})
        shards.append({name: tensor.nbytes for name, tensor in pending.items()})
        pending.clear()

    for name, tensor in tensors:
        if pending and size + tensor.nbytes > shard_bytes:
            flush()
            size = 0
        pending[name] = tensor.detach().to("cpu").contiguous().clone()
        size += tensor.nbytes
    flush()
    if len(shards) == 1:
        (directory / _part(0)).rename(directory / "model.safetensors")
        return
    index: dict[str, str] = {}
    for number, shard in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / _part(number)).rename(directory / file)
        index |= dict.fromkeys(shard, file)
    total = sum(sum(shard.values()) for shard in shards)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
    (directory / "model.safetensors.index.json").write_text(text)


def _part(number: int) -> str:
    return f"part-{number:05d}"


def _write_settings(model: PolicyModel, config: Config, files: Files, directory: Path) -> None:
    """All files but weights: config.json is written anew, with the code of the model's class; others are copies."""
    lm_config = copy.deepcopy(model.lm.config)
    for key, value in model.dropout.items():
        setattr(lm_config, key, value)
    lm_config.dtype = config.train.effective_transfer_dtype
    lm_config.architectures = [type(model.lm).__name__.removeprefix("FSDP")]
    lm_config.save_pretrained(directory)
    _write_code(model, directory)
    for name, data in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(data)


def _write_code(model: PolicyModel, directory: Path) -> None:
    """Copy the code that came with the model next to it: `auto_map` in its config names these files."""
    for kind in type(model.lm).__mro__:
        if kind.__module__.startswith(f"{TRANSFORMERS_DYNAMIC_MODULE_NAME}."):
            file = str(sys.modules[kind.__module__].__file__)
            for source in (file, *get_relative_import_files(file)):
                shutil.copyfile(source, directory / Path(source).name)
            return
