"""To the Hugging Face hub, through its own client: one commit for each checkpoint's export, on `main`.

The token and the endpoint come from the standard environment (HF_TOKEN, or what `hf auth login` has stored;
HF_ENDPOINT). The client sends large files as blobs by their hash before it commits, and asks which of them are there
already: what was sent before a kill is not sent again. A repository that does not exist is made, private.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

from policy_worker.checkpoints.uploads.upload_record import UploadRecord
from policy_worker.errors import SettingsError, UploadError, UploadStoppedError
from schema.config.secrets import masked
from weight_sync.stores.patience import USUAL, Delays, Patience

log = logging.getLogger(__name__)

EXPORT = "export"
REPO_KEY = "train.ckpt.hf_repo_name"
STALE = ["*.safetensors", "*.safetensors.index.json"]
"""Shards of an earlier commit that this one has no more."""
_TOO_MANY = 429


class HubTarget:
    """One repository of models."""

    name = "hub"

    def __init__(self, repository: str, run: str, stop: threading.Event, delays: Delays = USUAL) -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
        self.repository, self._run = repository, run
        self._api = HfApi(library_name="cosmos-launch")
        self._patience = Patience(_is_passing, self._explain, stop, delays, UploadError, UploadStoppedError)

    def place(self, name: str) -> str:
        """Where a directory of this name goes, for people."""
        return f"{self._api.endpoint}/{self.repository} ({name})"

    def probe(self) -> None:
        """Prove that the token may write there, by making the repository if it does not exist.

        Raises `SettingsError`: naming key and remedy."""
        try:
            self._api.create_repo(self.repository, private=True, exist_ok=True)
            self._api.auth_check(self.repository, write=True)
        except Exception as error:
            raise SettingsError(f'{REPO_KEY} = "{self.repository}": {self._explain(error)}') from error

    def upload(self, path: Path, record: UploadRecord) -> None:
        """Commit the export of a checkpoint, or an exported model itself.

        Raises `UploadError`: it failed for good. `UploadStoppedError`: the process leaves."""
        folder = path / EXPORT if (path / EXPORT).is_dir() else path
        if not (folder / "config.json").exists():
            log.info("%s holds no export: nothing of it goes to the hub", path)
            return
        step = record.progress.step
        message = f"Final model, step {step}" if path.name == "final" else f"Step {step}"

        def commit() -> Any:
            return self._api.upload_folder(
                repo_id=self.repository,
                folder_path=folder,
                commit_message=message,
                commit_description=f"Run {self._run}.",
                delete_patterns=STALE,
            )

        self._patience.run(f"{self.repository}: committing {path.name}", commit)

    def _explain(self, error: Exception) -> str:
        """Describe what went wrong and what to do. Names no credential."""
        from huggingface_hub import errors

        if isinstance(error, errors.LocalTokenNotFoundError):
            return "no token was found: set HF_TOKEN to one that may write"
        if _is_of_the_network(error):
            return f"{self._api.endpoint} does not answer ({type(error).__name__}): check HF_ENDPOINT and the network"
        status = _status(error)
        if status == 401:
            return "the token is missing or not known there: set HF_TOKEN to one that may write"
        if status in (403, 404):
            return f"HF_TOKEN may not write there: take a token of write access, or correct {REPO_KEY}"
        return str(masked(f"{type(error).__name__}: {error}"))


def _status(error: Exception) -> int:
    return int(getattr(getattr(error, "response", None), "status_code", 0) or 0)


def _is_of_the_network(error: Exception) -> bool:
    """The client's HTTP library is its own affair (httpx, and its successor): all name this class alike."""
    return any(kind.__name__ == "TransportError" for kind in type(error).__mro__)


def _is_passing(error: Exception) -> bool:
    status = _status(error)
    if status:
        return status >= 500 or status == _TOO_MANY
    return _is_of_the_network(error) or isinstance(error, RuntimeError | OSError)
