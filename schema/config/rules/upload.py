"""Rules of uploads: what S3 and the Hugging Face hub take as names, and that there is something to upload."""

from __future__ import annotations

import re

from schema.config.problem import Problem
from schema.config.root import Config

_CKPT = "train.ckpt"
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_ADDRESS = re.compile(r"\d+(\.\d+){3}")
_PREFIX = re.compile(r"[A-Za-z0-9!_.*'()/-]*")
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
MOST_PREFIX, MOST_REPOSITORY = 512, 96
"""Characters: S3's keys have at most 1,024 bytes, run and file names included; the hub's names at most 96."""


def names_are_valid(config: Config) -> list[Problem]:
    """A bucket, a prefix and a repository are named as S3 and the hub allow."""
    ckpt, problems = config.train.ckpt, []
    bucket, prefix, repository = ckpt.s3_bucket, ckpt.s3_prefix, ckpt.hf_repo_name
    if bucket and not _is_bucket(bucket):
        message = f'"{bucket}" is no name of a bucket: 3 to 63 of a-z, 0-9, "-", ".", a letter or digit at both ends'
        hint = f'write {_CKPT}.s3_bucket = "name-of-your-bucket"; what keys begin with is {_CKPT}.s3_prefix'
        problems.append(Problem(f"{_CKPT}.s3_bucket", message, bucket, hint))
    parts = prefix.split("/")
    if not _PREFIX.fullmatch(prefix) or {".", ".."} & set(parts) or len(prefix) > MOST_PREFIX:
        message = (
            f"{prefix!r} cannot begin keys: letters, digits and !_.*'()- in parts divided by /, no . or .."
        )
        hint = 'write a plain one such as "outputs" or "team/outputs", or leave it out'
        problems.append(Problem(f"{_CKPT}.s3_prefix", message, prefix, hint))
    wrong = not _REPOSITORY.fullmatch(repository) or "--" in repository or ".." in repository
    default = type(ckpt).model_fields["hf_repo_name"].default
    if repository not in ("", default) and (wrong or len(repository) > MOST_REPOSITORY):
        message = (
            f'"{repository}" is no name of a repository: owner/name, of letters, digits, "-", "_" and "."'
        )
        problems.append(
            Problem(f"{_CKPT}.hf_repo_name", message, repository, 'write "owner/name"; the owner may be you')
        )
    return problems


def _is_bucket(name: str) -> bool:
    return bool(_BUCKET.fullmatch(name)) and ".." not in name and not _ADDRESS.fullmatch(name)


def there_is_something_to_upload(config: Config) -> list[Problem]:
    """`final` uploads the final model, and the hub gets exports of checkpoints."""
    ckpt, problems = config.train.ckpt, []
    export, save = "launcher.export_final", f"{_CKPT}.enable_checkpoint"
    if ckpt.upload_s3 == "final" and not config.launcher.export_final:
        key = f"{_CKPT}.upload_s3"
        message = f'"final" uploads the model at the end, and {export} = false makes none'
        hint = f'write {export} = true, or {key} = "all" for checkpoints'
        problems.append(Problem(key, message, "final", hint, related=(export,)))
    if ckpt.upload_hf and not ckpt.enable_checkpoint:
        key = f"{_CKPT}.upload_hf"
        message = f"true uploads the exports of checkpoints, and {save} = false saves none"
        problems.append(
            Problem(key, message, True, f"write {save} = true, or {key} = false", related=(save,))
        )
    return problems


UPLOAD_RULES = (names_are_valid, there_is_something_to_upload)
