"""Prepared data: tokenised rows in one memory-mapped safetensors file.

    token_ids  int32 [T]      the token ids of all rows, one after the other
    offsets    int64 [n + 1]  row i is token_ids[offsets[i]:offsets[i + 1]]
    rows       uint8 [R]      UTF-8 JSON objects: what rewards and logs need of each row
    row_ends   int64 [n]      row i's JSON ends at row_ends[i]
    loss_mask  uint8 [T]      only for SFT: 1 on tokens to learn

Written once by the preparation process, read by the controller (and, for SFT, by the trainer) at any position
without loading the rest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from schema.util.atomic_file import remove_unfinished, replacing, usual_mode

FORMAT = "cosmos-prompts-1"
_TYPES = {"token_ids": "I32", "offsets": "I64", "rows": "U8", "row_ends": "I64", "loss_mask": "U8"}


class PromptFileError(ValueError):
    """The file is missing, of another format, or damaged."""


def write_prompts(
    path: Path,
    token_ids: Sequence[Sequence[int]],
    rows: Sequence[dict[str, Any]],
    loss_masks: Sequence[Sequence[int]] | None = None,
    metadata: dict[str, str] | None = None,
) -> None:
    """Write rows to a temporary file next to `path` and rename it, so that a reader never sees half a file."""
    if len(token_ids) != len(rows):
        raise ValueError(f"{len(token_ids)} token sequences but {len(rows)} rows")
    if not all(len(ids) for ids in token_ids):
        raise ValueError("a row without tokens cannot be prepared")
    encoded = [json.dumps(row, ensure_ascii=False, allow_nan=False).encode() for row in rows]
    tensors: dict[str, npt.NDArray[np.generic]] = {
        "token_ids": _flat(token_ids, np.int32),
        "offsets": np.cumsum([0, *map(len, token_ids)], dtype=np.int64),
        "rows": np.frombuffer(b"".join(encoded), np.uint8),
        "row_ends": np.cumsum([len(row) for row in encoded], dtype=np.int64),
    }
    if loss_masks is not None:
        if [len(mask) for mask in loss_masks] != [len(ids) for ids in token_ids]:
            raise ValueError("loss masks and token sequences differ in length")
        tensors["loss_mask"] = _flat(loss_masks, np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_unfinished(path)
    with replacing(path) as neighbour, usual_mode(neighbour):
        save_file(tensors, neighbour, {"format": FORMAT, **(metadata or {})})


def _flat(rows: Sequence[Sequence[int]], dtype: type[np.generic]) -> npt.NDArray[np.generic]:
    return np.concatenate([np.asarray(row, dtype) for row in rows]) if rows else np.zeros(0, dtype)


class PromptFile:
    """Random access to prepared rows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = safe_open(path, framework="numpy")
            self.metadata: dict[str, str] = dict(self._file.metadata() or {})
            names = set(self._file.keys())
            if self.metadata.get("format") != FORMAT or not {"token_ids", "offsets", "rows", "row_ends"} <= names:
                raise PromptFileError(f"{path} is not prepared data of format {FORMAT}")
            for name in names & _TYPES.keys():
                self._check_type(name)
            self._offsets = self._file.get_tensor("offsets")
            self._row_ends = self._file.get_tensor("row_ends")
            self._token_ids = self._file.get_slice("token_ids")
            self._rows = self._file.get_slice("rows")
            self._loss_mask = self._file.get_slice("loss_mask") if "loss_mask" in names else None
        except (OSError, SafetensorError) as error:
            raise PromptFileError(f"prepared data {path} cannot be read: {error}") from None
        self._check_places()

    def _check_type(self, name: str) -> None:
        part = self._file.get_slice(name)
        type_and_rank = part.get_dtype(), len(part.get_shape())
        if type_and_rank != (_TYPES[name], 1):
            raise PromptFileError(f"{self._path}: {name} must be a vector of {_TYPES[name]}, not {type_and_rank}")

    def _check_places(self) -> None:
        """Every row lies in the file: offsets rise, and end where the tokens and texts end."""
        tokens, text = (part.get_shape()[0] for part in (self._token_ids, self._rows))
        offsets, ends = self._offsets, self._row_ends
        sound = (
            len(offsets) == len(ends) + 1
            and offsets[0] == 0
            and offsets[-1] == tokens
            and bool((offsets[1:] >= offsets[:-1]).all())
            and bool((ends[1:] >= ends[:-1]).all())
            and (ends[0] >= 0 and ends[-1] == text if len(ends) else text == 0)
        )
        if not sound:
            raise PromptFileError(f"{self._path} is damaged: its offsets do not divide it into rows")
        if self._loss_mask is not None and self._loss_mask.get_shape()[0] != tokens:
            raise PromptFileError(f"{self._path} is damaged: it has not one loss mask for each token")

    def __len__(self) -> int:
        return len(self._row_ends)

    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each row, [n]."""
        lengths: npt.NDArray[np.int64] = np.diff(self._offsets)
        return lengths

    def token_ids(self, i: int) -> npt.NDArray[np.int32]:
        return self._token_ids[int(self._offsets[i]) : int(self._offsets[i + 1])]  # type: ignore[no-any-return]

    def loss_mask(self, i: int) -> npt.NDArray[np.uint8]:
        """1 on tokens to learn. Raises `PromptFileError` if the file was not prepared for SFT."""
        if self._loss_mask is None:
            raise PromptFileError("this data has no loss mask: it was prepared for prompts, not for SFT")
        return self._loss_mask[int(self._offsets[i]) : int(self._offsets[i + 1])]  # type: ignore[no-any-return]

    def row(self, i: int) -> dict[str, Any]:
        start = int(self._row_ends[i - 1]) if i else 0
        try:
            row = json.loads(self._rows[start : int(self._row_ends[i])].tobytes())
        except (ValueError, RecursionError) as error:
            raise PromptFileError(f"{self._path}: row {i} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise PromptFileError(f"{self._path}: row {i} is not a JSON object")
        return row
