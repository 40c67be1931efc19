"""Rules of checkpoints, uploads and weight versions: what is saved and resumed, which names S3 and the hub take,
where versions lie and who can reach them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from schema.config.loading.tomlwrite import toml_value
from schema.config.paths import home_hint, is_file
from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.rules.rows import Each, InGrpo, Refusal, Row, Rule, refused, section, value_at
from schema.config.sections.train import CheckpointConfig
from schema.wire.store_url import is_url, parse_url

_CKPT = "train.ckpt"
_NO_REPOSITORY = CheckpointConfig.model_fields["hf_repo_name"].default
Checkpoint = Row[CheckpointConfig]
_ckpt = section(_CKPT, lambda c: c.train.ckpt)


def loads_what_was_saved(config: Config) -> Iterator[Problem]:
    """Checkpoints hold the contents that a resumed run loads, and the weights come from one place."""
    ckpt, key = config.train.ckpt, f"{_CKPT}.load_contents"
    if (loaded := ckpt.load_contents) is None:
        return
    missing = [name for name in loaded if name != "hf_model" and name not in ckpt.save_contents]
    if missing:
        contents = [name for name in ("model", "optimizer", "extra") if name in {*ckpt.save_contents, *missing}]
        says = f"{{}} asks for {toml_value(missing)}, which {{.save_contents=}} leaves out"
        yield refused(config, key, says, f"write {{.save_contents!}} = {toml_value(contents)}, or leave it out")
    elif not {"model", "hf_model"} & set(loaded):
        says = "{} loads no weights: training would go on from the initial ones"
        yield refused(config, key, says, f"leave it out, or write {{!}} = {toml_value(['model', *loaded])}")
    elif {"model", "hf_model"} <= set(loaded):
        says = '{} loads the weights twice: "model" from the shards and "hf_model" from the export'
        shards = [name for name in loaded if name != "hf_model"]
        yield refused(config, key, says, f"write {{!}} = {toml_value(shards)}")
    elif "hf_model" in loaded and not ckpt.export_safetensors:
        says = "{} takes the weights from an export, and {.export_safetensors=} makes none"
        yield refused(config, key, says, "write {.export_safetensors!} = true, or leave it out")


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
    if bucket and (not _BUCKET.fullmatch(bucket) or ".." in bucket or _ADDRESS.fullmatch(bucket)):
        says = '"{~}" is not a bucket name: 3 to 63 of a-z, 0-9, "-", ".", a letter or digit at both ends'
        hint = 'write {!} = "name-of-your-bucket"; what keys begin with is {.s3_prefix!}'
        yield refused(config, f"{_CKPT}.s3_bucket", says, hint)
    if not _PREFIX.fullmatch(prefix) or {".", ".."} & set(prefix.split("/")) or len(prefix) > MOST_PREFIX:
        message = f"{prefix!r} cannot begin keys: letters, digits and !_.*'()- in parts divided by /, no . or .."
        hint = 'write a plain one such as "outputs" or "team/outputs", or leave it out'
        yield Problem(f"{_CKPT}.s3_prefix", message, prefix, hint)
    wrong = not _REPOSITORY.fullmatch(repository) or "--" in repository or ".." in repository
    if repository not in ("", _NO_REPOSITORY) and (wrong or len(repository) > MOST_REPOSITORY):
        says = '"{~}" is not a repository name: owner/name, of letters, digits, "-", "_" and "."'
        yield refused(config, f"{_CKPT}.hf_repo_name", says, 'write "owner/name"; the owner may be you')


CHECKPOINT_RULES: tuple[Rule, ...] = (
    Each(
        _ckpt,
        Checkpoint("upload_s3", lambda keys: keys.upload_s3 is not False and not keys.s3_bucket,
            "{} uploads checkpoints to a bucket, and {.s3_bucket!} is unset",
            'write {.s3_bucket!} = "name-of-your-bucket", or {.upload_s3!} = false', (".s3_bucket",)),
        Checkpoint("upload_s3",
            lambda keys: keys.upload_s3 is not False and bool(keys.s3_bucket) and not keys.enable_checkpoint,
            "{} uploads checkpoints, and {.enable_checkpoint=} saves none",
            "write {.enable_checkpoint!} = true, or leave out {.upload_s3!} and {.s3_bucket!}"),
        Checkpoint("s3_bucket", lambda keys: bool(keys.s3_bucket) and keys.upload_s3 is False,
            "{} gets nothing: {.upload_s3=}",
            lambda keys: 'leave it out, or write {.upload_s3!} = "final"'
            + " and {.enable_checkpoint!} = true" * (not keys.enable_checkpoint)),
        Checkpoint("upload_hf", lambda keys: keys.upload_hf and keys.hf_repo_name == _NO_REPOSITORY,
            'true uploads to a repository of yours, and {.hf_repo_name!} is the default {.hf_repo_name}',
            'write {.hf_repo_name!} = "owner/name", or {.upload_hf!} = false', (".hf_repo_name",)),
        Checkpoint("upload_hf", lambda keys: keys.upload_hf and not keys.hf_repo_name,
            "true uploads to a repository of yours, and {.hf_repo_name!} is empty",
            'write {.hf_repo_name!} = "owner/name", or {.upload_hf!} = false', (".hf_repo_name",)),
        Checkpoint("upload_hf", lambda keys: keys.upload_hf and not keys.export_safetensors,
            "true uploads the export, and {.export_safetensors=} makes none",
            "write {.export_safetensors!} = true, or {.upload_hf!} = false"),
        Checkpoint("save_contents", lambda keys: "model" not in keys.save_contents and not keys.export_safetensors,
            "{} leaves out the weights, and {.export_safetensors=} makes no export of them",
            lambda keys: f"write {{.save_contents!}} = {toml_value(['model', *keys.save_contents])}, or "
            "{.export_safetensors!} = true"),
    ),
    Refusal(f"{_CKPT}.save_freq_in_epoch", lambda c: c.train.ckpt.save_freq_in_epoch > c.train.epoch,
        "{} epochs are never complete: {train.epoch=}",
        "write {.save_freq_in_epoch!} = {train.epoch}, or leave it out"),
    loads_what_was_saved,
    Each(
        _ckpt,
        Checkpoint("load_schedule",
            lambda keys: keys.load_schedule and keys.load_contents is not None and "extra" not in keys.load_contents,
            'true takes the schedule from the checkpoint, and {.load_contents=} leaves out "extra"',
            lambda keys: "write {.load_schedule!} = false, or {.load_contents!} = "
            + toml_value([*(keys.load_contents or ()), "extra"])),
    ),
    names_are_valid,
    Refusal(f"{_CKPT}.upload_s3", lambda c: c.train.ckpt.upload_s3 == "final" and not c.launcher.export_final,
        "{} uploads the model at the end, and {launcher.export_final=} makes none",
        'write {launcher.export_final!} = true, or {.upload_s3!} = "all" for checkpoints'),
    Refusal(f"{_CKPT}.upload_hf", lambda c: c.train.ckpt.upload_hf and not c.train.ckpt.enable_checkpoint,
        "true uploads the exports of checkpoints, and {.enable_checkpoint=} saves none",
        "write {.enable_checkpoint!} = true, or {.upload_hf!} = false"),
)  # fmt: skip


# ---- weight versions ----------------------------------------------------------------------------------------

_SYNC, _POLICY = "weight_sync", "train.train_policy"
OF_ONE_HOST = ("/dev", "/proc", "/run", "/tmp", "/var/tmp")  # noqa: S108
"""Directories that each machine has for itself, wherever jobs run."""

_HALF_A_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def store_is_a_place(config: Config) -> Iterator[Problem]:
    """The store is a directory or a bucket."""
    store, key = config.weight_sync.store, f"{_SYNC}.store"
    if is_url(store):
        try:
            parse_url(store)
        except ValueError as error:
            hint = 'write weight_sync.store = "s3://bucket/prefix", or the path of a directory'
            yield Problem(key, str(error), store, hint)
    elif store.startswith("~"):
        yield Problem(key, f"{store} is not a path", store, home_hint(store))
    elif _HALF_A_URL.match(store):
        yield refused(config, key, "{~} is neither a path nor a URL", "write s3://bucket/prefix")
    elif place := next(filter(is_file, (Path(store), *Path(store).parents)), None) if store else None:
        yield Problem(key, f"{place} is a file, not a directory", store, "name a directory")


def store_is_reached_from_all_hosts(config: Config) -> Iterator[Problem]:
    """A directory of one machine is not a store for a job on several."""
    store = config.weight_sync.store
    key = f"{_SYNC}.store" if store else "train.output_dir"
    place = PurePosixPath(value_at(config, key))
    if config.placement.nodes > 1 and not is_url(store) and any(map(place.is_relative_to, OF_ONE_HOST)):
        says = f"{{{key}~}} is on each machine another directory, and the job runs on {{placement.nodes=}}"
        hint = "name a directory on a file system that all machines share, or a bucket: s3://bucket/prefix"
        yield refused(config, f"{_SYNC}.store", says, hint, (key, "placement.nodes"))


def host_cache_is_absolute(config: Config) -> Iterator[Problem]:
    """Whatever the directory in which a replica starts, the copy of a host lies in one place."""
    cache, key, hint = (
        config.weight_sync.host_cache,
        f"{_SYNC}.host_cache",
        "write an absolute path, or leave it out",
    )
    if is_url(cache):
        says = "{~} is not a directory: the copy is mapped into the memory of the replicas of a host"
        yield refused(config, key, says, hint)
    elif cache and not PurePosixPath(cache).is_absolute():
        message = f"{cache} is not absolute: it would be another directory for each machine's processes"
        yield Problem(key, message, cache, home_hint(cache) or hint)
    elif cache and is_file(Path(cache)):
        yield refused(config, key, "{~} is a file, not a directory", "name a directory")


def _needs_old_policy(name: str, off: object, *, may_be_left: bool) -> Refusal:
    """Tokens computed over a cache of several versions have the engine's log-probs alone: π_old must be those."""
    other = f"{_POLICY}.{name}"
    leave = f", or {other} = {toml_value(off)}" if may_be_left else ""
    return Refusal(f"{_SYNC}.update_mode",
        lambda c: c.weight_sync.update_mode == "keep_kv" and value_at(c, other) != off,
        "{} goes on with a cache of several weight versions, of which only the engine knows the log-probs, and "
        f"{{{other}=}} computes those of the old policy again",
        f'write {{!}} = "recompute"{leave}')  # fmt: skip


WEIGHT_RULES: tuple[Rule, ...] = (
    store_is_a_place,
    store_is_reached_from_all_hosts,
    host_cache_is_absolute,
    InGrpo(
        _needs_old_policy("use_decoupled_loss", False, may_be_left=True),
        _needs_old_policy("rollout_correction.weights", "none", may_be_left=True),
        _needs_old_policy("rollout_correction.reject", "none", may_be_left=False),
        _needs_old_policy("rollout_correction.off_policy_mask", None, may_be_left=False),
    ),
)
