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
from controller.data.reading.sources import optional_column
from controller.data.rows import Row
from schema.config.sections.dataset import DatasetKeys

_PLACEHOLDER = re.compile(
    r"<image>|<(?i:image|video|audio)[ _-]?\d+>|<\|(?i:image|video|audio|vision)[^|<>\s]*\|>"
    r"|<start_of_image>|<image_soft_token>"
)
_TAG = re.compile("<video>|<audio>")
"""Placeholders that are elements of HTML as well."""
_ANY = re.compile(r".*\S.*", re.DOTALL)
_SOME = re.compile(r"(?!(?:none|null|nan|n/a|-)$).*\S.*", re.IGNORECASE | re.DOTALL)
_FILE_OR_DATA = (
    r"data:(?:image|video|audio)/.*|(?:/9j/|iVBORw0KGgo|R0lGOD|UklGR)[\w+/=\s]{24,}"
    r"|[^\n<>]*\.(?:png|jpe?g|gif|bmp|webp|tiff?|svg|heic|avif|mp4|avi|mov|mkv|webm|m4v|mpe?g|flv|wav|mp3|flac|ogg"
    r"|opus|m4a|aac)(?:[?#]\S*)?"
)
_FILE = re.compile(_FILE_OR_DATA, re.IGNORECASE | re.DOTALL)
"""The path of a picture, a video or a sound, or one as base64."""
_ADDRESS = re.compile(rf"(?:https?|s3|gs|oss|hdfs|file)://\S+|{_FILE_OR_DATA}", re.IGNORECASE | re.DOTALL)

USUAL_COLUMNS = {
    **dict.fromkeys(("images", "videos", "audios", "multi_modal_data"), _ANY),
    **dict.fromkeys(("image", "video", "audio"), _ADDRESS),
    **{f"{kind}_{what}": _SOME for kind in ("image", "video", "audio") for what in ("path", "url")},
}
"""Columns and keys of a turn in which published datasets keep media, and which texts there are media.

`image` is a text in some, as the name of a container image.
"""


def refuse_media(dataset: DatasetKeys, section: str, row: Row, prompt: str | list[Message], where: str) -> None:
    """Refuse a row that is not of text alone; with an empty `image_column_name` the user says that all rows are.

    section: the config section of `dataset`. where: how an error names the row. Raises `DataError`.
    """
    if not dataset.image_column_name:
        return
    for name, texts in {**USUAL_COLUMNS, dataset.image_column_name: _ANY}.items():
        if (name in row or "." in name) and _holds_media(optional_column(row, name), texts):
            raise _refusal(where, f"the column `{name}` has a value", section)
    for turn in as_messages(prompt):
        for name, texts in USUAL_COLUMNS.items():
            if name in turn and _holds_media(turn[name], texts):
                raise _refusal(where, f"a turn of its prompt has {name}", section)
        if turn["role"] == "assistant":
            continue
        if placeholder := _PLACEHOLDER.search(turn["content"]):
            raise _refusal(where, f"its prompt has {placeholder[0]}", section)
        if (tag := _TAG.search(turn["content"])) and (column := _media_column(row)):
            raise _refusal(where, f"its prompt has {tag[0]}, and the column `{column}` looks like media", section)


def _media_column(row: Row) -> str:
    """A column, whatever its name, whose value looks like an image, a video or a sound; "": there is none."""
    return next((name for name, value in row.items() if _holds_media(value, _FILE)), "")


def _holds_media(value: Any, texts: re.Pattern[str]) -> bool:
    """Whether a value may be an image, a video or a sound: its bytes, or a text that says where it lies.

    texts: which texts do.
    """
    if isinstance(value, Mapping):
        is_file = value.keys() == {"bytes", "path"}  # as `datasets` stores them
        return any(_holds_media(inner, _ANY if is_file else texts) for inner in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_media(item, texts) for item in value)
    if isinstance(value, str):
        return texts.fullmatch(value.strip()) is not None
    return isinstance(value, bytes) and bool(value.strip())


def _refusal(where: str, what: str, section: str) -> DataError:
    return DataError(
        f"{where}: {what}, and this build cannot train on images, videos or sounds yet; leave such rows out, or, "
        f'where the text alone is the prompt, write {section}.image_column_name = ""'
    )
