"""The tokens of a tokenizer from its `tokenizer.json`, without loading it.

difference(vocabulary_of(mine), vocabulary_of(theirs))     "" where they agree, or what differs, in words
stop_tokens(strings, special_tokens_of(name))              stop strings that are special tokens
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from schema.config.model_facts import FindFile, local_file
from schema.config.paths import NotAFileError, is_file, read_regular

_MAX_BYTES = 256 * 1024 * 1024


def vocabulary_of(name: str, revision: str | None, find: FindFile = local_file) -> dict[str, int] | None:
    """Token to id of a tokenizer by its directory or hub name; None where it is not on this machine, or is of
    another kind than `tokenizer.json`."""
    path = find(name, revision, "tokenizer.json")
    if path is None or not is_file(path):
        return None
    try:
        data = json.loads(read_regular(path, _MAX_BYTES))
        found = _listed(data["model"]["vocab"])
        return found | {str(token["content"]): int(token["id"]) for token in data.get("added_tokens", ())}
    except (OSError, NotAFileError, ValueError, KeyError, TypeError, RecursionError):
        return None  # loading it reports what is wrong


def special_tokens_of(name: str, revision: str | None, find: FindFile = local_file) -> dict[str, int] | None:
    """Special tokens to ids, as `vocabulary_of`. Decoding leaves them out of the text of an answer."""
    path = find(name, revision, "tokenizer.json")
    if path is None or not is_file(path):
        return None
    try:
        added = json.loads(read_regular(path, _MAX_BYTES)).get("added_tokens", ())
        return {str(token["content"]): int(token["id"]) for token in added if token.get("special")}
    except (OSError, NotAFileError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def stop_tokens(strings: Iterable[str], special: Mapping[str, int]) -> dict[int, str]:
    """The stop strings that are special tokens, by id: an answer ends at the token, since its text lacks it."""
    return {special[string]: string for string in strings if string in special}


def never_found(strings: Iterable[str], special: Collection[str]) -> dict[str, str]:
    """The stop strings that no text of an answer can contain, each with the special token in it."""
    texts = [string for string in strings if string not in special]
    return {string: token for string in texts for token in special if token and token in string}


def _listed(vocabulary: Any) -> dict[str, int]:
    """Of a table token = id, or a list of [token, score] in the order of ids."""
    if isinstance(vocabulary, Mapping):
        return {str(token): int(number) for token, number in vocabulary.items()}
    return {str(token): number for number, (token, *_) in enumerate(vocabulary)}


def difference(mine: Mapping[str, int], theirs: Mapping[str, int], *, padded: bool = False) -> str:
    """The first token, by its id here, that the other numbers otherwise or lacks; "" where there is none.

    padded: tokens that only the other has do not matter.
    """
    there = {number: token for token, number in theirs.items()}
    for token, number in sorted(mine.items(), key=lambda item: item[1]):
        if theirs.get(token) != number:
            other = f"{there[number]!r}" if number in there else "no token"
            return f"token {number} is {token!r} here and {other} there"
    if len(mine) != len(theirs) and not padded:
        return f"there are {len(mine)} tokens here and {len(theirs)} there"
    return ""
