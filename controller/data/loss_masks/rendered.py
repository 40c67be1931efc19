"""A rendered conversation with its learnt spans, and those of a template that says itself what is learnt.

Such a template has `{% generation %}` blocks; `turns` finds the spans of the others.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from controller.data.conversations import Message
from controller.data.errors import DataError

Span = tuple[int, int]
REMEDY = (
    "put it into a {% generation %} block, in a template of your own: "
    "rollout.multi_turn_config.custom_chat_template_path"
)
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a turn by which published data has its thoughts apart from its content."""
_BEGIN, _END = "\u2063«\u2063", "\u2063»\u2063"
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_BLOCK = re.compile(r"\{%([-+]?)\s*(generation|endgeneration)\s*([-+]?)%\}")


@dataclass(frozen=True)
class TokenTexts:
    """Texts of tokens.

    ends: those at which generation stops, the one that ends a text first. special: those that the tokenizer names.
    added: all that text is split at, special or not.
    """

    ends: tuple[str, ...]
    special: tuple[str, ...]
    added: tuple[str, ...]


@dataclass(frozen=True)
class Rendered:
    """A conversation as text; spans: the characters that are learnt, in order and apart from each other.

    incomplete: whether a turn of the assistant lacks its content or tool calls, or the last turn its thoughts.
    """

    text: str
    spans: list[Span]
    incomplete: bool = False

    def pieces(self) -> list[str]:
        """The text in pieces, which are not learnt and learnt by turns; the first and the last are not."""
        cuts = [0, *(place for span in self.spans for place in span), len(self.text)]
        return [self.text[left:right] for left, right in pairwise(cuts)]


def lacks(turn: Message, text: str, *, thoughts: bool) -> bool:
    """Whether the text of a turn lacks its content or the name of a tool call; thoughts: or what it thinks first."""
    *thought, content = content_of(turn).split("</think>")
    names = Counter(str(named_part(call)["name"]) for call in calls_of(turn))
    parts = [content]
    if thoughts:
        parts += [part.split("<think>")[-1] for part in thought]
        parts += [turn[key] for key in _THOUGHTS if isinstance(turn.get(key), str)]
    return any(part.strip() not in text for part in parts) or any(
        text.count(name) < count for name, count in names.items()
    )


def content_of(turn: Message) -> str:
    return turn["content"] or ""


def calls_of(turn: Message) -> list[dict[str, Any]]:
    """The tool calls of a turn that have a name."""
    calls = turn.get("tool_calls") or []
    return [call for call in calls if isinstance(call, dict) and "name" in named_part(call)]


def named_part(call: dict[str, Any]) -> dict[str, Any]:
    """The part of a tool call that has its name."""
    inner = call.get("function")
    return inner if isinstance(inner, dict) else call


def whole_word(text: str, at: int, words: Sequence[str]) -> int:
    """The place `at`, or the end of the word that it lies in."""
    for word in words:
        begin = text.find(word, max(0, at - len(word) + 1), at + len(word) - 1)
        at = begin + len(word) if begin >= 0 else at
    return at


def shared_start(left: str, right: str, whole: Sequence[str] = ()) -> int:
    """How many characters two texts begin with alike. whole: texts that are counted as a whole or not at all."""
    shortest = range(min(len(left), len(right)))
    count = bisect_left(shortest, True, key=lambda at: left[: at + 1] != right[: at + 1])
    for text in (left, right):
        for word in whole:
            at = text.find(word, max(0, count - len(word) + 1), count + len(word) - 1)
            count = at if 0 <= at < count < at + len(word) else count
    return count


# ---- a template with generation blocks ------------------------------------------------------------------------


def marked_template(template: str) -> str | None:
    """The template with a mark before and behind each generation block; None: it has no such block.

    A block tag stands where one stood, so white space around tags is treated as before.
    """
    if not any(tag[2] == "generation" for tag in _BLOCK.finditer(_COMMENT.sub("", template))):
        return None

    def marked(tag: re.Match[str]) -> str:
        left, name, right = tag.groups()
        if name == "generation":
            return f"{{%{left} if true %}}{{{{ '{_BEGIN}' }}}}{{% endif %}}{{% generation {right}%}}"
        return f"{{%{left} endgeneration %}}{{% if true %}}{{{{ '{_END}' }}}}{{% endif {right}%}}"

    return _BLOCK.sub(marked, template)


def by_blocks(
    text: str, marked: str, tokens: TokenTexts, messages: Sequence[Message], unlearnt: Collection[int] = ()
) -> Rendered:
    """The conversation with the spans of its generation blocks. marked: its rendering by the marked template.

    The turns in `unlearnt` get no span, which needs one block for each turn of the assistant. White space behind what
    ends a turn is not learnt. Raises `DataError`.
    """
    turns = [i for i, turn in enumerate(messages) if turn["role"] == "assistant"]
    contents = tuple(filter(None, (content_of(messages[i]).rstrip() for i in turns)))
    spans: list[Span] = []
    start, place = -1, 0
    for part in re.split(f"({_BEGIN}|{_END})", marked):
        if part == _BEGIN and start < 0:
            start = place
        elif part == _END and start >= 0:
            if spans and spans[-1][1] == start:
                start = spans.pop()[0]
            spans.append((start, place))
            start = -1
        else:
            place += len(part)
    if marked.replace(_BEGIN, "").replace(_END, "") != text or start >= 0 or place != len(text):
        raise DataError(
            "the characters of the chat template's {% generation %} blocks cannot be found: its text changes when "
            "they are marked; do not nest them, and leave what they make unchanged"
        )
    spans = [_visible(text, span, tokens, contents) for span in spans if span[0] < span[1]]
    if unlearnt and len(spans) != len(turns):
        raise DataError(
            f"turn {min(unlearnt)} is marked not to be learnt, and the {{% generation %}} blocks of the template do "
            f"not tell it apart: {len(spans)} of them for {len(turns)} turns of the assistant; use a template "
            "with one block for each of these turns, or with none"
        )
    learnt = [span for k, span in enumerate(spans) if not unlearnt or turns[k] not in unlearnt]
    last = len(messages) - 1
    return Rendered(text, learnt, any(lacks(messages[i], text, thoughts=i == last) for i in turns))


def _visible(text: str, span: Span, tokens: TokenTexts, contents: tuple[str, ...]) -> Span:
    """The span of a block without the white space that follows a token or text of the template.

    White space behind one of the `contents` stays: a block that has nothing else there may end its turn with it.
    """
    start, end = span
    seen = text[start:end].rstrip()
    ends = seen.endswith(tokens.added) or not seen.endswith(contents)
    return start, whole_word(text, start + len(seen), tokens.added) if ends else end
