"""The probe texts, what two tokenizers make of them, and what one of them loses. Pure: no library is imported."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

PROBE: Mapping[str, str] = {
    "words": "The answer is Yes.",
    "contractions and names": "Isn't it? I'LL say so; they've HTTPServer and snake_case (see [1]).",
    "digits": "0123456789 + 12.50 = 1,234,567 and 3*4/2 < 2024",
    "indentation": "def f(x):\n    if x:\n        return [\n            x,\n        ]\n",
    "tabs": "if x:\n\treturn\t\tx\n",
    "runs of spaces": "a  b   c        d",
    "spaces around a text": "  begins and ends  ",
    "spaces before punctuation": "so , well . or ? no ! it 's",
    "line feeds": "The answer is\n\n#### 18\n\n\nEnd!\r\n",
    "symbols": "\\boxed{18} `x` ~ @ ^ | & % $ # <b> \"q\" 'r' {a: 1}",
    "accents": "naïve café über Größe",
    "combining characters": "e\u0301 n\u0303 a\u0308",
    "other scripts": "数学 答案是 Привет こんにちは 한국어 مرحبا हिन्दी ไทย",
    "mathematical symbols": "∑ ≤ √2 × α² ½ → ℕ",
    "emoji": "🙂👩\u200d🚀 ok",
    "rare spaces": "a\u00a0b\u3000c\u2009d",
}
"""Kind of text -> text."""
NECESSARY = ("words", "digits", "indentation")
"""Kinds without which prompts, code and numbers cannot be trained."""


@dataclass(frozen=True, slots=True)
class Codec:
    """How a tokenizer reads and writes text, without special tokens added. Both may raise anything."""

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]

    def round_trip(self, text: str) -> tuple[list[int], str]:
        """Token ids of a text, and these ids as text; of a text that it refuses, no ids and the reason."""
        try:
            ids = list(self.encode(text))
            return ids, self.decode(ids)
        except Exception as error:  # the tokenizers library raises no other, and code of others may raise any
            return [], f"({error})"


def difference(codec: Codec, reference: Codec, texts: Iterable[str]) -> str:
    """The first of these texts that the two encode or decode otherwise, as a phrase; "": none."""
    for text in texts:
        (ids, back), (expected_ids, expected) = codec.round_trip(text), reference.round_trip(text)
        if back != expected:
            show = ascii if _composed(back) == _composed(expected) else repr
            return f"{show(text)} comes back as {show(back)} instead of {show(expected)}"
        if ids != expected_ids:
            at = next((i for i, (x, y) in enumerate(zip(ids, expected_ids, strict=False)) if x != y), 0)
            near = slice(at, at + 4)
            return f"{text!r} has the ids {ids[near]} at token {at} instead of {expected_ids[near]}"
    return ""


def lost(codec: Codec) -> dict[str, str]:
    """Kind of text -> what comes back of its probe text, where that is another text.

    But for a space at its begin, since many tokenizers put one before a first word and take it away again; and for
    characters that are composed, as by Qwen, which Unicode holds for the same.
    """
    backs = {kind: codec.round_trip(text)[1] for kind, text in PROBE.items()}
    return {
        kind: back
        for kind, back in backs.items()
        if _composed(back).lstrip(" ") != _composed(PROBE[kind]).lstrip(" ")
    }


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)
