"""Loading a tokenizer that has a `tokenizer.json`, which is compared with what transformers makes of it.

- What is used is the plain file, with what `tokenizer_config.json` sets: special and added tokens, chat template,
  `clean_up_tokenization_spaces`. A special token that the class alone names is kept if the file has it. A class that
  agrees on the probe texts might still differ on others, so it is not used either.
- The tokenizer's own code, or a class that a module of the user registered, may differ on purpose: it is kept.
- `add_bos_token` and `add_eos_token` act, which transformers leaves out where there is a `tokenizer.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenization.loading.comparison import PROBE, Codec, difference
from tokenization.loading.source import (
    SETTINGS,
    TokenizerError,
    TokenizerSource,
    codec_of,
    is_own,
    named_tokens,
    warn,
    warn_of_losses,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ADDED_SAMPLES = 64
"""Added tokens that are compared inside of a text; of all of them, the entries are compared."""


def of_file(source: TokenizerSource, file: Path) -> Any:
    reference = _Reference(file)
    tokenizer = source.plain() if source.is_generic else _compared(source, reference)
    if not is_own(tokenizer):
        reference.learn(tokenizer)
        if why := reference.difference(tokenizer):
            warn(f"{source.name}: {SETTINGS} makes its tokenizer another than {file.name}: {why}")
        if tokenizer.is_fast:
            _add_ends(source, reference, tokenizer)
    for number, token in (source.settings.get("added_tokens_decoder") or {}).items():
        if (has := tokenizer.convert_tokens_to_ids(token["content"])) != int(number):
            warn(f"{source.name}: {SETTINGS} gives {token['content']!r} the id {number}, its tokenizer {has}")
    warn_of_losses(source, tokenizer)
    return tokenizer


def _compared(source: TokenizerSource, reference: _Reference) -> Any:
    """The plain file's, after a warning where the class that transformers chooses differs; of own code, its own."""
    try:
        chosen = source.by_class()
    except Exception as error:  # as in `load`
        if "trust_remote_code" in str(error):
            raise
        kind = source.settings.get("tokenizer_class") or "the class of its model"
        warn(f"{source.name}: {kind} cannot be made of {reference.name} ({error}): the plain file counts")
        return source.plain()
    plain = source.plain(fetched=True)
    reference.learn(plain)
    why = reference.difference(chosen)
    if is_own(chosen):
        if why:
            warn(
                f"{source.name}: its tokenizer's own code, {type(chosen).__name__}, counts, which differs from "
                f"{reference.name}: {why}. Programs that read {reference.name} alone see other tokens"
            )
        return chosen
    if why:
        warn(
            f"{source.name}: its files name the tokenizer class {type(chosen).__name__}, which contradicts "
            f"{reference.name}: {why}. {reference.name} counts here; for programs that load it by its class, "
            f'write "tokenizer_class": "PreTrainedTokenizerFast" into {SETTINGS}'
        )
    for kind, token in named_tokens(chosen):
        if getattr(plain, kind) is None and reference.has(token):
            plain.add_special_tokens({kind: token})
    return plain


class _Reference:
    """The tokenizer in `tokenizer.json`, as the tokenizers library reads it."""

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
        entries = _entries(self._tokenizer.get_added_tokens_decoder())
        for i, token in sorted(plain.added_tokens_decoder.items()):
            if entries.get(i) != repr(token):
                add = self._tokenizer.add_special_tokens if token.special else self._tokenizer.add_tokens
                add([token])
        self._tokenizer.encode_special_tokens = plain.split_special_tokens

    def has(self, token: str) -> bool:
        """Whether the vocabulary has a token."""
        return self._tokenizer.token_to_id(token) is not None

    def ends(self, ids: Mapping[str, int]) -> dict[str, bool]:
        """Return `_ends` of the file."""
        return _ends(self._tokenizer, ids)

    def difference(self, tokenizer: Any) -> str:
        """Return `comparison.difference`; where texts agree, the first added token that differs."""
        codec = codec_of(tokenizer, clean_up_tokenization_spaces=False)
        whole = Codec(
            lambda text: self._tokenizer.encode(text, add_special_tokens=False).ids,
            lambda ids: self._tokenizer.decode(list(ids), skip_special_tokens=False),
        )
        added = self._tokenizer.get_added_tokens_decoder()
        every = max(1, len(added) // ADDED_SAMPLES)
        samples = [f"a {token.content} b{token.content}\n" for token in list(added.values())[::every]]
        if why := difference(codec, whole, [*PROBE.values(), *samples]):
            return why
        entries, own_entries = _entries(added), _entries(tokenizer.added_tokens_decoder)
        for i in entries.keys() - own_entries.keys():
            return f"it lacks the added token {added[i].content!r}"
        for i, entry in own_entries.items():
            if i not in entries:
                return f"it adds a token {tokenizer.convert_ids_to_tokens(i)!r} as {i}"
            if entries[i] != entry:
                return f"the added token {i} is {entry} instead of {entries[i]}"
        return ""


def _entries(added: dict[int, Any]) -> dict[int, str]:
    return {i: repr(token) for i, token in added.items()}


def _add_ends(source: TokenizerSource, reference: _Reference, tokenizer: Any) -> None:
    """Let BOS and EOS stand around a text where `add_bos_token` and `add_eos_token` say so, else as in the file."""
    ids = {kind: getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos")}
    ids = {kind: number for kind, number in ids.items() if number is not None}
    adds, must_add = _ends(tokenizer.backend_tokenizer, ids), reference.ends(ids)
    for kind in ids:
        if isinstance(value := source.settings.get(f"add_{kind}_token"), bool) and value != must_add[kind]:
            must_add[kind] = value
            warn(
                f"{source.name}: add_{kind}_token = {json.dumps(value)} of {SETTINGS} acts, although the "
                f"post-processor of {reference.name} says otherwise, by which transformers alone would go"
            )
    if must_add != adds:
        for kind, is_added in must_add.items():
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
