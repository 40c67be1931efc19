"""`python -m policy_worker.export_command CHECKPOINT DIR`: a model for transformers from a checkpoint, offline.

    checkpoint with an export ── no --dtype ──▶ its files, checked against the manifest
    else: state files of all ranks, checked ─▶ hub names and shapes ─▶ safetensors, config, tokenizer

One process, no accelerator, at most one shard in memory. Names and shapes come from the model that the run began
with (`policy.model_name_or_path` of its config.json), of which no weight is read; but a run that trains adapters has
kept these alone, and the model is loaded, whole, to merge them into it. Started by `cosmos-launch export`.
Exit codes: 0 done, 1 the disk, 2 no checkpoint that this can be made from.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

from policy_worker.checkpoints.export import ExportNames, prepare_export, write_export
from policy_worker.checkpoints.find import found_at
from policy_worker.checkpoints.layout import EXPORT, FoundCheckpoint, faults, state_files, template_of
from policy_worker.checkpoints.load import check_base
from policy_worker.checkpoints.state import model_state, weights_from
from policy_worker.checkpoints.storage import StateFiles, differences
from policy_worker.errors import CheckpointError, DamagedCheckpointError, PolicyError, SettingsError
from policy_worker.model.load import load_model
from policy_worker.model.lora import adapters_of
from policy_worker.model.model import DTYPES, PolicyModel
from policy_worker.model.pretrained import skeleton
from schema.config import Config, ConfigError, check_config, overrides
from schema.config.chat_template import FILE as TEMPLATE
from schema.config.chat_template import KEY, TemplateError, read_template
from schema.config.modules import CANNOT_LOAD, remedy
from schema.util.atomic_file import replacing_directory
from weight_sync.hf_names import Gather

log = logging.getLogger("export")

MODEL = "model"
TENTHS = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, export, say what was done."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    parser = argparse.ArgumentParser(prog="python -m policy_worker.export_command")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default=None)
    parser.add_argument("--model", default="")
    parser.add_argument("--config", type=Path, default=None)
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        checkpoint = found_at(given.checkpoint)
        _check_target(given.output, given.force)
        with redirect_stdout(sys.stderr if given.json else sys.stdout):
            export(checkpoint, given.output, given.dtype, given.model, given.config)
    except PolicyError as error:
        sys.stderr.write(f"error: {error}\n")
        return SettingsError.exit_code
    except OSError as error:
        sys.stderr.write(f"error: {error.filename or given.output}: {error.strerror or error}\n")
        return 1
    if given.json:
        sys.stdout.write(json.dumps(_written(checkpoint, given.output), indent=2) + "\n")
    else:
        sys.stdout.write(f"{given.output}: {checkpoint.manifest.architecture} after {checkpoint.step} steps\n")
    return 0


def _written(checkpoint: FoundCheckpoint, target: Path) -> dict[str, Any]:
    """Describe what was written, for programs. files: sizes in bytes by name."""
    return {
        "model": str(target),
        "checkpoint": str(checkpoint.path),
        "architecture": checkpoint.manifest.architecture,
        "step": checkpoint.step,
        "files": {
            str(path.relative_to(target)): path.stat().st_size for path in sorted(target.rglob("*")) if path.is_file()
        },
    }


def _check_target(target: Path, force: bool) -> None:
    if target.exists() and not force and (not target.is_dir() or any(target.iterdir())):
        raise SettingsError(f"{target} is there already: choose another name with -o, or --force to replace it")


def export(
    checkpoint: FoundCheckpoint, target: Path, dtype: str | None, model: str, config_file: Path | None
) -> None:
    """Write a model for transformers to `target`.

    Raises:
        CheckpointError: the checkpoint is damaged or holds no weights.
        SettingsError: the run's configuration, or a file of the model that it began with, cannot be read.
        OSError: `target` cannot be written; nothing there was changed.
    """
    manifest = checkpoint.manifest
    if manifest.exported and (dtype is None or MODEL not in manifest.contents):
        if dtype is not None:
            raise CheckpointError(f"{checkpoint.path} holds its export alone, in one type: leave --dtype out")
        _copy_export(checkpoint, target)
        return
    if MODEL not in manifest.contents:
        raise CheckpointError(
            f"{checkpoint.path} holds no weights: its run had train.ckpt.save_contents without model"
        )
    files = [path.name for path in state_files(checkpoint.path, MODEL)]
    _check_whole(checkpoint, files)
    config = _config_of(checkpoint, dtype, model, config_file)
    template = _template(checkpoint, config)
    with StateFiles(state_files(checkpoint.path, MODEL)) as saved:
        if config.policy.lora is None:
            model, gather = PolicyModel(_skeleton(config), {}), weights_from(saved)
            _check_names(checkpoint, model)
        else:
            model, gather = _with_adapters(checkpoint, saved, config)
        total, copied = len(list(model.lm.parameters())), prepare_export(model, config, template)
        write_export(ExportNames(model), gather, config, target, copied, lambda tensors: _progress(tensors, total))


def _with_adapters(checkpoint: FoundCheckpoint, saved: StateFiles, config: Config) -> tuple[PolicyModel, Gather]:
    """The model with its weights, and where those come from that it has trained."""
    assert config.policy.lora is not None
    # Other initialisers may take minutes, for nothing.
    plain = config.policy.lora.model_copy(update={"init_lora_weights": True})
    policy = config.policy.model_copy(update={"lora": plain})
    model = load_model(config.model_copy(update={"policy": policy})).read_weights(torch.device("cpu"))
    settings = adapters_of(model.lm)
    assert settings is not None
    settings.init_lora_weights = config.policy.lora.init_lora_weights
    wrong = differences(saved.tensors, model_state(model))
    if wrong:
        raise CheckpointError(f"{checkpoint.path} has adapters of another model or of another kind: {wrong[0]}")
    try:
        check_base("policy", checkpoint.manifest, model, config)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}; --model names it where it has moved") from error

    def gather(name: str, tensor: torch.Tensor) -> torch.Tensor:
        key = f"{MODEL}.lm.{name}"
        return saved.whole(key) if key in saved.tensors else tensor

    return model, gather


def _copy_export(checkpoint: FoundCheckpoint, target: Path) -> None:
    _check_whole(checkpoint, [name for name in checkpoint.manifest.files if name.startswith(f"{EXPORT}/")])
    with replacing_directory(target) as unfinished:
        shutil.copytree(checkpoint.path / EXPORT, unfinished, dirs_exist_ok=True)


def _check_whole(checkpoint: FoundCheckpoint, names: list[str]) -> None:
    wrong = faults(checkpoint.path, checkpoint.manifest.files, names)
    if wrong:
        raise DamagedCheckpointError(f"{checkpoint.path} is damaged: {'; '.join(wrong[:3])}: take an older one")


def _config_of(checkpoint: FoundCheckpoint, dtype: str | None, model: str, file: Path | None) -> Config:
    path = file or checkpoint.path.parent.parent / "config.json"
    try:
        data: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(
            f"{path}: {reason}: the model's names and shapes come from the run's config.json; --config names it "
            f"where the checkpoint was moved"
        ) from None
    if dtype is not None:
        data["train"]["transfer_dtype"] = dtype
    if model:
        data["policy"] |= {"model_name_or_path": model, "model_revision": None}
    try:
        return Config.model_validate(data)
    except ValueError:
        try:
            check_config(data)
        except ConfigError as error:
            raise SettingsError(f"{path}: {error}") from None
        raise


def _template(checkpoint: FoundCheckpoint, config: Config) -> str | None:
    """The chat template that training used. Raises `SettingsError`, `DamagedCheckpointError`: it cannot be read."""
    if TEMPLATE in checkpoint.manifest.files:
        _check_whole(checkpoint, [TEMPLATE])
        return template_of(checkpoint)
    try:
        template = read_template(config)
    except TemplateError as error:
        raise SettingsError(str(error)) from error
    if template is not None:
        log.warning("%s has not kept its chat template: the export gets that of %s today", checkpoint.path, KEY)
    return template


def _skeleton(config: Config) -> Any:
    """The model without its weights. Raises `SettingsError`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    name, revision = config.policy.model_name_or_path, config.policy.model_revision
    trust = config.policy.trust_remote_code
    try:
        facts = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust)
        overrides.apply(facts, "policy.override_config", config.policy.override_config)
        lm = skeleton(AutoModelForCausalLM, facts, DTYPES[config.train.master_dtype], revision, trust)
    except overrides.OverrideError as error:
        raise SettingsError(str(error)) from error
    except CANNOT_LOAD as error:
        raise SettingsError(
            f"policy.model_name_or_path = {name!r} cannot be read: {error}{remedy(error)}; "
            f"--model names another place"
        ) from error
    lm.tie_weights()
    return lm


def _check_names(checkpoint: FoundCheckpoint, skeleton: PolicyModel) -> None:
    """Raises `CheckpointError` unless the checkpoint has the model's tensors, in its shapes, and no others."""
    prefix = f"{MODEL}.lm."
    with StateFiles(state_files(checkpoint.path, MODEL)) as saved:
        held = {key.removeprefix(prefix): tuple(facts.size) for key, facts in saved.tensors.items()}
    wanted = {name: tuple(tensor.shape) for name, tensor in skeleton.lm.named_parameters()}
    unknown = held.keys() - skeleton.lm.state_dict().keys()
    wrong = [name for name, shape in wanted.items() if held.get(name) != shape] + sorted(unknown)
    if wrong:
        first, kind = wrong[0], type(skeleton.lm).__name__
        saved_shape, model_shape = held.get(first, "nothing"), wanted.get(first, "nothing")
        raise CheckpointError(
            f"{checkpoint.path} is not of this model ({kind} of policy.model_name_or_path): {len(wrong)} tensors "
            f"differ, e.g. {first}: {saved_shape} in the checkpoint, {model_shape} in the model"
        )


def _progress(tensors: Iterator[tuple[str, torch.Tensor]], total: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass tensors on, and say how many tenths are done."""
    said = 0
    for number, item in enumerate(tensors, 1):
        yield item
        tenth = min(TENTHS, number * TENTHS // max(total, 1))
        if tenth > said:
            said = tenth
            sys.stdout.write(f"{tenth * 100 // TENTHS:>3} %  {number} tensors\n")
            sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
