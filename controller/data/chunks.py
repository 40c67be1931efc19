"""Rows of a part, prepared in chunks: by this process, or by several that are ahead of it.

    source ─batches─▶ chunk 0 ─▶ worker 0 ─▶ ┐
                      chunk 1 ─▶ worker 1 ─▶ ├─ in order ─▶ PackedChunk, PackedChunk, …
                      chunk 2 ─▶ worker 0 ─▶ ┘

Workers are forks of this process: they have its source, tokenizer and configuration, and read their own rows. A
worker sends a chunk as safetensors bytes behind their length; it is at most `ahead` chunks before what is taken.
Which worker prepared a chunk changes nothing of it. `PreparedPart` is what is known of all chunks of a part, whose
rows are in the file that is being written.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import struct
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, NoReturn, Self

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load, save

from controller.data.errors import DataError
from controller.data.loss_masks.tokens import Ids
from controller.data.parts import Part
from controller.data.rows import Bound, Prepared, Row, batches, share_of
from schema.util.threads import end_with_parent
from schema.wire.data_report import LONGEST_SAMPLE, NAMED, FileReport, Lengths, Rows
from schema.wire.prompts import PromptWriter

logger = logging.getLogger("controller.data.prepare")  # one name for all of the preparation

Batch = list[tuple[int, Row]]
Prepare = Callable[[Batch], Prepared]
_HEAD = struct.Struct("<Q")
_CHUNK, _FAULT = b"c", b"f"
"""First bytes of a message: the bytes of a chunk, or the text of an error, follow."""


def prepared_chunks(part: Part, prepare: Prepare, size: int, workers: int, ahead: int) -> Iterator[PackedChunk]:
    """All chunks of a part, in the order of its rows. Raises `DataError`.

    size: rows of a chunk. workers: processes that prepare them; 0: this one does.
    """
    if not workers:
        for batch in batches(part.source, part.keep, size):
            yield PackedChunk.of(prepare(batch))
        return
    team: list[_Worker] = []
    try:
        for number in range(workers):
            team.append(_start(part, prepare, size, number, workers, ahead, team))
        number = 0
        while (data := team[number % workers].receive()) is not None:
            yield unpack(data)
            number += 1
    finally:
        for worker in team:
            worker.end()


@dataclass
class _Worker:
    pid: int
    pipe: IO[bytes]

    def receive(self) -> bytes | None:
        """The next chunk; None: there is none. Raises `DataError` where the worker ended before."""
        head = self.pipe.read(_HEAD.size)
        if len(head) == _HEAD.size:
            (length,) = _HEAD.unpack(head)
            if not length:
                return None
            data = self.pipe.read(length)
            if len(data) == length and data[:1] == _FAULT:
                raise DataError(data[1:].decode())
            if len(data) == length:
                return data[1:]
        raise DataError(
            f"a process that prepares rows ended {_ending(os.waitpid(self.pid, 0)[1])}: see its last lines"
        )

    def end(self) -> None:
        self.pipe.close()
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _ending(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"with exit code {code}" if code >= 0 else f"by signal {signal.Signals(-code).name}"


def _start(
    part: Part, prepare: Prepare, size: int, number: int, workers: int, ahead: int, team: Sequence[_Worker]
) -> _Worker:
    reading, writing = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if pid:
        os.close(writing)
        return _Worker(pid, os.fdopen(reading, "rb", buffering=1 << 20))
    os.close(reading)
    for worker in team:
        os.close(worker.pipe.fileno())  # of another worker, which would not see that its reader has gone
    end_with_parent(parent)
    _work(part, prepare, size, number, workers, ahead, writing)


def _work(part: Part, prepare: Prepare, size: int, number: int, workers: int, ahead: int, writing: int) -> NoReturn:
    """Prepare every so many chunks, in a fork of the preparation."""
    code = 1
    try:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each worker is one of several
        ready: queue.Queue[bytes] = queue.Queue(ahead)
        sender = threading.Thread(target=_send, args=(ready, writing), daemon=True)
        sender.start()
        try:
            share = share_of(len(part.source), part.keep, size, number, workers)
            for batch in batches(part.source, share, size, quiet=True):
                ready.put(_CHUNK + pack(PackedChunk.of(prepare(batch))))
        except (DataError, OSError) as error:
            ready.put(_FAULT + str(error).encode(errors="replace"))
        ready.put(b"")
        sender.join()
        code = 0
    except BaseException:
        logger.exception("a process that prepares rows failed")
    finally:
        os._exit(code)


def _send(ready: queue.Queue[bytes], writing: int) -> None:
    with suppress(BrokenPipeError), os.fdopen(writing, "wb", buffering=0) as pipe:
        while data := ready.get():
            pipe.write(_HEAD.pack(len(data)))
            view = memoryview(data)
            while view:
                view = view[pipe.write(view) :]
        pipe.write(_HEAD.pack(0))


@dataclass
class PackedChunk:
    """A prepared chunk as a few arrays, in which the rows stand one after the other.

    token_ids [T], masks [T] or None; texts [R]: JSON of the rows; counts, text_sizes, hashes [n]: tokens, bytes and a
    hash of the tokens of each row; order [n], or [0] where no column orders them. lengths: tokens of the rows as they
    were read. sources: as in `Prepared`.
    """

    report: FileReport
    token_ids: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int64]
    texts: npt.NDArray[np.uint8]
    text_sizes: npt.NDArray[np.int64]
    hashes: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    order: npt.NDArray[np.float64]
    masks: npt.NDArray[np.uint8] | None
    sources: list[str]

    @classmethod
    def of(cls, chunk: Prepared) -> Self:
        texts = [json.dumps(row, ensure_ascii=False, allow_nan=False).encode() for row in chunk.rows]
        return cls(
            chunk.report,
            np.concatenate(chunk.token_ids or [np.zeros(0, np.int32)]),
            np.array([len(ids) for ids in chunk.token_ids], np.int64),
            np.frombuffer(b"".join(texts), np.uint8),
            np.array([len(text) for text in texts], np.int64),
            np.array([hash(ids.tobytes()) for ids in chunk.token_ids], np.int64),
            np.array(chunk.lengths, np.int64),
            np.array(chunk.order, np.float64),
            np.concatenate(chunk.masks) if chunk.masks else None,
            chunk.sources,
        )


_ARRAYS = ("token_ids", "counts", "texts", "text_sizes", "hashes", "lengths", "order")


def pack(chunk: PackedChunk) -> bytes:
    """A chunk as safetensors bytes."""
    tensors = {name: getattr(chunk, name) for name in _ARRAYS}
    if chunk.masks is not None:
        tensors["masks"] = chunk.masks
    data: bytes = save(tensors, {"report": chunk.report.model_dump_json(), "sources": json.dumps(chunk.sources)})
    return data


def unpack(data: bytes) -> PackedChunk:
    """The chunk that `pack` was given."""
    tensors = load(data)
    (length,) = _HEAD.unpack(data[: _HEAD.size])
    metadata = json.loads(data[_HEAD.size : _HEAD.size + length])["__metadata__"]
    report, sources = FileReport.model_validate_json(metadata["report"]), json.loads(metadata["sources"])
    return PackedChunk(
        report, **{name: tensors[name] for name in _ARRAYS}, masks=tensors.get("masks"), sources=sources
    )


class PreparedPart:
    """The rows of a part in a writer.

    beyond: rows with token ids that the model has no embeddings for. domains: the domains of its rows.
    """

    def __init__(self, part: Part, report: FileReport, writer: PromptWriter, vocabulary: int | None) -> None:
        """report: of the part, without rows. vocabulary: ids below it have embeddings; None: not known."""
        self.part, self.report, self._writer = part, report, writer
        self._vocabulary = vocabulary
        self._stretches: list[range] = []
        """The numbers of its rows in the file, between which rows of others may lie."""
        self._lengths, self._hashes = array("q"), array("q")
        self.beyond, self.domains = Rows(), set[str]()

    def add(self, chunk: PackedChunk) -> None:
        """Write the rows of a chunk. Raises OSError, ValueError."""
        self.report.merge(chunk.report)
        self._lengths.frombytes(chunk.lengths.tobytes())
        if not len(chunk.counts):
            return
        first, sources = len(self._writer), chunk.sources or [self.part.label] * len(chunk.counts)
        texts = chunk.texts.data
        self._writer.extend(chunk.token_ids, chunk.counts, texts, chunk.text_sizes, chunk.masks, sources, chunk.order)
        if self._stretches and self._stretches[-1].stop == first:
            first_of_stretch = self._stretches.pop().start
        else:
            first_of_stretch = first
        self._stretches.append(range(first_of_stretch, len(self._writer)))
        self._hashes.frombytes(chunk.hashes.tobytes())
        self.domains.update(sources)
        if self._vocabulary is not None and chunk.token_ids.max() >= self._vocabulary:
            highest = np.maximum.reduceat(chunk.token_ids, np.cumsum(chunk.counts) - chunk.counts)
            for i in np.flatnonzero(highest >= self._vocabulary).tolist():
                self.beyond.add(f"{self._writer.row(first + i)['key']} ({highest[i]})")

    def __len__(self) -> int:
        return len(self._hashes)

    @property
    def hashes(self) -> npt.NDArray[np.int64]:
        """A hash of the tokens of each row, [n]."""
        return np.frombuffer(self._hashes, np.int64) if len(self) else np.zeros(0, np.int64)

    def _place(self, i: int) -> int:
        """Which row of the file the part's row i is."""
        for stretch in self._stretches:
            if i < len(stretch):
                return stretch[i]
            i -= len(stretch)
        raise IndexError(i)

    def note_trained(self, trained: npt.NDArray[np.int64]) -> None:
        """Note the rows whose tokens are among those that are trained on."""
        places = np.flatnonzero(np.isin(self.hashes, trained)).tolist()
        if places:
            keys = [str(self._writer.row(self._place(i))["key"]) for i in places[:NAMED]]
            text = f"{self.report.what}s that are trained on too: their results say little"
            self.report.noted[text] = Rows(count=len(places), first=keys)

    def finish(self, bound: Bound, decode: Callable[[Ids], str]) -> None:
        """Complete the report; decode: tokens as text."""
        report, kept = self.report, len(self)
        report.kept = kept
        if self._lengths:
            lengths = np.frombuffer(self._lengths, np.int64)
            p50, p99, longest = np.percentile(lengths, (50, 99, 100), method="inverted_cdf").tolist()
            report.lengths = Lengths(p50=p50, p99=p99, longest=longest, limit=bound.tokens, reason=bound.reason)
        chosen = sorted({0, kept // 2, kept - 1}) if kept else []
        report.samples = [decode(self._writer.token_ids(self._place(i)))[:LONGEST_SAMPLE] for i in chosen]
