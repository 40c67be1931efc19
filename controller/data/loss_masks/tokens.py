"""Token ids and loss masks of rendered conversations, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from controller.data.loss_masks.rendered import Rendered

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.uint8]
Encode = Callable[[Sequence[str]], list[list[int]]]
"""Texts → their token ids, without tokens that the tokenizer puts around a text."""


@dataclass(frozen=True)
class Learnt:
    """Tokens of a conversation and their loss mask; iterating gives these two.

    differs: whether the tokenizer makes other tokens of the whole text than of its pieces. incomplete: as in
    `Rendered`.
    """

    ids: Ids
    mask: Mask
    differs: bool
    incomplete: bool

    def __iter__(self) -> Iterator[Any]:
        yield from (self.ids, self.mask)


def encode_all(conversations: Sequence[Rendered], encode: Encode, *, prefixes: bool) -> list[Learnt]:
    """Tokens and loss masks of conversations, each piece of text encoded apart.

    prefixes: the tokenizer begins each text with a blank of its own (SentencePiece), which stays away from all pieces
    but the first.
    """
    rows = [conversation.pieces() for conversation in conversations]
    apart = _by_text([piece for row in rows for piece in row], encode)
    wholes = encode([conversation.text for conversation in conversations])
    tokens = [[apart[piece] for piece in row] for row in rows]
    unlike = [k for k, whole in enumerate(wholes) if list(chain.from_iterable(tokens[k])) != whole]
    pairs = {k: _in_context(rows[k], prefixes) for k in unlike}
    joined = _by_text([before + piece for row in pairs.values() for before, piece in row.values()], encode)
    for k, row in pairs.items():
        for at, (before, piece) in row.items():
            ids, length = joined[before + piece], len(apart[before])
            if ids[:length] == apart[before]:
                tokens[k][at] = ids[length:]
            elif prefixes:
                tokens[k][at] = _without_blank(piece, apart[piece], encode)
    return [
        _learnt(pieces, whole, conversation.incomplete)
        for pieces, whole, conversation in zip(tokens, wholes, conversations, strict=True)
    ]


def _by_text(texts: Sequence[str], encode: Encode) -> dict[str, list[int]]:
    """The token ids of each of these texts; none of an empty one."""
    distinct = list(dict.fromkeys(filter(None, texts)))
    return {"": [], **dict(zip(distinct, encode(distinct), strict=True))}


def _in_context(pieces: list[str], prefixes: bool) -> dict[int, tuple[str, str]]:
    """The pieces whose tokens may depend on the piece before, each behind that one, by place.

    A tokenizer may drop or add blanks behind a special token, and a prompt has them as it does. Tokens of the model
    (each second piece) follow on those of the prompt as they are.
    """
    pairs: dict[int, tuple[str, str]] = {}
    before = ""
    for at, piece in enumerate(pieces):
        if piece:
            if before and (prefixes or at % 2 == 0):
                pairs[at] = (before, piece)
            before = piece
    return pairs


def _without_blank(piece: str, ids: list[int], encode: Encode) -> list[int]:
    """The tokens of a piece behind another text; its own `ids` where none shows them apart."""
    for anchor in ("\n", ".", "a"):
        first, both = encode([anchor, anchor + piece])
        if first and both[: len(first)] == first:
            return both[len(first) :]
    return ids


def _learnt(pieces: list[list[int]], whole: list[int], incomplete: bool) -> Learnt:
    ids = list(chain.from_iterable(pieces))
    mask = chain.from_iterable([at % 2] * len(piece) for at, piece in enumerate(pieces))
    return Learnt(np.asarray(ids, np.int32), np.fromiter(mask, np.uint8, len(ids)), ids != whole, incomplete)


@dataclass(frozen=True)
class Stops:
    """Token ids and strings at which generation stops."""

    ids: frozenset[int]
    strings: tuple[str, ...]

    def stop(self, ids: Ids, mask: Mask, decode: Callable[[Ids], str]) -> bool:
        """Whether generation of the last learnt tokens would stop at the last one. decode: tokens as text."""
        last = int(np.flatnonzero(mask)[-1])
        if int(ids[last]) in self.ids:
            return True
        if not self.strings:
            return False
        begin = int(np.flatnonzero(mask[:last] == 0)[-1]) + 1 if (mask[:last] == 0).any() else 0
        text, before = decode(ids[begin : last + 1]), len(decode(ids[begin:last]))
        return any(stop in text[max(0, before - len(stop) + 1) :] for stop in self.strings)
