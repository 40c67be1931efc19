"""Prepared rows that this replica reads itself (`train.local_dataset`), so that a lease only says which row.

    RegisterReply.rows_files ─open, hash─▶ LeaseRequest.reads ─▶ LeasedGroup.row_index ─fill─▶ tokens and row

A file is read if it lies in the run directory and its data has the hash that the controller names; it is looked at
once. Rows of other files come with the lease: what is trained is the same. Where a job began before all rows were
prepared, a lease names the file with all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from schema.wire.messages import GroupKind, LeasedGroup, LeaseReply, RegisterReply, RowsFile
from schema.wire.prompts import PromptFile, PromptFileError, data_digest

log = logging.getLogger(__name__)


class LocalRows:
    """The files by kind of group. digests: their hashes; empty: rows come with each lease."""

    def __init__(self, files: Mapping[GroupKind, PromptFile]) -> None:
        self._files = dict(files)
        self.digests: dict[GroupKind, str] = {kind: file.digest for kind, file in files.items()}

    @classmethod
    def of(cls, reply: RegisterReply | LeaseReply, run_dir: Path) -> Self:
        """Open what a reply names: all of it or, with a line in the log, nothing. It reads whole files."""
        try:
            files = {kind: _opened(file, run_dir) for kind, file in reply.rows_files.items()}
        except PromptFileError as error:
            log.warning("prepared rows come with each lease: %s", error)
            return cls({})
        if files:
            log.info("prepared rows are read in %s", run_dir / "data")
        return cls(files)

    def fill(self, lease: LeasedGroup) -> LeasedGroup:
        """The lease with its row. Raises `PromptFileError`: it cannot be read; further ones come with the lease."""
        if lease.row_index is None:
            return lease
        try:
            file = self._files[lease.kind]
            tokens, row = file.token_ids(lease.row_index).tolist(), file.row(lease.row_index)
        except (PromptFileError, KeyError, IndexError) as error:
            if self.digests:
                log.warning("prepared rows come with each lease from here on: %s", error)
            self.digests = {}
            raise PromptFileError(str(error)) from None
        return lease.model_copy(update={"prompt_token_ids": tokens, "row": row})


def _opened(named: RowsFile, run_dir: Path) -> PromptFile:
    """Raises `PromptFileError`: it lies elsewhere, cannot be read, or is another file."""
    path = Path(named.path)
    try:
        if not path.resolve(strict=True).is_relative_to(run_dir.resolve()):
            raise PromptFileError(f"{path} does not lie in the run directory {run_dir}")
        if data_digest(path) != named.digest:
            raise PromptFileError(f"{path} on this machine has another hash than the controller's")
        file = PromptFile(path)
    except OSError as error:
        raise PromptFileError(f"{path} cannot be read here: {error.strerror or error}") from None
    if file.digest != named.digest:
        raise PromptFileError(f"{path} on this machine is not the controller's file")
    return file
