"""Rules of checkpoints and uploads: what is saved, what can be resumed, which names S3 and the hub take."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from schema.config.loading.tomlwrite import toml_value
from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.sections.train import CheckpointConfig

_CKPT = "train.ckpt"


def uploads_have_a_place(config: Config) -> Iterator[Problem]:
    """An upload to S3 has a bucket and a checkpoint to upload; a bucket has an upload."""
    ckpt = config.train.ckpt
    key, bucket_key, save_key = f"{_CKPT}.upload_s3", f"{_CKPT}.s3_bucket", f"{_CKPT}.enable_checkpoint"
    wanted = toml_value(ckpt.upload_s3)
    if ckpt.upload_s3 is not False and not ckpt.s3_bucket:
        message = f"{wanted} uploads checkpoints to a bucket, and {bucket_key} is unset"
        hint = f'write {bucket_key} = "name-of-your-bucket", or {key} = false'
        yield Problem(key, message, ckpt.upload_s3, hint, related=(bucket_key,))
    elif ckpt.upload_s3 is not False and not ckpt.enable_checkpoint:
        message = f"{wanted} uploads checkpoints, and {save_key} = false saves none"
        hint = f"write {save_key} = true, or leave out {key} and {bucket_key}"
        yield Problem(key, message, ckpt.upload_s3, hint, related=(save_key,))
    if ckpt.s3_bucket and ckpt.upload_s3 is False:
        message = f'"{ckpt.s3_bucket}" gets nothing: {key} = false'
        saved = "" if ckpt.enable_checkpoint else f" and {save_key} = true"
        hint = f'leave it out, or write {key} = "final"{saved}'
        yield Problem(bucket_key, message, ckpt.s3_bucket, hint, related=(key,))


def hub_uploads_are_complete(config: Config) -> Iterator[Problem]:
    """An upload to the hub has a repository of the user's and an export to upload."""
    ckpt = config.train.ckpt
    if not ckpt.upload_hf:
        return
    key, name_key, export_key = f"{_CKPT}.upload_hf", f"{_CKPT}.hf_repo_name", f"{_CKPT}.export_safetensors"
    default = type(ckpt).model_fields["hf_repo_name"].default
    if ckpt.hf_repo_name in ("", default):
        named = f'the default "{default}"' if ckpt.hf_repo_name else "empty"
        message = f"true uploads to a repository of yours, and {name_key} is {named}"
        hint = f'write {name_key} = "owner/name", or {key} = false'
        yield Problem(key, message, True, hint, related=(name_key,))
    if not ckpt.export_safetensors:
        message = f"true uploads the export, and {export_key} = false makes none"
        hint = f"write {export_key} = true, or {key} = false"
        yield Problem(key, message, True, hint, related=(export_key,))


def checkpoints_hold_weights(config: Config) -> Iterator[Problem]:
    """There is something to resume from: the weights, or an export of them."""
    ckpt = config.train.ckpt
    if "model" in ckpt.save_contents or ckpt.export_safetensors:
        return
    key, export_key = f"{_CKPT}.save_contents", f"{_CKPT}.export_safetensors"
    held = toml_value(ckpt.save_contents)
    message = f"{held} leaves out the weights, and {export_key} = false makes no export of them"
    hint = f"write {key} = {toml_value(['model', *ckpt.save_contents])}, or {export_key} = true"
    yield Problem(key, message, ckpt.save_contents, hint, related=(export_key,))


def epochs_end_in_time(config: Config) -> Iterator[Problem]:
    """A checkpoint by epochs comes at least once."""
    key, every, epochs = (
        f"{_CKPT}.save_freq_in_epoch",
        config.train.ckpt.save_freq_in_epoch,
        config.train.epoch,
    )
    if every <= epochs:
        return
    message = f"{every} epochs are never complete: train.epoch = {epochs}"
    yield Problem(key, message, every, f"write {key} = {epochs}, or leave it out", related=("train.epoch",))


def loads_what_was_saved(config: Config) -> Iterator[Problem]:
    """What is read on resume is among what checkpoints hold, and the weights come from one place."""
    ckpt = config.train.ckpt
    if ckpt.load_contents is None:
        return
    loaded, key, saved_key = ckpt.load_contents, f"{_CKPT}.load_contents", f"{_CKPT}.save_contents"
    shown = toml_value(loaded)
    missing = [name for name in loaded if name != "hf_model" and name not in ckpt.save_contents]
    if missing:
        held = toml_value(ckpt.save_contents)
        message = f"{shown} asks for {toml_value(missing)}, which {saved_key} = {held} leaves out"
        both = [name for name in ("model", "optimizer", "extra") if name in {*ckpt.save_contents, *missing}]
        hint = f"write {saved_key} = {toml_value(both)}, or leave it out"
        yield Problem(key, message, loaded, hint, related=(saved_key,))
    elif not {"model", "hf_model"} & set(loaded):
        message = f"{shown} loads no weights: training would go on from the initial ones"
        hint = f"leave it out, or write {key} = {toml_value(['model', *loaded])}"
        yield Problem(key, message, loaded, hint)
    elif {"model", "hf_model"} <= set(loaded):
        message = f'{shown} loads the weights twice: "model" from the shards and "hf_model" from the export'
        hint = f"write {key} = {toml_value([name for name in loaded if name != 'hf_model'])}"
        yield Problem(key, message, loaded, hint)
    elif "hf_model" in loaded and not ckpt.export_safetensors:
        export = f"{_CKPT}.export_safetensors"
        message = f"{shown} takes the weights from an export, and {export} = false makes none"
        hint = f"write {export} = true, or leave it out"
        yield Problem(key, message, loaded, hint, related=(export,))
    yield from _schedule_source(ckpt, loaded)


def _schedule_source(ckpt: CheckpointConfig, loaded: Sequence[str]) -> Iterator[Problem]:
    """The schedule is a part of `extra`."""
    if not ckpt.load_schedule or "extra" in loaded:
        return
    key, other = f"{_CKPT}.load_schedule", f"{_CKPT}.load_contents"
    message = (
        f'true takes the schedule from the checkpoint, and {other} = {toml_value(loaded)} leaves out "extra"'
    )
    hint = f"write {key} = false, or {other} = {toml_value([*loaded, 'extra'])}"
    yield Problem(key, message, True, hint, related=(other,))


_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_ADDRESS = re.compile(r"\d+(\.\d+){3}")
_PREFIX = re.compile(r"[A-Za-z0-9!_.*'()/-]*")
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
MOST_PREFIX, MOST_REPOSITORY = 512, 96
"""Characters: S3's keys have at most 1,024 bytes, run and file names included; the hub's names at most 96."""


def names_are_valid(config: Config) -> Iterator[Problem]:
    """A bucket, a prefix and a repository are named as S3 and the hub allow."""
    ckpt = config.train.ckpt
    bucket, prefix, repository = ckpt.s3_bucket, ckpt.s3_prefix, ckpt.hf_repo_name
    if bucket and not _is_bucket(bucket):
        message = (
            f'"{bucket}" is not a bucket name: 3 to 63 of a-z, 0-9, "-", ".", a letter or digit at both ends'
        )
        hint = f'write {_CKPT}.s3_bucket = "name-of-your-bucket"; what keys begin with is {_CKPT}.s3_prefix'
        yield Problem(f"{_CKPT}.s3_bucket", message, bucket, hint)
    parts = prefix.split("/")
    if not _PREFIX.fullmatch(prefix) or {".", ".."} & set(parts) or len(prefix) > MOST_PREFIX:
        message = (
            f"{prefix!r} cannot begin keys: letters, digits and !_.*'()- in parts divided by /, no . or .."
        )
        hint = 'write a plain one such as "outputs" or "team/outputs", or leave it out'
        yield Problem(f"{_CKPT}.s3_prefix", message, prefix, hint)
    wrong = not _REPOSITORY.fullmatch(repository) or "--" in repository or ".." in repository
    default = type(ckpt).model_fields["hf_repo_name"].default
    if repository not in ("", default) and (wrong or len(repository) > MOST_REPOSITORY):
        message = f'"{repository}" is not a repository name: owner/name, of letters, digits, "-", "_" and "."'
        yield Problem(
            f"{_CKPT}.hf_repo_name", message, repository, 'write "owner/name"; the owner may be you'
        )


def _is_bucket(name: str) -> bool:
    return bool(_BUCKET.fullmatch(name)) and ".." not in name and not _ADDRESS.fullmatch(name)


def there_is_something_to_upload(config: Config) -> Iterator[Problem]:
    """`final` uploads the final model, and the hub gets exports of checkpoints."""
    ckpt = config.train.ckpt
    export, save = "launcher.export_final", f"{_CKPT}.enable_checkpoint"
    if ckpt.upload_s3 == "final" and not config.launcher.export_final:
        key = f"{_CKPT}.upload_s3"
        message = f'"final" uploads the model at the end, and {export} = false makes none'
        hint = f'write {export} = true, or {key} = "all" for checkpoints'
        yield Problem(key, message, "final", hint, related=(export,))
    if ckpt.upload_hf and not ckpt.enable_checkpoint:
        key = f"{_CKPT}.upload_hf"
        message = f"true uploads the exports of checkpoints, and {save} = false saves none"
        yield Problem(key, message, True, f"write {save} = true, or {key} = false", related=(save,))


CHECKPOINT_RULES = (
    uploads_have_a_place,
    hub_uploads_are_complete,
    checkpoints_hold_weights,
    epochs_end_in_time,
    loads_what_was_saved,
    names_are_valid,
    there_is_something_to_upload,
)
