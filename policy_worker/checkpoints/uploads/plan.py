"""The objects of a checkpoint on S3, and the cuts of a file. Pure.

<prefix>/<run>/<step-…|final>/<file>           the files
<prefix>/<run>/<step-…|final>/complete.json    the marker, written last: names, sizes and sha256 of all files
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MARKER = "complete.json"
PART_BYTES = 16 * 1024 * 1024
"""A part: large enough that requests do not count, small enough that a lost one is soon sent again."""
MAX_PARTS = 10_000
"""S3's limit; larger files get larger parts."""
MEBIBYTE = 1024 * 1024


@dataclass(frozen=True)
class Part:
    """One part of a file; numbers start at 1, as S3's do."""

    number: int
    offset: int
    length: int


def part_bytes(size: int, wanted: int = PART_BYTES) -> int:
    """Bytes of a part of a file of this size, whole mebibytes where S3's limit on parts forces more than wanted."""
    least = math.ceil(size / MAX_PARTS)
    return wanted if least <= wanted else math.ceil(least / MEBIBYTE) * MEBIBYTE


def parts(size: int, length: int) -> list[Part]:
    """The parts of a file."""
    return [
        Part(number + 1, offset, min(length, size - offset))
        for number, offset in enumerate(range(0, size, length))
    ]


def object_prefix(prefix: str, run: str, name: str) -> str:
    """Return what the keys of one checkpoint begin with."""
    return "/".join([*filter(None, prefix.split("/")), run, name])


def is_wanted(upload: bool | str, final: bool) -> bool:
    """Whether `train.ckpt.upload_s3` means this checkpoint."""
    return upload in (True, "all") or (upload == "final" and final)
