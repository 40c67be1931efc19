"""Where a tokenizer comes from, and what all ways to load one share."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenization.loading.comparison import PROBE, Codec, lost

log = logging.getLogger(__name__)

FILE, SETTINGS = "tokenizer.json", "tokenizer_config.json"
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_warned: set[str] = set()


class TokenizerError(Exception):
    """A tokenizer cannot be loaded, or loses what must not be lost: the reason and the remedy, without its name."""


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """Where a tokenizer comes from, and the files that say what it is."""

    name: str
    revision: str | None
    trust_remote_code: bool
    settings: dict[str, Any]
    """The settings in `tokenizer_config.json`."""
    file: Path | None
    """`tokenizer.json`, or the version of it that transformers reads."""

    @classmethod
    def find(cls, name: str, revision: str | None, trust_remote_code: bool) -> TokenizerSource:
        settings, file = _settings(_path(name, revision, SETTINGS)), FILE
        if versions := settings.get("fast_tokenizer_files"):
            from transformers.tokenization_utils_base import get_fast_tokenizer_file

            file = get_fast_tokenizer_file(versions)
        return cls(name, revision, trust_remote_code, settings, _path(name, revision, file))

    def path_of(self, file: str) -> Path | None:
        """One of its files; None: it has none of this name. Raises `OSError`: out of reach."""
        return _path(self.name, self.revision, file)

    @property
    def is_generic(self) -> bool:
        """Whether the plain file is what the settings ask for, so that 3 s of imports can be spared."""
        own_code = self.trust_remote_code and "auto_map" in self.settings
        return self.settings.get("tokenizer_class") in GENERIC_CLASSES and not own_code

    def by_class(self) -> Any:
        """Load by the class that transformers chooses. mistral-common, which is not in all processes, is left out."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(
            self.name, revision=self.revision, trust_remote_code=self.trust_remote_code, mistral_format=False
        )

    def plain(self, *, fetched: bool = False) -> Any:
        """The file as it is, with what the settings add to it. fetched: `by_class` has downloaded its other files."""
        from transformers import PreTrainedTokenizerFast

        if fetched and self.file is not None:
            return PreTrainedTokenizerFast.from_pretrained(str(self.file.parent))
        return PreTrainedTokenizerFast.from_pretrained(self.name, revision=self.revision)


def _settings(path: Path | None) -> dict[str, Any]:
    """Read a file of settings. Raises `TokenizerError`: it is damaged."""
    if path is None:
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not JSON ({error}); download it again") from error
    if not isinstance(settings, dict):
        raise TokenizerError(f"{path} has no JSON object in it; download it again")
    return settings


def _path(name: str, revision: str | None, file: str) -> Path | None:
    """A file of a directory or of a hub's repository; None: it has none. Raises `OSError`: out of reach."""
    if (directory := Path(name)).is_dir():
        return directory / file if (directory / file).is_file() else None
    from transformers.utils import cached_file

    path = cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=False)
    return None if path is None else Path(path)


def codec_of(tokenizer: Any, **decoding: bool) -> Codec:
    return Codec(
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        lambda ids: str(tokenizer.decode(list(ids), **decoding)),
    )


def is_own(tokenizer: Any) -> bool:
    """Whether its class came with the tokenizer, or from a module of the user."""
    return not type(tokenizer).__module__.startswith("transformers.")


def named_tokens(tokenizer: Any) -> Iterator[tuple[str, str]]:
    """(name, token) of each named special token that it has."""
    for kind in tokenizer.SPECIAL_TOKENS_ATTRIBUTES:
        if (token := getattr(tokenizer, kind)) is not None:
            yield kind, str(token)


def named(kinds: dict[str, str]) -> str:
    """Describe the losses, with one example."""
    kind, back = next(iter(kinds.items()))
    return f"{', '.join(kinds)} ({PROBE[kind]!r} comes back as {back!r})"


def warn_of_losses(source: TokenizerSource, tokenizer: Any) -> None:
    if kinds := lost(codec_of(tokenizer, skip_special_tokens=True)):
        warn(f"{source.name}: its tokenizer loses text, and so do prompts and what rewards see: {named(kinds)}")


def warn(message: str) -> None:
    """Once in a process: several parts of it may load the same tokenizer."""
    if message not in _warned:
        _warned.add(message)
        log.warning("%s", message)
