"""The learnt spans of a template without generation blocks: the turns of the assistant, found with markers."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

from controller.data.conversations import Message
from controller.data.errors import DataError
from controller.data.loss_masks.rendered import (
    REMEDY,
    Rendered,
    Span,
    TokenTexts,
    calls_of,
    content_of,
    lacks,
    named_part,
    shared_start,
    whole_word,
)

Mode = Mapping[str, bool]
Render = Callable[..., str]
"""(messages, variables of the template by name) → text. Raises `DataError` where the template refuses."""

MARKER = "\u2063§\u2063"  # nothing that a template would strip, split at, or contain itself
_WORD = re.compile("[A-Za-z0-9]+")


class AssistantTurns:
    """Finds the turns of the assistant in the rendering of one conversation."""

    def __init__(self, messages: list[Message], render: Render, tokens: TokenTexts, modes: Sequence[Mode]) -> None:
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
            words = _WORD.findall(content_of(turn))
            seen = any(all(word in text for word in words) for text in learnt)
            if turn["role"] == "assistant" or not content_of(turn).strip() or not seen:
                continue
            changed = self._try(self._with(i, {**turn, "content": MARKER + content_of(turn)}))
            place = shared_start(self._text, changed) if changed and MARKER in changed else -1
            if any(start <= place < end for start, end in spans):
                raise DataError(
                    f"the chat template puts message {i} ({turn['role']}) into a turn of the assistant, which would "
                    "be learnt; leave out what a turn says beside its calls, or take what the model writes and "
                    + REMEDY
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
            start = shared_start(self._text, changed, self._tokens.added)
            says, asks = MARKER in content_of(marked), first is None or first != before
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
        at = shared_start(before, prompt, self._tokens.added)
        return prompt[at:] if MARKER in before[:at] else ""

    def _content_end(self, messages: list[Message], i: int, **variables: Any) -> int:
        """Find the end of message i's content in a rendering; 0: it is not there."""
        if i < 0:
            return 0
        marked = {**messages[i], "content": content_of(messages[i]) + MARKER}
        text, changed = (
            self._try(asked, **variables) for asked in (messages, [*messages[:i], marked, *messages[i + 1 :]])
        )
        return shared_start(text, changed) if text and changed and MARKER in changed else 0

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
            end = shared_start(self._text, changed)
            tails = self._tails(i, marked, prompt, self._text[end:])
            behind = self._behind(self._text[end:], tails, calls=bool(calls_of(turn)))
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
        said = max((shared_start(upto, text) for text in changes if text and MARKER in text), default=len(upto))
        common = upto[: shared_start(upto, asked, self._tokens.added)]
        common = common.removesuffix(max(filter(common.endswith, self._begun_headers), key=len)).rstrip()
        return max(said, len(common)) if said <= len(common) and self._text.startswith(common) else end

    @cached_property
    def _begun_headers(self) -> list[str]:
        """The beginnings of the header of the first message, the empty one too, without tokens that begin a text."""
        turn = self._messages[0]
        marked = self._try(self._with(0, {**turn, "content": MARKER + content_of(turn)})) or ""
        header = (
            self._text[: shared_start(self._text, marked)].rstrip().rsplit("\n", 1)[-1] if MARKER in marked else ""
        )
        headers = [header]
        while token := next(filter(header.startswith, self._tokens.added), None):
            headers.append(header := header.removeprefix(token))
        return [header[:length] for header in headers for length in range(len(header) + 1)]

    def _tails(self, i: int, marked: Message, prompt: str | None, rest: str) -> list[str]:
        """The texts that renderings up to turn i have behind its content, up to one that `rest` begins with."""
        tails: list[str] = []
        turn = self._messages[i]
        for upto, other in zip(self._renderings(i, turn, prompt), self._renderings(i, marked, prompt), strict=True):
            if upto is not None and other is not None and MARKER in other:
                tails.append(upto[shared_start(upto, other) :])
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
            upto = self._without_footer(upto, before[shared_start(before, prompt, self._tokens.added) :])
        yield upto
        followed = self._try(messages, add_generation_prompt=True) if header else None
        yield followed.removesuffix(header) if followed and followed.endswith(header) else None

    def _shows(self, i: int, text: str) -> bool:
        """Whether a turn's text has its content or one of its tool calls, for which some templates leave that out."""
        turn = self._messages[i]
        content, names = content_of(turn).split(), [str(named_part(call)["name"]) for call in calls_of(turn)]
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
        common = tails[0][: shared_start(tails[0], rest, self._tokens.added)]
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
        end = whole_word(self._text, end, self._tokens.added)
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
        return DataError(f"the chat template {fault}, so its loss mask cannot be found; {REMEDY}")


def _blank(before: str, prompt: str) -> str:
    """The white space at the end of what stands before a turn's content that is not its generation prompt's.

    The model generates it. There is none where something else than the end of the prompt stands before the content.
    """
    seen, asked = before.rstrip(), prompt.rstrip()
    blank, asked_blank = before[len(seen) :], prompt[len(asked) :]
    follows = seen.rsplit(None, 1)[-1:] == asked.rsplit(None, 1)[-1:]
    return blank.removeprefix(asked_blank) if follows and blank.startswith(asked_blank) else ""


def _marked_starts(turn: Message) -> Iterator[Message]:
    """The turn with a marker for all it says, before its content, then before the name of its first tool call."""
    yield {"role": turn["role"], "content": MARKER}
    yield {**turn, "content": MARKER + content_of(turn)}
    if calls := calls_of(turn):
        yield {**turn, "tool_calls": [_renamed(calls[0], f"{MARKER}{named_part(calls[0])['name']}"), *calls[1:]]}


def _marked_ends(turn: Message) -> Iterator[Message]:
    """The turn with a marker behind its content, then behind the name of its last tool call, if it has them."""
    calls = calls_of(turn)
    if content_of(turn).strip() or not calls:
        yield {**turn, "content": content_of(turn) + MARKER}
    if calls:
        yield {**turn, "tool_calls": [*calls[:-1], _renamed(calls[-1], f"{named_part(calls[-1])['name']}{MARKER}")]}


def _renamed(call: dict[str, Any], name: str) -> dict[str, Any]:
    """The tool call with another name."""
    named = named_part(call) | {"name": name}
    return named if named_part(call) is call else call | {"function": named}
