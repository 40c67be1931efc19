"""The tokens of a tokenizer, from its files, without loading it.

difference(vocabulary_of(one), vocabulary_of(other))       "" where two number the same tokens alike, or what differs
numbered(name, revision)                                   every token with its id, added and named ones included
stop_tokens(strings, ids of special tokens)                stop strings that are special tokens
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from schema.config.model_facts import FindFile, local_file
from schema.config.paths import NotAFileError, is_file, read_regular

_MAX_BYTES = 256 * 1024 * 1024


def vocabulary_of(name: str, revision: str | None, find: FindFile = local_file) -> dict[str, int] | None:
    """Token to id of a tokenizer by its directory or hub name; None where it is not on this machine, or is of
    another kind than `tokenizer.json`."""
    vocabulary = _tokenizer_json(find(name, revision, "tokenizer.json"))
    return None if vocabulary is None else dict(vocabulary.ids)


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of a tokenizer. ids: by token. special: those that text never becomes unless it spells them out.

    end: the token that ends a text; None where the files name none. Its class may still have one.
    """

    ids: Mapping[str, int]
    special: frozenset[str] = frozenset()
    end: str | None = None


def numbered(name: str, revision: str | None, find: FindFile = local_file) -> Vocabulary | None:
    """Return the ids that a loaded tokenizer assigns, by its directory or hub name.

    Of its vocabulary, tokens that its settings add, and named special tokens that neither has: those get the next
    ids. None where it is not on this machine, or its vocabulary is in none of tokenizer.json, vocab.json, vocab.txt.
    """
    whole = _tokenizer_json(find(name, revision, "tokenizer.json"))
    settings = _json_object(find(name, revision, "tokenizer_config.json"))
    base = whole or _plain(find(name, revision, "vocab.json"), find(name, revision, "vocab.txt"))
    if base is None:
        return None
    special, named, further = set(base.special), dict(settings), list[str]()
    added = settings.get("added_tokens_decoder")
    if isinstance(added, dict):
        for token in (added[number] for number in sorted(added, key=lambda number: (len(number), number))):
            further += _contents(token)
            special.update(_contents(token) if isinstance(token, dict) and token.get("special") else ())
    else:  # older forms
        named |= _json_object(find(name, revision, "special_tokens_map.json"))
        further += _json_object(find(name, revision, "added_tokens.json"))
    special.update(_named(named))
    ids, last = dict(base.ids), max(base.ids.values(), default=-1)
    for token in dict.fromkeys((*further, *_named(named))):
        if token not in ids:  # whatever number the settings give it
            last += 1
            ids[token] = last
    return Vocabulary(ids, frozenset(special), next(_contents(named.get("eos_token")), None))


def _named(settings: Mapping[str, Any]) -> Iterator[str]:
    """Special tokens that a tokenizer's settings name: `eos_token`, `image_token`, lists of further ones."""
    for key, value in settings.items():
        if key.endswith("_token") or key in ("additional_special_tokens", "extra_special_tokens"):
            yield from _contents(value)


def _contents(value: Any) -> Iterator[str]:
    """The texts of one token, of a list, or of a table of them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping) and isinstance(value.get("content"), str):
        yield value["content"]
    elif isinstance(value, list | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            if isinstance(item, str | Mapping):
                yield from _contents(item)


def _tokenizer_json(path: Path | None) -> Vocabulary | None:
    try:
        if path is None or not is_file(path):
            return None
        facts = path.stat()
        return _parsed(path, facts.st_mtime_ns, facts.st_size)
    except (OSError, NotAFileError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # loading it reports what is wrong


@lru_cache(maxsize=4)  # each of several rules reads it, which takes a good part of a second
def _parsed(path: Path, changed: int, size: int) -> Vocabulary:
    data = json.loads(read_regular(path, _MAX_BYTES))
    added = data.get("added_tokens") or ()
    ids = _listed(data["model"]["vocab"]) | {str(token["content"]): int(token["id"]) for token in added}
    return Vocabulary(ids, frozenset(str(token["content"]) for token in added if token.get("special")))


def _plain(table: Path | None, lines: Path | None) -> Vocabulary | None:
    """Read a vocab.json, a table of ids, or else a vocab.txt with a token on each line."""
    ids = {token: number for token, number in _json_object(table).items() if isinstance(number, int)}
    if not ids and lines is not None:
        try:
            text = read_regular(lines, _MAX_BYTES).decode(errors="replace")
        except (OSError, NotAFileError):
            return None
        ids = {token: number for number, token in enumerate(text.rstrip("\n").split("\n"))}
    return Vocabulary(ids) if ids else None


def _json_object(path: Path | None) -> dict[str, Any]:
    """The object in a file; {} where there is none."""
    try:
        data = {} if path is None or not is_file(path) else json.loads(read_regular(path, _MAX_BYTES))
    except (OSError, NotAFileError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def stop_tokens(strings: Iterable[str], special: Mapping[str, int]) -> dict[int, str]:
    """The stop strings that are special tokens, by id: an answer ends at the token, since its text lacks it."""
    return {special[string]: string for string in strings if string in special}


def never_found(strings: Iterable[str], special: Collection[str]) -> dict[str, str]:
    """The stop strings that no text of an answer can contain, each with the special token in it."""
    texts = [string for string in strings if string not in special]
    return {string: token for string in texts for token in special if token and token in string}


def hidden_tags(special: Collection[str]) -> list[str]:
    """Names of tags, `think` of `<think>` and `</think>`, of which both ends are special tokens: no text has them."""
    names = (token[1:-1] for token in special if token.startswith("<") and token.endswith(">"))
    return sorted(name for name in names if len(name) > 1 and name.isidentifier() and f"</{name}>" in special)


def shares(strings: Iterable[str], special: Collection[str]) -> dict[str, str]:
    """The stop strings that share their begin or end with a special token, or lie in one: each with such a token.

    Text has them only where other tokens spell them out. Words, and single characters, are left out.
    """
    overlaps = {}
    for string in strings:
        tokens = (
            ()
            if string in special or never_found([string], special)
            else sorted(special, key=lambda token: (len(token), token))
        )
        token = next((token for token in tokens if _shares(string, token)), None)
        if token is not None:
            overlaps[string] = token
    return overlaps


def _shares(string: str, token: str) -> bool:
    parts = [string] if string in token else []
    for size in range(2, min(len(string), len(token))):
        parts += [string[-size:]] if string[-size:] == token[:size] else []
        parts += [string[:size]] if string[:size] == token[-size:] else []
    return any(len(part) > 1 and not part.strip().isalnum() and part.strip() for part in parts)


def _listed(vocabulary: Any) -> dict[str, int]:
    """Read a table token = id, or a list of [token, score] in the order of ids."""
    if isinstance(vocabulary, Mapping):
        return {str(token): int(number) for token, number in vocabulary.items()}
    return {str(token): number for number, (token, *_) in enumerate(vocabulary)}


def difference(vocabulary: Mapping[str, int], other_vocabulary: Mapping[str, int], *, padded: bool = False) -> str:
    """Describe the first token, by its id here, that `other_vocabulary` lacks or numbers differently; "": none.

    padded: ignore tokens that only `other_vocabulary` has.
    """
    tokens = {number: token for token, number in other_vocabulary.items()}
    for token, number in sorted(vocabulary.items(), key=lambda item: item[1]):
        if other_vocabulary.get(token) != number:
            other_token = f"{tokens[number]!r}" if number in tokens else "no token"
            return f"token {number} is {token!r} here and {other_token} there"
    if len(vocabulary) != len(other_vocabulary) and not padded:
        return f"there are {len(vocabulary)} tokens here and {len(other_vocabulary)} there"
    return ""
