"""Images, videos and sounds in the rows of a dataset: models read text alone here, so such rows are refused by name.

A row has one in a column of theirs, in a turn of its prompt, or by a placeholder in the prompt's text. Parts of a
turn that are not text are refused where messages are read (`controller.data.conversations`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from controller.data.conversations import Message, as_messages
from controller.data.errors import DataError
from controller.data.rows import Row
from controller.data.sources import optional_column
from schema.config import DatasetConfig

USUAL_COLUMNS = ("images", "image", "videos", "video", "audios", "audio")
"""Columns and keys of a turn that published datasets keep them in."""

_PLACEHOLDER = re.compile(
    r"<(?:image|video|audio)(?:[ _]?\d+)?>|<\|(?:image|video|audio|vision)[^|<>\s]*\|>"
    r"|<start_of_image>|<image_soft_token>"
)


def refuse_media(
    dataset: DatasetConfig, section: str, row: Row, prompt: str | list[Message], where: str
) -> None:
    """Refuse a row that is not of text alone; with an empty `image_column_name` the user says that all rows are.

    section: the config section of `dataset`. where: how an error names the row. Raises `DataError`.
    """
    if not dataset.image_column_name:
        return
    for name in dict.fromkeys((dataset.image_column_name, *USUAL_COLUMNS)):
        if _holds_media(optional_column(row, name)):
            raise _refusal(where, f"the column `{name}` has a value", section)
    for turn in as_messages(prompt):
        if name := next((name for name in USUAL_COLUMNS if _holds_media(turn.get(name))), ""):
            raise _refusal(where, f"a turn of its prompt has {name}", section)
        if turn["role"] != "assistant" and (found := _PLACEHOLDER.search(turn["content"])):
            raise _refusal(where, f"its prompt has {found[0]}", section)


def _holds_media(value: Any) -> bool:
    """Whether a value may be an image, a video or a sound: its bytes, where it lies, or what a library made of it."""
    if isinstance(value, Mapping):
        return any(map(_holds_media, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_media, value))
    if isinstance(value, str | bytes):
        return bool(value.strip())
    return value is not None and not isinstance(value, bool | int | float)


def _refusal(where: str, what: str, section: str) -> DataError:
    return DataError(
        f"{where}: {what}, and this build cannot train on images, videos or sounds yet; leave such rows out, or, "
        f'where the text alone is the prompt, write {section}.image_column_name = ""'
    )
