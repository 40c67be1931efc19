"""Loss masks: which characters of a rendered conversation are learnt, then which tokens.

    messages ─template─▶ text, spans of the assistant's turns ─▶ pieces ─tokenizer─▶ ids, mask

A turn of the assistant is what rendering up to this turn adds to rendering up to the one before with the generation
prompt, less the white space that follows its last visible text: what a model would generate there, with the tokens
that end the turn. Where a template rewrites earlier turns (Qwen3 drops their thoughts), so that neither rendering
begins the whole text, the turn begins behind what its prompt has after the message before, or where a marker in its
content stands; a marker shows where its content or last call ends, and what follows is taken from the rendering up to
this turn. A template with `{% generation %}` blocks says itself what is learnt. What stays ambiguous: `DataError`.

No character offset of a tokenizer is used: each piece of the text, learnt or not, is encoded apart, as generation
sees a prompt and then its own tokens.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from controller.data.conversations import Message
from controller.data.errors import DataError

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.uint8]
Span = tuple[int, int]
Mode = Mapping[str, bool]
Render = Callable[..., str]
"""(messages, variables of the template by name) → text. Raises `DataError` where the template refuses."""
Encode = Callable[[Sequence[str]], list[list[int]]]
"""Texts → their token ids, without tokens that the tokenizer puts around a text."""

MARKER = "\u2063§\u2063"  # nothing that a template would strip, split at, or contain itself
_BEGIN, _END = "\u2063«\u2063", "\u2063»\u2063"
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a turn by which published data has its thoughts apart from its content."""
_REMEDY = (
    "put it into a {% generation %} block, in a template of your own: "
    "rollout.multi_turn_config.custom_chat_template_path"
)
_WORD = re.compile("[A-Za-z0-9]+")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_BLOCK = re.compile(r"\{%([-+]?)\s*(generation|endgeneration)\s*([-+]?)%\}")


@dataclass(frozen=True)
class Tokens:
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


def lacks(turn: Message, text: str, *, thoughts: bool) -> bool:
    """Whether the text of a turn lacks its content or the name of a tool call; thoughts: or what it thinks first."""
    *thought, content = _content(turn).split("</think>")
    names = Counter(str(_named(call)["name"]) for call in _calls(turn))
    parts = [content]
    if thoughts:
        parts += [part.split("<think>")[-1] for part in thought]
        parts += [turn[key] for key in _THOUGHTS if isinstance(turn.get(key), str)]
    return any(part.strip() not in text for part in parts) or any(
        text.count(name) < count for name, count in names.items()
    )


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
    text: str, marked: str, tokens: Tokens, messages: Sequence[Message], unlearnt: Collection[int] = ()
) -> Rendered:
    """The conversation with the spans of its generation blocks. marked: its rendering by the marked template.

    The turns in `unlearnt` get no span, which needs one block for each turn of the assistant. White space behind what
    ends a turn is not learnt. Raises `DataError`.
    """
    turns = [i for i, turn in enumerate(messages) if turn["role"] == "assistant"]
    contents = tuple(filter(None, (_content(messages[i]).rstrip() for i in turns)))
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


def _visible(text: str, span: Span, tokens: Tokens, contents: tuple[str, ...]) -> Span:
    """The span of a block without the white space that follows a token or text of the template.

    White space behind one of the `contents` stays: a block that has nothing else there may end its turn with it.
    """
    start, end = span
    seen = text[start:end].rstrip()
    ends = seen.endswith(tokens.added) or not seen.endswith(contents)
    return start, _whole(text, start + len(seen), tokens.added) if ends else end


def _whole(text: str, at: int, words: Sequence[str]) -> int:
    """The place `at`, or the end of the word that it lies in."""
    for word in words:
        begin = text.find(word, max(0, at - len(word) + 1), at + len(word) - 1)
        at = begin + len(word) if begin >= 0 else at
    return at


# ---- a template without ---------------------------------------------------------------------------------------


class Turns:
    """Finds the turns of the assistant in the rendering of one conversation."""

    def __init__(
        self, messages: list[Message], render: Render, tokens: Tokens, modes: Sequence[Mode]
    ) -> None:
        """modes: variables of the template with which a generation prompt may be made, the likeliest first."""
        self._messages, self._render, self._tokens, self._modes = messages, render, tokens, modes
        self._text = render(messages)
        self._upto = cache(lambda n: self._try(messages[:n]))  # rendering of the first n messages

    def rendered(self, unlearnt: Collection[int] = ()) -> Rendered:
        """The conversation with the span of each turn but the unlearnt. Raises `DataError` where one is not found."""
        spans: list[Span] = []
        least, incomplete = 0, False
        for i, turn in enumerate(self._messages):
            if turn["role"] == "assistant":
                start, prompt = self._start(i, least)
                end = self._without_header(i, max(start, self._end(i, start, prompt)), prompt)
                least = self._with_end(start, max(start, end))
                spans += [] if i in unlearnt else [(start, least)]
                last = i == len(self._messages) - 1
                incomplete |= lacks(turn, self._text[start:least], thoughts=last)
        self._check_apart(spans)
        return Rendered(self._text, [span for span in spans if span[0] < span[1]], incomplete)

    def _check_apart(self, spans: list[Span]) -> None:
        """Raises `DataError` where a span has text of a message that is not the assistant's (Gemma 4)."""
        first = next((i for i, turn in enumerate(self._messages) if turn["role"] == "assistant"), 0)
        learnt = [self._text[start:end] for start, end in spans]
        for i, turn in enumerate(self._messages[first:], first):
            words = _WORD.findall(_content(turn))
            seen = any(all(word in text for word in words) for text in learnt)
            if turn["role"] == "assistant" or not _content(turn).strip() or not seen:
                continue
            changed = self._try(self._with(i, {**turn, "content": MARKER + _content(turn)}))
            place = _shared(self._text, changed) if changed and MARKER in changed else -1
            if any(start <= place < end for start, end in spans):
                raise DataError(
                    f"the chat template puts message {i} ({turn['role']}) into a turn of the assistant, which would "
                    "be learnt; leave out what a turn says beside its calls, or take what the model writes and "
                    + _REMEDY
                )

    def _start(self, i: int, least: int) -> tuple[int, str | None]:
        """Find where turn i begins, not before `least`; also return its generation prompt, None if it is refused."""
        before, first = self._upto(i), None
        for mode in self._modes:
            prompt = self._try(self._messages[:i], add_generation_prompt=True, **mode) or None
            first = first or prompt
            if prompt is None or (prompt == before and not self._always_asks(i)):
                break
            if len(prompt) >= least and self._text.startswith(prompt):
                return len(prompt), first
        shown = False
        for marked in _marked_starts(self._messages[i]):
            changed = self._try(self._with(i, marked))
            if changed is None or MARKER not in changed:
                continue
            shown = True
            start = _shared(self._text, changed, self._tokens.added)
            says, asks = MARKER in _content(marked), first is None or first != before
            begins = self._begins(i, first, (least, start)) if asks or not says else None
            if begins is not None:
                return begins, first
            if start >= least and says:
                return max(least, start - len(_blank(self._text[:start], first or ""))), first
        raise self._not_found(i, shown)

    def _always_asks(self, i: int) -> bool:
        """Whether the rendering up to turn i ends with a generation prompt that a question in its place removes."""
        before, asked = self._upto(i), self._asked(i)
        return before is not None and asked is not None and not asked.startswith(before)

    def _asked(self, i: int) -> str | None:
        """The rendering up to turn i with a question in its place."""
        return self._try([*self._messages[:i], {"role": "user", "content": MARKER}])

    def _begins(self, i: int, prompt: str | None, span: Span) -> int | None:
        """Find where turn i begins in `span`, by what its generation prompt ends with; None: unknown.

        It ends with what it has behind the content of the message before, or else with what it adds for the turn.
        """
        least, end = span
        last = self._content_end(self._messages, i - 1)
        asked = self._messages[:i]
        if prompt is not None and (inner := self._content_end(asked, i - 1, add_generation_prompt=True)):
            begins = last + len(prompt) - inner
            if least <= begins <= end and self._text.startswith(prompt[inner:], last):
                return begins
        header = self._header(i, prompt)
        at = self._text.find(header, max(least, last), end) if header else -1
        return at + len(header) if at >= 0 else None

    def _header(self, i: int, prompt: str | None) -> str:
        """Return what `prompt`, the generation prompt for turn i, adds; where it is refused, that for a question."""
        before = self._upto(i)
        if before is None or prompt is None:
            return self._header_of_answer
        if prompt.startswith(before):
            return prompt[len(before) :]
        return self._header_of_answer if prompt.endswith(self._header_of_answer) else ""

    @cached_property
    def _header_of_answer(self) -> str:
        """The text that the generation prompt for a question adds, in place of a footer if there is one (Phi-3)."""
        asked = [{"role": "user", "content": MARKER}]
        before, prompt = self._try(asked) or "", self._try(asked, add_generation_prompt=True) or ""
        at = _shared(before, prompt, self._tokens.added)
        return prompt[at:] if MARKER in before[:at] else ""

    def _content_end(self, messages: list[Message], i: int, **variables: Any) -> int:
        """Find the end of message i's content in a rendering; 0: it is not there."""
        if i < 0:
            return 0
        marked = {**messages[i], "content": _content(messages[i]) + MARKER}
        text, changed = (
            self._try(asked, **variables) for asked in (messages, [*messages[:i], marked, *messages[i + 1 :]])
        )
        return _shared(text, changed) if text and changed and MARKER in changed else 0

    def _end(self, i: int, start: int, prompt: str | None) -> int:
        """Find where the visible text of turn i ends, from `start` on. prompt: the generation prompt for it."""
        turn, shown = self._messages[i], False
        for upto in self._renderings(i, turn, prompt):
            seen = None if upto is None else upto.rstrip()
            if seen is not None and self._text.startswith(seen) and self._shows(i, seen[start:]):
                return len(seen)
        for marked in _marked_ends(turn):
            changed = self._try(self._with(i, marked))
            if changed is None or MARKER not in changed:
                continue
            shown = True
            end = _shared(self._text, changed)
            tails = self._tails(i, marked, prompt, self._text[end:])
            behind = self._behind(self._text[end:], tails, calls=bool(_calls(turn)))
            if end >= start and behind is not None:
                return len(self._text[: end + behind].rstrip())
        raise self._not_found(i, shown)

    def _without_header(self, i: int, end: int, prompt: str | None) -> int:
        """The end of turn i without the generation prompt that some templates write unasked (ChatML of old).

        It begins where renderings part that end with the turn, and go on with a question. prompt: the generation
        prompt for turn i.
        """
        if prompt is None or prompt != self._upto(i):
            return end
        upto, asked = self._upto(i + 1) or "", self._asked(i + 1) or ""
        if asked.startswith(upto):
            return end
        changes = [self._try([*self._messages[:i], marked]) for marked in _marked_ends(self._messages[i])]
        said = max((_shared(upto, text) for text in changes if text and MARKER in text), default=len(upto))
        common = upto[: _shared(upto, asked, self._tokens.added)]
        common = common.removesuffix(max(filter(common.endswith, self._begun_headers), key=len)).rstrip()
        return max(said, len(common)) if said <= len(common) and self._text.startswith(common) else end

    @cached_property
    def _begun_headers(self) -> list[str]:
        """The beginnings of the header of the first message, the empty one too, without tokens that begin a text."""
        turn = self._messages[0]
        marked = self._try(self._with(0, {**turn, "content": MARKER + _content(turn)})) or ""
        header = (
            self._text[: _shared(self._text, marked)].rstrip().rsplit("\n", 1)[-1] if MARKER in marked else ""
        )
        headers = [header]
        while token := next(filter(header.startswith, self._tokens.added), None):
            headers.append(header := header.removeprefix(token))
        return [header[:length] for header in headers for length in range(len(header) + 1)]

    def _tails(self, i: int, marked: Message, prompt: str | None, rest: str) -> list[str]:
        """The texts that renderings up to turn i have behind its content, up to one that `rest` begins with."""
        tails: list[str] = []
        turn = self._messages[i]
        for upto, other in zip(
            self._renderings(i, turn, prompt), self._renderings(i, marked, prompt), strict=True
        ):
            if upto is not None and other is not None and MARKER in other:
                tails.append(upto[_shared(upto, other) :])
                if tails[-1].strip() and rest.startswith(tails[-1]):
                    break
        return tails

    def _renderings(self, i: int, turn: Message, prompt: str | None) -> Iterator[str | None]:
        """The rendering up to turn i as the last one, then as one that a generation prompt follows, without that.

        Some templates end the last turn otherwise than the others (gpt-oss). None: the template refuses, or does not
        say where the turn ends. prompt: the generation prompt for turn i.
        """
        before, messages = self._upto(i), [*self._messages[:i], turn]
        upto = self._upto(i + 1) if turn is self._messages[i] else self._try(messages)
        header = self._header(i, prompt)
        if before is not None and prompt is not None and upto is not None and not prompt.startswith(before):
            upto = self._without_footer(upto, before[_shared(before, prompt, self._tokens.added) :])
        yield upto
        followed = self._try(messages, add_generation_prompt=True) if header else None
        yield followed.removesuffix(header) if followed and followed.endswith(header) else None

    def _shows(self, i: int, text: str) -> bool:
        """Whether a turn's text has its content or one of its tool calls, for which some templates leave that out."""
        turn = self._messages[i]
        content, names = _content(turn).split(), [str(_named(call)["name"]) for call in _calls(turn)]
        words = [*content[-1:], *names]
        if not words or any(word in text for word in words):
            return True
        renderings = [self._try(self._with(i, marked)) for marked in _marked_ends(turn)]
        return any(MARKER in changed for changed in renderings if changed is not None)

    def _behind(self, rest: str, tails: list[str], *, calls: bool) -> int | None:
        """How many characters of `rest`, which follows a turn's content, belong to the turn; None: unknown.

        tails: the texts that renderings up to the turn have there. Where `rest` begins with none of them, the turn
        ends with the last token that it shares with the first.
        """
        if not tails:
            blanks = len(rest) - len(rest.lstrip())
            lengths = (len(token) for token in self._tokens.special if rest.startswith(token, blanks))
            return None if calls else next((blanks + length for length in lengths), None)
        if whole := [tail for tail in tails if rest.startswith(tail)]:
            return max(map(len, whole))
        common = tails[0][: _shared(tails[0], rest, self._tokens.added)]
        ends = (common.rfind(token) + len(token) for token in self._tokens.added if token in common)
        return max(ends, default=None if calls and common.strip() else 0)

    def _without_footer(self, upto: str, footer: str) -> str:
        """A rendering without what the template puts behind every conversation (Phi-3).

        Where nothing else ends the last turn, it stays.
        """
        kept = upto.removesuffix(footer)
        return kept if kept.rstrip().endswith(self._tokens.added) else upto

    def _with_end(self, start: int, end: int) -> int:
        """The end of a span, behind the end token that follows it if no token of the turn ends it.

        Templates write that token between turns (`</s>`), or the next turn begins with it (`<|user|>` of GLM). Other
        tokens at the end of the turn, such as `</tool_call>`, do not end it if the next turn follows without a blank.
        """
        end = _whole(self._text, end, self._tokens.added)
        rest = self._text[end:].lstrip()
        follows = next(filter(rest.startswith, self._tokens.ends), None)
        if follows is None or self._text.endswith(self._tokens.ends, start, end):
            return end
        behind = len(self._text) - len(rest) + len(follows)
        apart = end + len(follows) < behind or not self._text[behind:].strip()
        return end if apart and self._text.endswith(self._tokens.added, start, end) else behind

    def _with(self, i: int, turn: Message) -> list[Message]:
        return [*self._messages[:i], turn, *self._messages[i + 1 :]]

    def _try(self, messages: list[Message], **variables: Any) -> str | None:
        """The rendering; None: the template refuses."""
        try:
            return self._render(messages, **variables)
        except DataError:
            return None

    def _not_found(self, i: int, shown: bool) -> DataError:
        shows = "shows the assistant's turn {}, but not where it begins and ends"
        fault = (shows if shown else "does not show the assistant's turn {}").format(i)
        return DataError(f"the chat template {fault}, so its loss mask cannot be found; {_REMEDY}")


def _blank(before: str, prompt: str) -> str:
    """The white space at the end of what stands before a turn's content that is not its generation prompt's.

    The model generates it. There is none where something else than the end of the prompt stands before the content.
    """
    seen, asked = before.rstrip(), prompt.rstrip()
    blank, asked_blank = before[len(seen) :], prompt[len(asked) :]
    follows = seen.rsplit(None, 1)[-1:] == asked.rsplit(None, 1)[-1:]
    return blank.removeprefix(asked_blank) if follows and blank.startswith(asked_blank) else ""


def _content(turn: Message) -> str:
    return turn["content"] or ""


def _calls(turn: Message) -> list[dict[str, Any]]:
    """The tool calls of a turn that have a name."""
    calls = turn.get("tool_calls") or []
    return [call for call in calls if isinstance(call, dict) and "name" in _named(call)]


def _named(call: dict[str, Any]) -> dict[str, Any]:
    """The part of a tool call that has its name."""
    inner = call.get("function")
    return inner if isinstance(inner, dict) else call


def _marked_starts(turn: Message) -> Iterator[Message]:
    """The turn with a marker for all it says, before its content, then before the name of its first tool call."""
    yield {"role": turn["role"], "content": MARKER}
    yield {**turn, "content": MARKER + _content(turn)}
    if calls := _calls(turn):
        yield {**turn, "tool_calls": [_renamed(calls[0], f"{MARKER}{_named(calls[0])['name']}"), *calls[1:]]}


def _marked_ends(turn: Message) -> Iterator[Message]:
    """The turn with a marker behind its content, then behind the name of its last tool call, if it has them."""
    calls = _calls(turn)
    if _content(turn).strip() or not calls:
        yield {**turn, "content": _content(turn) + MARKER}
    if calls:
        yield {
            **turn,
            "tool_calls": [*calls[:-1], _renamed(calls[-1], f"{_named(calls[-1])['name']}{MARKER}")],
        }


def _renamed(call: dict[str, Any], name: str) -> dict[str, Any]:
    """The tool call with another name."""
    named = _named(call) | {"name": name}
    return named if _named(call) is call else call | {"function": named}


def _shared(left: str, right: str, whole: Sequence[str] = ()) -> int:
    """How many characters two texts begin with alike. whole: texts that are counted as a whole or not at all."""
    shortest = range(min(len(left), len(right)))
    count = bisect_left(shortest, True, key=lambda at: left[: at + 1] != right[: at + 1])
    for text in (left, right):
        for word in whole:
            at = text.find(word, max(0, count - len(word) + 1), count + len(word) - 1)
            count = at if 0 <= at < count < at + len(word) else count
    return count


# ---- tokens ---------------------------------------------------------------------------------------------------


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


# ---- where an answer ends -------------------------------------------------------------------------------------


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
