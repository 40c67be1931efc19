"""Bringing a host copy to a publication.

    plan ─▶ fetch and prove every piece ─▶ write over, hash ─▶ state
      ▲            │ broken                    │ spoiled
      └────────────┴───────────────────────────┘ plan again without it

Invariant: the state names a publication only when every tensor has the hash of its manifest and all of them together
the content hash of the publication. Deltas overwrite, so a change that was torn by the death of its process is
repeated, from the same base and by the same deltas; whatever else is found wrong is replaced by a full form.

Of the deltas that were fetched those of the last advance stay, and older ones up to `KEPT_SHARE` of the weights'
bytes: replicas that lag by so much still change in place, all others load the whole copy, which costs no transfer.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from secrets import token_hex

from schema.wire.weights import MAX_CHAIN, ChainLink, Piece, Publication, WeightManifest
from weight_sync.delta.delta import apply_deltas, wrong_tensors
from weight_sync.download_plan import DownloadPlan, DownloadStep, cheapest, links_of
from weight_sync.errors import NotReadableError, StoppedError, StoreError, WeightError
from weight_sync.host.files import (
    ADVANCING,
    CONTENT,
    FETCHED,
    STATE,
    Advancing,
    CacheError,
    CopyState,
    WritableTensors,
    bytes_of,
    map_tensors,
    read_advancing,
    read_state,
    write_model,
)
from weight_sync.host.locks import LockTimeoutError, locked
from weight_sync.host.receive import Receiver
from weight_sync.layout import content_hash
from weight_sync.manifest import Opened, piece_of
from weight_sync.publishing.writer import after, changed_elements
from weight_sync.stores import ReadableStore, split_key

log = logging.getLogger(__name__)

KEPT_SHARE = 0.25
THREADS = max(1, min(8, os.cpu_count() or 1))
"""They write and hash, which memory bounds."""


class CacheFullError(CacheError):
    """The host copy finds no room; the message says how much is missing where, and what to do."""


class _BrokenError(WeightError):
    """A piece cannot be used; nothing of the copy was changed for it."""


class _SpoiledError(WeightError):
    """The data files are not what they must be: their content is unknown from here on."""


class Advance:
    """One advance, by the one process of the host that holds the lock for it. `seconds` tells its stages apart.

    directory: of the copy. store: where publications lie. patience: seconds for each bad file. writable: this
    process's mapping of the data files. lock_timeout: seconds to wait for readers of the copy. stop: set from another
    thread, ends it."""

    def __init__(
        self,
        directory: Path,
        store: ReadableStore,
        writable: WritableTensors,
        *,
        patience: float,
        lock_timeout: float,
        stop: threading.Event,
    ) -> None:
        self._directory, self._lock_timeout, self._stop = directory, lock_timeout, stop
        self._writable = writable
        self._receiver = Receiver(store, directory / FETCHED, patience, stop)
        self._seconds = {"verify": 0.0, "advance": 0.0}
        self._broken: set[str] = set()
        self._tried: list[str] = []
        self._spoiled = False
        self.density: float | None = None
        """Elements that deltas gave anew, of all; None where no delta was applied."""

    @property
    def n_bytes(self) -> int:
        """Fetched, or read where they lie."""
        return self._receiver.n_bytes

    @property
    def seconds(self) -> dict[str, float]:
        """ "fetch", "verify", "advance": writing over the copy, and hashing the result."""
        fetched = self._receiver.seconds
        return {**fetched, **self._seconds, "verify": fetched["verify"] + self._seconds["verify"]}

    @property
    def root(self) -> Path:
        """Directory of the local store in which deltas lie."""
        return self._receiver.root

    def to(self, publication: Publication) -> CopyState:
        """The copy's state when it is there, or further.

        Raises `CacheError`: no room, or no place. `StoreError`, `StoppedError`, `LockTimeoutError`: as they say;
        `WeightError`: no way leads to it; the message says what was tried."""
        try:
            return self._to(publication)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self._no_room(str(error)) from error
            raise CacheError(f"the host copy of the weights cannot be kept in {self._directory}: {error}") from error

    def _to(self, publication: Publication) -> CopyState:
        state, torn = self._found()
        newer: list[Publication] = []
        if state is not None and torn is not None:
            # The target of the interrupted advance, and the publication that the state records.
            held = [torn.publication, state.publication]
            newer = [candidate for candidate in held if candidate is not None and candidate.id > publication.id]
        for candidate in newer:
            try:
                return self._bring(candidate, state, torn)
            except (StoppedError, StoreError, LockTimeoutError, CacheError):
                raise
            except WeightError as error:
                log.warning(
                    "the copy does not come to publication %d, looking for an older one: %s", candidate.id, error
                )
                state, torn = self._found()
        return self._bring(publication, state, torn)

    def _found(self) -> tuple[CopyState | None, Advancing | None]:
        """Return what the copy holds, and what was begun on top of it and not finished; remove all else."""
        state = self._there(read_state(self._directory))
        torn = None if state is None else read_advancing(self._directory, state)
        self._writable.keep_only(state)
        self._sweep(state, () if torn is None else torn.uris)
        return state, torn

    def _bring(self, publication: Publication, state: CopyState | None, torn: Advancing | None) -> CopyState:
        """Do as `to`, from what was found. torn: what the plan must repeat, unless it replaces everything."""
        if state is not None and torn is None:
            if state.proven and _is_there(state.publication, publication):
                return state
            if state.content_hash == publication.content_hash:
                state = self._held(state, publication)
                if state is not None:
                    return state
        manifest = self._receiver.manifest(piece_of(publication))
        _check_promise(publication, manifest)
        links = links_of(manifest, piece_of(publication))
        while True:
            plan = self._plan(publication, links, state, torn)
            try:
                return self._go(publication, links, plan, state)
            except _BrokenError:
                self._sweep(state, () if torn is None else torn.uris)
            except _SpoiledError as error:
                self._discard(plan, error)
                state = torn = None

    def _there(self, state: CopyState | None) -> CopyState | None:
        """The state, unless data files of it were removed: then there is none, and the copy is made anew."""
        try:
            if state is not None:
                self._writable.check(state)
            return state
        except NotReadableError as error:
            self._forget(str(error))
            return None

    def _held(self, state: CopyState, publication: Publication) -> CopyState | None:
        """The state under a new publication of the same content; None when its bytes are not what it says."""
        if not state.proven:
            began = time.monotonic()
            try:
                data = map_tensors(self._directory, state, writable=False)
                with ThreadPoolExecutor(THREADS) as pool:
                    wrong = wrong_tensors(data, state.tensors, pool)
            except NotReadableError as error:
                wrong = [str(error)]
            self._seconds["verify"] += time.monotonic() - began
            if wrong:
                log.warning("the copy that an earlier process left is damaged: %s", wrong[0])
                return None
        done = state.model_copy(update={"publication": publication, "proven": True})
        with self._changing():
            write_model(self._directory / STATE, done)
        return done

    def _plan(
        self, publication: Publication, links: list[ChainLink], state: CopyState | None, torn: Advancing | None
    ) -> DownloadPlan:
        plan = cheapest(links, None if state is None else state.content_hash, self._broken)
        if torn is not None and plan is not None and not _repeats(plan, torn):
            plan = cheapest(links, None, self._broken)
        if plan is None:
            tried = "; ".join(self._tried) or "its chain neither meets what is here nor names a full form"
            raise WeightError(
                f"no way leads to publication {publication.id} (version {publication.version}): {tried}"
            )
        return plan

    def _go(
        self, publication: Publication, links: list[ChainLink], plan: DownloadPlan, state: CopyState | None
    ) -> CopyState:
        """Fetch everything, then change the copy. Raises `_BrokenError` before, `_SpoiledError` after it began."""
        steps = [step for step in plan.steps if step.kind == "delta"]
        deltas = [self._delta(step) for step in steps]
        fresh = len(steps) < len(plan.steps)
        if fresh:
            state = self._full(plan.steps[0])
        assert state is not None, "where nothing is held a plan begins with a full form"
        done = self._after(publication, links, state, steps, deltas)
        began = time.monotonic()
        if fresh:
            self._write_over(state, done, deltas)
            with self._changing():
                self._say(done)
        else:
            with self._changing():
                if deltas:
                    self._begin(publication, state, steps)
                self._write_over(state, done, deltas)
                self._say(done)
        self._seconds["advance"] += time.monotonic() - began
        if deltas:
            elements = sum(math.prod(entry.shape) for entry in done.tensors.values())
            changed = sum(changed_elements(delta.manifest.tensors.values()) for delta in deltas)
            self.density = changed / max(elements, 1)
        self._sweep(done)
        return done

    # ---- pieces -------------------------------------------------------------------------------------------

    def _delta(self, step: DownloadStep) -> Opened:
        with self._breaking(step):
            opened = self._receiver.delta(step.piece)
            if opened.manifest.content_hash != step.content_hash:
                raise WeightError(f"{step.piece.uri} leads to other weights than its chain says")
            return opened

    def _full(self, step: DownloadStep) -> CopyState:
        """A full form in a folder of its own, not yet in use."""
        free = shutil.disk_usage(self._directory).free
        if free < step.piece.n_bytes:
            raise self._no_room(f"{step.piece.n_bytes} bytes are needed, {free} are free")
        folder = f"w-{token_hex(8)}"
        with self._breaking(step):
            manifest = self._receiver.full(step.piece, self._directory / folder)
            if manifest.kind != "full" or manifest.content_hash != step.content_hash:
                raise WeightError(f"{step.piece.uri} holds other weights than its chain says")
            return CopyState(
                folder=folder,
                content_hash=manifest.content_hash,
                tensors=manifest.tensors,
                proven=True,
                publication=None,
            )

    def _after(
        self,
        publication: Publication,
        links: list[ChainLink],
        state: CopyState,
        steps: Sequence[DownloadStep],
        deltas: Sequence[Opened],
    ) -> CopyState:
        """The state after the deltas, out of manifests alone: it is the publication's before a byte is changed."""
        tensors, content = state.tensors, state.content_hash
        for step, delta in zip(steps, deltas, strict=True):
            with self._breaking(step):
                if delta.manifest.base != content:
                    raise WeightError(f"{step.piece.uri} applies to {delta.manifest.base}, not to {content}")
                tensors, content = after(tensors, delta.manifest.tensors), delta.manifest.content_hash
                if content_hash(tensors) != content:
                    raise WeightError(f"{step.piece.uri}: its content hash does not follow from its tensors")
        # Entries say where the bytes lie in the copy, not where the delta had them.
        changed = {name for delta in deltas for name in delta.manifest.tensors}
        entries = dict(tensors)
        for name in changed:
            location = {"file": state.tensors[name].file, "changed": None}
            entries[name] = tensors[name].model_copy(update=location)
        pieces = [step.piece for step in steps]
        # Those of this very advance stay in any case: this replica's engine is about to read them.
        most_bytes = max(int(KEPT_SHARE * bytes_of(state)), sum(piece.n_bytes for piece in pieces))
        return CopyState(
            folder=state.folder,
            content_hash=content,
            tensors=entries,
            proven=True,
            publication=publication,
            checked=_checked(state, links, pieces, content),
            kept=_newest([*state.kept, *pieces], most_bytes),
        )

    @contextmanager
    def _breaking(self, step: DownloadStep) -> Iterator[None]:
        """Note what goes wrong with this step's piece, so that the way is planned anew without it."""
        try:
            yield
        except (StoppedError, StoreError, LockTimeoutError, CacheError):
            raise
        except WeightError as error:
            log.warning("looking for a way without %s: %s", step.piece.uri, error)
            self._broken.add(step.piece.uri)
            self._tried.append(f"{step.piece.uri}: {error}")
            raise _BrokenError(str(error)) from error

    # ---- files --------------------------------------------------------------------------------------------

    def _changing(self) -> AbstractContextManager[None]:
        return locked(self._directory / CONTENT, exclusive=True, timeout=self._lock_timeout, stop=self._stop)

    def _begin(self, publication: Publication, state: CopyState, steps: Sequence[DownloadStep]) -> None:
        begun = Advancing(
            base=state.content_hash,
            target=steps[-1].content_hash,
            uris=[step.piece.uri for step in steps],
            publication=publication,
        )
        write_model(self._directory / ADVANCING, begun)

    def _say(self, done: CopyState) -> None:
        write_model(self._directory / STATE, done)
        (self._directory / ADVANCING).unlink(missing_ok=True)

    def _write_over(self, state: CopyState, done: CopyState, deltas: Sequence[Opened]) -> None:
        """Bring the data files of `state` to `done`, and prove it by the hashes."""
        try:
            data = self._writable.of(state)
        except NotReadableError as error:
            raise _SpoiledError(str(error)) from error
        with ThreadPoolExecutor(THREADS) as pool:
            changed = apply_deltas(data, done.tensors, deltas, pool)
            wrong = [name for name, value in changed.items() if value != done.tensors[name].hash]
            if not state.proven:
                rest = {name: entry for name, entry in done.tensors.items() if name not in changed}
                wrong += wrong_tensors(data, rest, pool)
        if wrong:
            raise _SpoiledError(f"tensor {sorted(wrong)[0]!r} of the host copy did not get its hash")

    def _discard(self, plan: DownloadPlan, error: _SpoiledError) -> None:
        """The content is unknown: throw it away. Where a fresh copy was spoiled, the deltas are not believed, and
        without any the full form is not tried again."""
        self._forget(str(error))
        self._tried.append(str(error))
        if self._spoiled or plan.steps[0].kind == "full":
            deltas = [step.piece.uri for step in plan.steps if step.kind == "delta"]
            self._broken |= set(deltas or [plan.steps[0].piece.uri])
        self._spoiled = True
        self._sweep(None)

    def _forget(self, why: str) -> None:
        log.warning("the host copy is thrown away: %s", why)
        self._writable.forget()
        with self._changing():
            (self._directory / STATE).unlink(missing_ok=True)
            (self._directory / ADVANCING).unlink(missing_ok=True)

    def _sweep(self, state: CopyState | None, uris: Collection[str] = ()) -> None:
        """Remove what neither the state nor `uris` name: older data files, deltas, what the dead left."""
        kept = {split_key(uri)[0] for uri in uris}
        if state is not None:
            kept |= {split_key(piece.uri)[0] for piece in state.kept}
        for path in self._directory.iterdir():
            if path.name.startswith("w-") and (state is None or path.name != state.folder):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.startswith("."):
                path.unlink(missing_ok=True)
        fetched = self._directory / FETCHED
        for path in fetched.iterdir() if fetched.is_dir() else ():
            if path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def _no_room(self, why: str) -> CacheFullError:
        return CacheFullError(
            f"not enough room for the host copy of the weights in {self._directory}: {why}. Free some, or set "
            f"weight_sync.host_cache to a directory with room for twice the bytes of the weights"
        )


def _is_there(held: Publication | None, wanted: Publication) -> bool:
    """Whether what is held is a publication, or a newer one. A controller that has lost history may have given an id
    a second time: then the present one counts."""
    if held is None or held.id < wanted.id:
        return False
    return held.id > wanted.id or held.manifest_hash == wanted.manifest_hash


def _repeats(plan: DownloadPlan, torn: Advancing) -> bool:
    """Whether a plan leads to the right bits from a torn copy: it replaces all, or repeats the torn change first."""
    if plan.steps and plan.steps[0].kind == "full":
        return True
    return bool(torn.uris) and [step.piece.uri for step in plan.steps[: len(torn.uris)]] == torn.uris


def _checked(state: CopyState, links: list[ChainLink], pieces: list[Piece], content: str) -> list[ChainLink]:
    """`CopyState.checked` after these deltas. What was not proven before says nothing about them."""
    here = [link.model_copy(update={"delta": None, "full": None}) for link in links]
    if not state.proven:
        return [link for link in here if link.content_hash == content][-1:]
    known = state.checked or [link for link in here if link.content_hash == state.content_hash][-1:]
    applied = [link.model_copy(update={"full": None}) for link in links if link.delta in pieces]
    between = [link.model_copy(update={"content_hash": ""}) for link in applied[:-1]]
    return [*known, *between, *applied[-1:]][-MAX_CHAIN:]


def _newest(pieces: Sequence[Piece], most_bytes: int) -> list[Piece]:
    """The last ones, as long as they have at most so many bytes together."""
    kept: list[Piece] = []
    for piece in reversed(pieces):
        most_bytes -= piece.n_bytes
        if most_bytes < 0:
            break
        kept.append(piece)
    return kept[::-1]


def _check_promise(publication: Publication, manifest: WeightManifest) -> None:
    claims = (manifest.kind, manifest.version, manifest.timeline, manifest.content_hash)
    promise = (publication.kind, publication.version, publication.timeline, publication.content_hash)
    if claims != promise:
        raise WeightError(
            f"{publication.uri} holds {claims}, published was {promise} (kind, version, timeline, content hash)"
        )
