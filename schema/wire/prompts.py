"""Prepared data: tokenised rows in one memory-mapped safetensors file.

    token_ids  int32 [T]      the token ids of all rows, one after the other
    offsets    int64 [n + 1]  row i is token_ids[offsets[i]:offsets[i + 1]]
    rows       uint8 [R]      UTF-8 JSON objects: what rewards and logs need of each row
    row_ends   int64 [n]      row i's JSON ends at row_ends[i]
    loss_mask  uint8 [T]      only for SFT: 1 on tokens to learn
    source     uint16 [n]     only where parts or domains have shares: number of a row's source among the metadata's
    order      float64 [n]    only where a column orders the rows: its number

Written once by the preparation process, read by the controller, rollout replicas and (for SFT) the trainer at any
position without loading the rest. In its metadata are `digest`, the hash of its data, by which a process that reads a
file of that name sees whether it is the one that another process means; and `grown`, where it begins with all rows of
earlier files of its run: how many those had. Later rows come behind them, in an order of their own.

Of much data some rows, drawn from all, are prepared before the others, so that a job can begin with them: `early`
says how many, and they are the first ones of the file. A file of those alone is `unfinished`; the whole one, which
begins with the same rows, takes its place. In the first pass over the data the early rows come before all others,
whether or not a job has begun with them alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from schema.util.atomic_file import remove_unfinished, replacing
from schema.wire.data_report import UNFINISHED
from schema.wire.mixture import Source

FORMAT = "cosmos-prompts-1"
Mask = npt.NDArray[np.uint8]
_TYPES = {
    "token_ids": "I32", "offsets": "I64", "rows": "U8", "row_ends": "I64", "loss_mask": "U8", "source": "U16",
    "order": "F64",
}  # fmt: skip
MOST_SOURCES = 2**16 - 1


OTHER_ROWS = (
    "the prepared rows are not those of the checkpoint (other data, template or columns): training goes on at the "
    "same place among them, whichever rows were there"
)


class PromptFileError(ValueError):
    """The file is missing, of another format, or damaged."""


def write_prompts(
    path: Path,
    token_ids: Sequence[Sequence[int]],
    rows: Sequence[dict[str, Any]],
    loss_masks: Sequence[Sequence[int]] | None = None,
    metadata: dict[str, str] | None = None,
    sources: Sequence[str] | None = None,
) -> None:
    """Write rows to a temporary file next to `path` and rename it, so that a reader never sees half a file.

    sources: of each row, the part or domain that it is of; None: none has a share.
    """
    if len(token_ids) != len(rows):
        raise ValueError(f"{len(token_ids)} token sequences but {len(rows)} rows")
    for parts, what in ((loss_masks, "loss masks"), (sources, "sources")):
        if parts is not None and len(parts) != len(rows):
            raise ValueError(f"{len(rows)} rows, but {len(parts)} {what}")
    with PromptWriter(path, masks=loss_masks is not None, sources=sources is not None) as writer:
        for i, (ids, row) in enumerate(zip(token_ids, rows, strict=True)):
            mask = None if loss_masks is None else np.asarray(loss_masks[i], np.uint8)
            text = json.dumps(row, ensure_ascii=False, allow_nan=False).encode()
            writer.add(np.asarray(ids, np.int32), text, mask, "" if sources is None else sources[i])
        writer.finish(metadata or {})


def start_of_answer(mask: Mask) -> int:
    """Where the last run of learnt tokens begins; 0 where there is none. mask: 1 on tokens to learn, [n]."""
    starts = np.flatnonzero(np.diff(mask, prepend=0) == 1) if len(mask) else np.zeros(0, np.int64)
    return int(starts[-1]) if len(starts) else 0


class PromptWriter:
    """Writes rows one after the other, in memory of a few numbers for each; `finish` puts the file in its place.

    Tokens and texts wait in files without a name, which end with this process.
    """

    def __init__(self, path: Path, *, masks: bool = False, sources: bool = False) -> None:
        """masks, sources: whether each row has a loss mask, and a source."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_unfinished(path)
        names = ("token_ids", "rows", *(("loss_mask",) if masks else ()))
        self._files = {name: tempfile.TemporaryFile(dir=path.parent) for name in names}  # noqa: SIM115, closed below
        self._ends = {"token_ids": array("q"), "rows": array("q")}
        self._names: dict[str, int] = {}
        self._source = array("H") if sources else None
        self._order = array("d")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def __len__(self) -> int:
        return len(self._ends["rows"])

    def add(
        self,
        ids: npt.NDArray[np.int32],
        row: bytes,
        mask: Mask | None = None,
        source: str = "",
        order: float | None = None,
    ) -> None:
        """Append a row: its tokens, its JSON, its loss mask, its source, its number in the order of all rows.

        Raises ValueError, OSError.
        """
        numbers = np.array([] if order is None else [order], np.float64)
        self.extend(ids, np.array([len(ids)]), row, np.array([len(row)]), mask, [source], numbers)

    def extend(
        self,
        ids: npt.NDArray[np.int32],
        counts: npt.NDArray[np.int64],
        texts: bytes | memoryview,
        text_sizes: npt.NDArray[np.int64],
        masks: Mask | None,
        sources: Sequence[str],
        order: npt.NDArray[np.float64],
    ) -> None:
        """Append rows that stand one after the other: tokens of each, bytes of its JSON. Raises as `add`."""
        if not counts.all():
            raise ValueError("a row without tokens cannot be prepared")
        if (masks is None) == ("loss_mask" in self._files) or (masks is not None and len(masks) != len(ids)):
            raise ValueError("loss masks and token sequences differ in length")
        self._append("token_ids", np.ascontiguousarray(ids, np.int32).data, counts)
        self._append("rows", texts, text_sizes)
        if masks is not None:
            self._files["loss_mask"].write(np.ascontiguousarray(masks, np.uint8).data)
        if self._source is not None:
            numbers = [self._names.setdefault(source, len(self._names)) for source in sources]
            if len(self._names) > MOST_SOURCES:
                raise ValueError(f"more than {MOST_SOURCES} sources")
            self._source.extend(numbers)
        self._order.frombytes(np.ascontiguousarray(order, np.float64).tobytes())

    def _append(self, name: str, data: bytes | memoryview, lengths: npt.NDArray[np.int64]) -> None:
        ends = self._ends[name]
        self._files[name].write(data)
        ends.frombytes((np.cumsum(lengths, dtype=np.int64) + (ends[-1] if ends else 0)).tobytes())

    def token_ids(self, i: int) -> npt.NDArray[np.int32]:
        """The tokens of a row that was added."""
        return np.frombuffer(self._read("token_ids", i, 4), np.int32)

    def row(self, i: int) -> dict[str, Any]:
        """The row, as it was added."""
        row: dict[str, Any] = json.loads(self._read("rows", i, 1))
        return row

    def _read(self, name: str, i: int, width: int) -> bytes:
        file, ends = self._files[name], self._ends[name]
        start = ends[i - 1] if i else 0
        file.flush()
        data = os.pread(file.fileno(), (ends[i] - start) * width, start * width)
        return data

    def early(self, read: Mapping[str, int]) -> dict[str, str]:
        """The metadata that says that all rows so far are early ones; none where there are none.

        read: how many rows of each part were read for them.
        """
        if not len(self):
            return {}
        digest = hashlib.sha256()
        for file in self._files.values():
            file.flush()
            for at in range(0, file.tell(), _COPIED):
                digest.update(os.pread(file.fileno(), _COPIED, at))
        keys = hashlib.sha256("\n".join(str(self.row(i).get("key")) for i in range(len(self))).encode())
        early = {"rows": len(self), "read": dict(read)}
        early |= {"digest": digest.hexdigest()[:_EARLY_DIGEST], "places": keys.hexdigest()[:_EARLY_DIGEST]}
        return {"early": json.dumps(early)}

    def grown_from(self, earlier: PromptFile | None) -> dict[str, str]:
        """The metadata that says how many rows earlier files had; none where this one does not begin with theirs."""
        if earlier is None or not self._begins_with(earlier):
            return {}
        counts = [*earlier.grown, *([len(earlier)] if len(earlier) < len(self) else [])]
        return {"grown": json.dumps(counts)} if counts else {}

    def _begins_with(self, earlier: PromptFile) -> bool:
        n = len(earlier)
        if not 0 < n <= len(self) or self._source is not None:
            return False
        return all(
            self._read("rows", i, 1) == earlier.row_text(i)
            and np.array_equal(self.token_ids(i), earlier.token_ids(i))
            and ("loss_mask" not in self._files or self._read_mask(i) == earlier.loss_mask(i).tobytes())
            for i in range(n)
        )

    def _read_mask(self, i: int) -> bytes:
        start, end = (self._ends["token_ids"][k] if k >= 0 else 0 for k in (i - 1, i))
        self._files["loss_mask"].flush()
        return os.pread(self._files["loss_mask"].fileno(), end - start, start)

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Write the file next to `path` and rename it, so that a reader never sees half of it. Raises OSError."""
        offsets = np.concatenate([np.zeros(1, np.int64), np.frombuffer(self._ends["token_ids"], np.int64)])
        parts: dict[str, IO[bytes] | bytes] = {
            "token_ids": self._files["token_ids"],
            "offsets": offsets.tobytes(),
            "rows": self._files["rows"],
            "row_ends": self._ends["rows"].tobytes(),
        }
        metadata = {"format": FORMAT, **metadata, "digest": "0" * 64}
        if "loss_mask" in self._files:
            parts["loss_mask"] = self._files["loss_mask"]
        if self._source is not None:
            parts["source"] = self._source.tobytes()
            metadata["sources"] = json.dumps(list(self._names))
        if self._order:
            parts["order"] = self._order.tobytes()
        parts = dict(sorted(parts.items(), key=lambda item: -_WIDTHS[_TYPES[item[0]]]))  # aligned, as readers like it
        header: dict[str, Any] = {"__metadata__": metadata}
        at = 0
        for name, part in parts.items():
            size = len(part) if isinstance(part, bytes) else part.tell()
            shape = [size // _WIDTHS[_TYPES[name]]]
            header[name] = {"dtype": _TYPES[name], "shape": shape, "data_offsets": [at, at + size]}
            at += size
        with replacing(self._path) as neighbour, neighbour.open("wb") as target:
            target.write(_header(header))
            for part in parts.values():
                if isinstance(part, bytes):
                    target.write(part)
                else:
                    part.seek(0)
                    shutil.copyfileobj(part, target, _COPIED)
            target.flush()
            metadata["digest"] = data_digest(neighbour)
            target.seek(0)
            target.write(_header(header))


def _header(header: dict[str, Any]) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def data_digest(path: Path) -> str:
    """The hash of a file's data, behind its header: SHA-256 of the SHA-256 of its pieces. Raises OSError."""
    with path.open("rb") as file, ThreadPoolExecutor(min(_HASHING, os.cpu_count() or 1)) as pool:
        start, size = 8 + int.from_bytes(file.read(8), "little"), os.fstat(file.fileno()).st_size
        pieces = range(start, size, _COPIED)
        digests = pool.map(lambda at: hashlib.sha256(os.pread(file.fileno(), _COPIED, at)).digest(), pieces)
        return hashlib.sha256(b"".join(digests)).hexdigest()


_HASHING = 8
"""Threads at most."""
_WIDTHS = {"I32": 4, "I64": 8, "F64": 8, "U8": 1, "U16": 2}
_COPIED = 4 * 1024 * 1024
_EARLY_DIGEST = 16
"""Hexadecimal digits of the hash of early rows."""


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
            self._source = self._file.get_tensor("source") if "source" in names else None
            self._order = self._file.get_tensor("order") if "order" in names else None
        except (OSError, SafetensorError) as error:
            raise PromptFileError(f"prepared data {path} cannot be read: {error}") from None
        self._check_places()
        self.early, self.early_read, self.early_digest, self.early_places = self._read_early()
        """How many rows, the first ones, were prepared before all others; how many of each part of the data were read
        for them; a hash of what they are, and one of where in the data they stand. 0 and empty: none were."""

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
        if self._order is not None and len(self._order) != len(ends):
            raise PromptFileError(f"{self._path} is damaged: it has not one number of order for each row")

    def __len__(self) -> int:
        return len(self._row_ends)

    @property
    def grown(self) -> list[int]:
        """Rows of earlier files of the run that this one begins with, each count more than the one before."""
        try:
            counts = [int(count) for count in json.loads(self.metadata.get("grown", "[]"))]
        except (ValueError, TypeError):
            counts = [0]
        if any(a >= b for a, b in pairwise([0, *counts, len(self)])) and counts:
            raise PromptFileError(f"{self._path} is damaged: it does not say which rows came later")
        return counts

    def _read_early(self) -> tuple[int, dict[str, int], str, str]:
        try:
            early = json.loads(self.metadata.get("early", '{"rows": 0, "read": {}, "digest": "", "places": ""}'))
            rows, read = int(early["rows"]), {str(name): int(count) for name, count in early["read"].items()}
            digest, places = str(early["digest"]), str(early["places"])
        except (ValueError, TypeError, KeyError, AttributeError):
            rows, read, digest, places = -1, {}, "", ""
        if not 0 <= rows <= len(self) or (self.unfinished and rows != len(self)):
            raise PromptFileError(f"{self._path} is damaged: it does not say which rows were prepared first")
        return rows, read, digest, places

    @property
    def unfinished(self) -> bool:
        """Whether all other rows follow, in another file of this name."""
        return UNFINISHED in self.metadata

    @property
    def digest(self) -> str:
        """The hash of its data, as it was written; empty: an earlier version wrote the file."""
        return self.metadata.get("digest", "")

    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each row, [n]."""
        lengths: npt.NDArray[np.int64] = np.diff(self._offsets)
        return lengths

    def order(self) -> npt.NDArray[np.float64]:
        """The number of each row by which they are ordered, [n]. Raises `PromptFileError` where they have none."""
        if self._order is None:
            raise PromptFileError(
                f"{self._path} was prepared without train.train_policy.curriculum.column_name: prepare the data again"
            )
        return self._order  # type: ignore[no-any-return]

    def rows_by_source(self) -> dict[str, npt.NDArray[np.int64]]:
        """The rows of each source, in their order; empty: none has a share. Raises `PromptFileError`."""
        if self._source is None:
            return {}
        try:
            names = json.loads(self.metadata["sources"])
            by_source = {str(name): np.flatnonzero(self._source == number) for number, name in enumerate(names)}
        except (KeyError, ValueError, TypeError):
            raise PromptFileError(f"{self._path} is damaged: it does not name the sources of its rows") from None
        if sum(map(len, by_source.values())) != len(self):
            raise PromptFileError(f"{self._path} is damaged: not every row is of a source that it names")
        return by_source

    def sources(
        self, shares: Mapping[str, float], stages: Sequence[Mapping[str, float]] = ()
    ) -> dict[Source, npt.NDArray[np.int64]]:
        """The sources that have these shares, in their order, with their rows. Raises `PromptFileError`.

        stages: shares of each later stage; a source that is not in one has none.
        """
        by_source = self.rows_by_source() if shares else {}
        if by_source.keys() != shares.keys():
            raise PromptFileError(
                f"{self._path} has rows of {', '.join(by_source) or 'no source'}, and the job has shares of "
                f"{', '.join(shares)}: prepare the data again"
            )
        return {
            Source(
                name,
                len(by_source[name]),
                share,
                tuple(stage.get(name, 0.0) for stage in stages),
                int((by_source[name] < self.early).sum()),
            ): by_source[name]
            for name, share in shares.items()
        }

    def token_ids(self, i: int) -> npt.NDArray[np.int32]:
        return self._token_ids[int(self._offsets[i]) : int(self._offsets[i + 1])]  # type: ignore[no-any-return]

    def loss_mask(self, i: int) -> npt.NDArray[np.uint8]:
        """1 on tokens to learn. Raises `PromptFileError` if the file was not prepared for SFT."""
        if self._loss_mask is None:
            raise PromptFileError("this data has no loss mask: it was prepared for prompts, not for SFT")
        return self._loss_mask[int(self._offsets[i]) : int(self._offsets[i + 1])]  # type: ignore[no-any-return]

    def row_text(self, i: int) -> bytes:
        """The JSON of a row."""
        start = int(self._row_ends[i - 1]) if i else 0
        return self._rows[start : int(self._row_ends[i])].tobytes()  # type: ignore[no-any-return]

    def row(self, i: int) -> dict[str, Any]:
        try:
            row = json.loads(self.row_text(i))
        except (ValueError, RecursionError) as error:
            raise PromptFileError(f"{self._path}: row {i} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise PromptFileError(f"{self._path}: row {i} is not a JSON object")
        return row
