"""Orders of later passes on disk: each decision of `controller.ledger.pass_orders` is a file of the run directory.

A file is written whole, once, and is on the disk before the store hears of the first group of its pass; so a store
that loses history loses no order, and a controller that was relieved meanwhile changes none.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from controller.ledger.pass_orders import PassOrder, at_once
from schema.util.atomic_file import sync
from schema.wire.mixture import Source
from schema.wire.prompts import PromptFileError

DIRECTORY = Path("data", "passes")
_NAME = re.compile(r"source-(\d{1,9})-pass-(\d{1,18})\.safetensors")


def keep(run_dir: Path, order: PassOrder, source: Source) -> PassOrder:
    """Store a decision; answers with the one that counts, which another controller may have made before.

    Raises OSError, `PromptFileError`.
    """
    path = run_dir / DIRECTORY / f"source-{order.source}-pass-{order.data_pass}.safetensors"
    if not path.parent.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        sync(path.parent.parent)
    facts = {"order": json.dumps([source.name, order.solved, order.failed])}
    neighbour = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        neighbour.write_bytes(save({"places": order.places}, facts))
        sync(neighbour)
        if not path.exists():
            _put(neighbour, path)
            sync(path.parent)
    except FileExistsError:
        pass
    finally:
        neighbour.unlink(missing_ok=True)
    return _read(path, order.source, order.data_pass, {order.source: source})


def _put(neighbour: Path, path: Path) -> None:
    """Raises FileExistsError: another one was there first."""
    try:
        os.link(neighbour, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        os.replace(neighbour, path)  # a file system without hard links


def read(run_dir: Path, sources: Sequence[Source]) -> Iterator[PassOrder]:
    """The decisions of a run. Raises `PromptFileError`: a file is damaged, or of other data."""
    for path in sorted((run_dir / DIRECTORY).glob("*.safetensors")):
        if (match := _NAME.fullmatch(path.name)) is not None:
            yield _read(path, int(match[1]), int(match[2]), dict(enumerate(sources)))


def _read(path: Path, source: int, data_pass: int, sources: Mapping[int, Source]) -> PassOrder:
    try:
        with safe_open(path, framework="numpy") as file:
            facts, places = file.metadata() or {}, file.get_tensor("places")
        name, solved, failed = json.loads(facts["order"])
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise PromptFileError(f"the order of a pass, {path}, cannot be read: {error}") from None
    rows = sources[source].rows if source in sources and sources[source].name == name else 0
    fits = places.dtype == np.int32 and places.shape == (rows * at_once(rows),) if rows else False
    if not fits or not 0 <= places.min() <= places.max() < rows:
        raise PromptFileError(
            f"the order of a pass, {path}, is not one of this job's rows: use the data that the run began with, "
            "or another train.output_dir"
        )
    return PassOrder(source, data_pass, places, solved, failed)
