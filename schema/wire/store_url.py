"""`s3://bucket/prefix`: what such a place of a weight store may be. Pure, for who checks and for who opens it."""

from __future__ import annotations

import re
from dataclasses import dataclass

SCHEME = "s3://"
MAX_PREFIX = 512
"""Bytes: with the names of a version and file it stays below the 1024 that S3 allows a key."""

_BUCKET = re.compile(r"[a-z0-9](?:[a-z0-9.-]{1,61})[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9!_.*'()=+@,-]+(?:/[A-Za-z0-9!_.*'()=+@,-]+)*")


@dataclass(frozen=True)
class S3Location:
    """A bucket, and what the keys in it begin with: no `/` at either end, empty for the whole bucket."""

    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")


def is_url(place: str) -> bool:
    """Whether a place of a weight store is meant to be a URL and not the path of a directory."""
    return "://" in place


def parse_url(url: str) -> S3Location:
    """The bucket and prefix of a URL; a `/` at its end says nothing.

    Raises `ValueError` saying what is wrong and what to write.
    """
    if not url.startswith(SCHEME):
        raise ValueError(f"{url} is not the address of a weight store: write a directory, or s3://bucket/prefix")
    bucket, _, path = url[len(SCHEME) :].partition("/")
    prefix = path.removesuffix("/")
    if "@" in bucket:
        raise ValueError(
            "the address of a bucket holds no credentials: remove the part before the '@'; they come from "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        )
    if not _BUCKET.fullmatch(bucket) or ".." in bucket:
        raise ValueError(
            f"{bucket!r} is not a bucket name: 3 to 63 small letters, digits, '-' and '.', and nothing else before "
            f"the '/' (the endpoint comes from AWS_ENDPOINT_URL)"
        )
    if prefix and (not _PREFIX.fullmatch(prefix) or {".", ".."} & set(prefix.split("/"))):
        raise ValueError(
            f"{prefix!r} is not a key prefix: write names separated by single '/', of letters, digits and "
            f"!_.*'()=+@,-"
        )
    if len(prefix) > MAX_PREFIX:
        raise ValueError(f"a prefix of {len(prefix)} characters is too long: at most {MAX_PREFIX}")
    return S3Location(bucket, prefix)
