"""Loading a tokenizer: its file is read, and compared with what transformers makes of it.

transformers takes a class by `tokenizer_config.json` or by the model's type, and most of its classes build their own
pre-tokenizer and decoder in place of those of `tokenizer.json`. A model that is labelled with a class of another
family then loses spaces, or gets other ids, without an error. So ids and round trips of the probe texts are compared
with `tokenizers.Tokenizer.from_file`, and where the class differs, a warning says so:

- What is used is the plain file, with what `tokenizer_config.json` sets: special and added tokens, chat template,
  `clean_up_tokenization_spaces`. A special token that the class alone names is kept if the file has it. A class that
  agrees on the probe texts might still differ on others, so it is not used either.
- The tokenizer's own code, or a class that a module of the user registered, may differ on purpose: it is kept.
- `add_bos_token` and `add_eos_token` act, which transformers leaves out where there is a `tokenizer.json`.
- Without a `tokenizer.json` there is nothing to compare with: words, digits and indentation must survive.

What differs is a warning, once in a process.

Imports take 0.7 s where `tokenizer_config.json` names the generic class (torch stays out), about 4 s where another
class is needed.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schema.config.modules import remedy
from tokenization.comparison import NECESSARY, PROBE, Codec, difference, lost

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger(__name__)

FILE, SETTINGS = "tokenizer.json", "tokenizer_config.json"
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
ADDED_SAMPLES = 64
"""Added tokens that are compared inside of a text; of all of them, the entries are compared."""
_warned: set[str] = set()


class TokenizerError(Exception):
    """A tokenizer cannot be loaded, or loses what must not be lost: the reason and the remedy, without its name."""


def load(name: str, revision: str | None = None, *, trust_remote_code: bool = False) -> Any:
    """A tokenizer of transformers whose ids and texts are those of its files.

    Args:
        name: a directory, or a name on the hub, which is read from the cache or downloaded.
        revision: of the hub's repository; None: its default branch.
        trust_remote_code: whether code that comes with the tokenizer may run.

    Raises:
        TokenizerError: transformers is missing, the files are absent, damaged or need code that is not trusted; or
            `tokenizer.json` is absent, and words, digits or indentation do not survive.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise TokenizerError(
            f"transformers is missing ({error}): pip install '.[rollout]' in the checkout"
        ) from error
    try:
        source = _Source.find(name, revision, trust_remote_code)
        return _of_class(source) if source.file is None else _of_file(source, source.file)
    except TokenizerError:
        raise
    except Exception as error:  # the tokenizers library raises no other, and code of others may raise any
        raise TokenizerError(f"{error or type(error).__name__}{remedy(error)}") from error


def write_plain(tokenizer: Any, directory: Path) -> bool:
    """Write a loaded tokenizer so that whoever loads it from there, by whichever class, gets the same ids and texts.

    False, and nothing is written, for a tokenizer whose own code makes its ids: only its files hold that code.

    Raises:
        OSError: the directory cannot be written.
    """
    if _is_own(tokenizer) or not tokenizer.is_fast:
        return False
    directory.mkdir(parents=True, exist_ok=True)
    (directory / FILE).write_text(tokenizer.backend_tokenizer.to_str(), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": bool(tokenizer.clean_up_tokenization_spaces),
        **{name: str(token) for name, token in _special_tokens(tokenizer)},
    }
    (directory / SETTINGS).write_text(json.dumps(settings), encoding="utf-8")
    # vLLM waits seconds for a model's type; of this one, transformers takes the generic class.
    (directory / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    return True


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Special tokens of a loaded tokenizer, added and named ones, with their ids. Texts leave them out."""
    added = {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a tokenizer comes from, and the files that say what it is."""

    name: str
    revision: str | None
    trust_remote_code: bool
    settings: dict[str, Any]
    """Of `tokenizer_config.json`."""
    file: Path | None
    """`tokenizer.json`, or the version of it that transformers reads."""

    @classmethod
    def find(cls, name: str, revision: str | None, trust_remote_code: bool) -> _Source:
        settings, file = _settings(_path(name, revision, SETTINGS)), FILE
        if versions := settings.get("fast_tokenizer_files"):
            from transformers.tokenization_utils_base import get_fast_tokenizer_file

            file = get_fast_tokenizer_file(versions)
        return cls(name, revision, trust_remote_code, settings, _path(name, revision, file))

    @property
    def is_generic(self) -> bool:
        """Whether the plain file is what the settings ask for, so that 3 s of imports can be spared."""
        own_code = self.trust_remote_code and "auto_map" in self.settings
        return self.settings.get("tokenizer_class") in GENERIC_CLASSES and not own_code

    def by_class(self) -> Any:
        """As transformers chooses. mistral-common, which is not in all processes, is left out."""
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
    """What a file of settings says. Raises `TokenizerError`: it is damaged."""
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

    found = cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


# ---- with a tokenizer.json --------------------------------------------------------------------------------


def _of_file(source: _Source, file: Path) -> Any:
    reference = _Reference(file)
    tokenizer = source.plain() if source.is_generic else _compared(source, reference)
    if not _is_own(tokenizer):
        reference.learn(tokenizer)
        if why := reference.difference(tokenizer):
            _warn(f"{source.name}: {SETTINGS} makes its tokenizer another than {file.name}: {why}")
        if tokenizer.is_fast:
            _add_ends(source, reference, tokenizer)
    for number, token in (source.settings.get("added_tokens_decoder") or {}).items():
        if (has := tokenizer.convert_tokens_to_ids(token["content"])) != int(number):
            _warn(
                f"{source.name}: {SETTINGS} gives {token['content']!r} the id {number}, its tokenizer {has}"
            )
    _tell_lost(source, tokenizer)
    return tokenizer


def _compared(source: _Source, reference: _Reference) -> Any:
    """The plain file's, after a warning where the class that transformers chooses differs; of own code, its own."""
    try:
        chosen = source.by_class()
    except Exception as error:  # as in `load`
        if "trust_remote_code" in str(error):
            raise
        kind = source.settings.get("tokenizer_class") or "the class of its model"
        _warn(f"{source.name}: {kind} cannot be made of {reference.name} ({error}): the plain file counts")
        return source.plain()
    plain = source.plain(fetched=True)
    reference.learn(plain)
    why = reference.difference(chosen)
    if _is_own(chosen):
        if why:
            _warn(
                f"{source.name}: its tokenizer's own code, {type(chosen).__name__}, counts, which differs from "
                f"{reference.name}: {why}. Programs that read {reference.name} alone see other tokens"
            )
        return chosen
    if why:
        _warn(
            f"{source.name}: its files name the tokenizer class {type(chosen).__name__}, which contradicts "
            f"{reference.name}: {why}. {reference.name} counts here; for programs that load it by its class, "
            f'write "tokenizer_class": "PreTrainedTokenizerFast" into {SETTINGS}'
        )
    for kind, token in _special_tokens(chosen):
        if getattr(plain, kind) is None and reference.has(token):
            plain.add_special_tokens({kind: token})
    return plain


class _Reference:
    """What `tokenizer.json` says, as the tokenizers library reads it."""

    def __init__(self, file: Path) -> None:
        """Raises `TokenizerError`: the file is damaged."""
        from tokenizers import Tokenizer

        self.name = file.name
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises no other
            raise TokenizerError(f"{file} cannot be read ({error}); download it again") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def learn(self, plain: Any) -> None:
        """The tokens that the settings add to the file's, and whether special ones are read in a text."""
        known = _entries(self._tokenizer.get_added_tokens_decoder())
        for i, token in sorted(plain.added_tokens_decoder.items()):
            if known.get(i) != repr(token):
                add = self._tokenizer.add_special_tokens if token.special else self._tokenizer.add_tokens
                add([token])
        self._tokenizer.encode_special_tokens = plain.split_special_tokens

    def has(self, token: str) -> bool:
        """Whether the vocabulary has a token."""
        return self._tokenizer.token_to_id(token) is not None

    def ends(self, ids: Mapping[str, int]) -> dict[str, bool]:
        """As `_ends`, of the file."""
        return _ends(self._tokenizer, ids)

    def difference(self, tokenizer: Any) -> str:
        """As `comparison.difference`; where texts agree, the first added token that is another."""
        codec = _codec(tokenizer, clean_up_tokenization_spaces=False)
        whole = Codec(
            lambda text: self._tokenizer.encode(text, add_special_tokens=False).ids,
            lambda ids: self._tokenizer.decode(list(ids), skip_special_tokens=False),
        )
        added = self._tokenizer.get_added_tokens_decoder()
        every = max(1, len(added) // ADDED_SAMPLES)
        more = [f"a {token.content} b{token.content}\n" for token in list(added.values())[::every]]
        if why := difference(codec, whole, more):
            return why
        entries, own = _entries(added), _entries(tokenizer.added_tokens_decoder)
        for i in entries.keys() - own.keys():
            return f"it lacks the added token {added[i].content!r}"
        for i, entry in own.items():
            if i not in entries:
                return f"it adds a token {tokenizer.convert_ids_to_tokens(i)!r} as {i}"
            if entries[i] != entry:
                return f"the added token {i} is {entry} instead of {entries[i]}"
        return ""


def _entries(added: dict[int, Any]) -> dict[int, str]:
    return {i: repr(token) for i, token in added.items()}


def _add_ends(source: _Source, reference: _Reference, tokenizer: Any) -> None:
    """Let BOS and EOS stand around a text where `add_bos_token` and `add_eos_token` say so, else as in the file."""
    ids = {kind: getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos")}
    ids = {kind: number for kind, number in ids.items() if number is not None}
    acts, wanted = _ends(tokenizer.backend_tokenizer, ids), reference.ends(ids)
    for kind in ids:
        if isinstance(value := source.settings.get(f"add_{kind}_token"), bool) and value != wanted[kind]:
            wanted[kind] = value
            _warn(
                f"{source.name}: add_{kind}_token = {json.dumps(value)} of {SETTINGS} acts, although the "
                f"post-processor of {reference.name} says otherwise, by which transformers alone would go"
            )
    if wanted != acts:
        for kind, is_added in wanted.items():
            setattr(tokenizer, f"add_{kind}_token", is_added)


def _ends(backend: Tokenizer, ids: Mapping[str, int]) -> dict[str, bool]:
    """Whether BOS and EOS, of these ids, are put before and behind a text."""
    if not ids:
        return {}
    whole = backend.encode(backend.id_to_token(next(iter(ids.values()))))
    places = {kind: -1 if kind == "eos" else 0 for kind in ids}
    return {
        kind: bool(whole.ids) and bool(whole.special_tokens_mask[at]) and whole.ids[at] == ids[kind]
        for kind, at in places.items()
    }


def _tell_lost(source: _Source, tokenizer: Any) -> None:
    if kinds := lost(_codec(tokenizer, skip_special_tokens=True)):
        _warn(
            f"{source.name}: its tokenizer loses text, and so do prompts and what rewards see: {_named(kinds)}"
        )


# ---- without ----------------------------------------------------------------------------------------------


def _of_class(source: _Source) -> Any:
    """Raises `TokenizerError`: it loses what is necessary."""
    tokenizer = source.by_class()
    kinds = lost(_codec(tokenizer, skip_special_tokens=True))
    if necessary := {kind: back for kind, back in kinds.items() if kind in NECESSARY}:
        raise TokenizerError(
            f"it has no {FILE} to compare it with, and {type(tokenizer).__name__} loses text: {_named(necessary)}; "
            f"convert it to a {FILE}, or name a tokenizer that has one in policy.tokenizer_name_or_path"
        )
    _tell_lost(source, tokenizer)
    return tokenizer


# ---- both -------------------------------------------------------------------------------------------------


def _codec(tokenizer: Any, **decoding: bool) -> Codec:
    return Codec(
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        lambda ids: str(tokenizer.decode(list(ids), **decoding)),
    )


def _is_own(tokenizer: Any) -> bool:
    """Whether its class came with the tokenizer, or from a module of the user."""
    return not type(tokenizer).__module__.startswith("transformers.")


def _special_tokens(tokenizer: Any) -> Iterator[tuple[str, str]]:
    """(name, token) of each named special token that it has."""
    for kind in tokenizer.SPECIAL_TOKENS_ATTRIBUTES:
        if (token := getattr(tokenizer, kind)) is not None:
            yield kind, str(token)


def _named(kinds: dict[str, str]) -> str:
    """What is lost, with one example."""
    kind, back = next(iter(kinds.items()))
    return f"{', '.join(kinds)} ({PROBE[kind]!r} comes back as {back!r})"


def _warn(message: str) -> None:
    """Once in a process: several parts of it may load the same tokenizer."""
    if message not in _warned:
        _warned.add(message)
        log.warning("%s", message)
