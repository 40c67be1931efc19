"""Which files in the weight store belong to which publication: on disk, for the trainer that comes after this one.

    {"id": 7, "uri": "…/manifest.json"}     it has these files: a delta, or an anchor that was written later
    {"id": 7, "gone": true}                 no longer needed

Lines are only added. Invariant: files of the job that no publication has are removed, now or by the next trainer:
what was begun and never announced, and what could not be removed, or not in time, when it was not needed any more.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

from schema.wire.weights import Publication
from weight_sync import WeightError, collect, remove
from weight_sync.stores import Store

log = logging.getLogger(__name__)

RECORD = "publications.jsonl"


class PublicationRecord:
    """The record of rank 0; safe to use from several threads.

    path: of the record. store: where the files lie. name: of the job's versions there."""

    def __init__(self, path: Path, store: Store, name: str) -> None:
        self._path, self._store, self._name = path, store, name
        self._uris = read_record(path)
        self._unneeded: list[str] = []
        self._lock = threading.Lock()

    @property
    def newest(self) -> int:
        """The highest id of a publication that has or had files; 0: none has."""
        with self._lock:
            return max(self._uris, default=0)

    def tidy(self, newest: Publication | None) -> None:
        """Remove what a trainer that was killed began to publish and never announced.

        newest: what the controller knows. The trainer may have been killed after it knew and before the record did.
        """
        if newest is not None and newest.uri not in self._uris.get(newest.id, []):
            self.remember(newest.id, newest.uri)
        try:
            collect(self._store, [uri for uris in self._uris.values() for uri in uris], name=self._name)
        except (WeightError, OSError) as error:
            log.warning("the weight store %s could not be tidied up: %s", self._store, error)

    def remember(self, publication: int, uri: str) -> None:
        """A publication has these files."""
        with self._lock:
            self._uris.setdefault(publication, []).append(uri)
            self._append({"id": publication, "uri": uri})

    def attach(self, publication: int, uri: str) -> None:
        """A publication has these files as well; if it was removed meanwhile, they go too."""
        with self._lock:
            if self._uris.get(publication):
                self._uris[publication].append(uri)
                self._append({"id": publication, "uri": uri})
            else:
                self._unneeded.append(uri)

    def release(self, publications: Collection[int]) -> None:
        """The files of these publications are no longer needed, as far as they are known."""
        with self._lock:
            for number in publications:
                if self._uris.get(number):
                    self._unneeded += self._uris[number]
                    self._uris[number] = []
                    self._append({"id": number, "gone": True})

    def remove(self) -> None:
        """Remove the files that are not needed; those that cannot be removed stay for the next time."""
        with self._lock:
            unneeded = list(self._unneeded)
        for uri in unneeded:
            try:
                remove(self._store, [uri])
            except (WeightError, OSError) as error:  # wasted space, and no reason to end a run
                log.warning("old weight versions could not be removed from %s: %s", self._store, error)
                return
            with self._lock:
                self._unneeded.remove(uri)

    def _append(self, entry: dict[str, Any]) -> None:
        line = json.dumps(entry) + "\n"
        with self._path.open("a+b") as stream:
            if stream.seek(0, os.SEEK_END):
                stream.seek(-1, os.SEEK_END)
                line = line if stream.read() == b"\n" else "\n" + line  # after a line that was cut off
            stream.write(line.encode())


def read_record(path: Path) -> dict[int, list[str]]:
    """Publication id to URIs, none of those that are gone; as far as the file is readable."""
    if not path.exists():
        return {}
    uris: dict[int, list[str]] = {}
    for line in path.read_text(errors="replace").splitlines():
        try:
            entry = json.loads(line)
            if "uri" in entry:
                uris.setdefault(int(entry["id"]), []).append(str(entry["uri"]))
            elif entry["gone"]:
                uris[int(entry["id"])] = []
        except (ValueError, KeyError, TypeError):  # the last line of a process that was killed
            log.warning("%s: a damaged line is passed over: %r", path, line)
    return uris
