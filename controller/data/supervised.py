"""Conversations of supervised training, with the loss on the assistant's tokens alone.

Source ─read_messages, without_flags─▶ turns ─conversations─▶ ids, mask ─Bound.fit─▶ Prepared
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from controller.data.conversations import (
    LOSS_FLAGS,
    Message,
    as_messages,
    pair_of,
    read_messages,
    read_prompt,
    with_query,
    without_flags,
)
from controller.data.errors import DataError
from controller.data.loss_masks.tokens import Ids, Learnt, Stops
from controller.data.media import refuse_media
from controller.data.parts import Part, check_source, rewards_by_source
from controller.data.prompts import is_blank, note, note_not_in_prompt, order_column, put_system, tools_of
from controller.data.reading.sources import RowSource, optional_column
from controller.data.rows import Bound, Prepared, Row, judged, named, number, reference, value, with_columns
from controller.data.tokenizer import PromptTokenizer
from controller.data.values import jsonable
from schema.config import Config
from schema.config.end_tokens import eos_token_ids
from schema.config.fetched import fetched_by
from schema.wire.data_report import FileReport
from schema.wire.prompts import start_of_answer

logger = logging.getLogger("controller.data.prepare")  # one name for all of the preparation


SOURCE_COLUMN = "data_source"
"""Column that names the source of a held-out conversation, for rewards and reports."""
_OF_PAIRS = dict.fromkeys(("input", "query"), "query_column_name puts it behind the question")
"""Columns that published pairs keep next to the question, which a prompt may contain as well; and what to do."""


class _Talk(NamedTuple):
    """A conversation, and of which row it is; unlearnt: the places of turns that have no loss.

    put: turns in front that are not the row's own, but the configuration's system prompt.
    """

    i: int
    raw: Row
    messages: list[Message]
    unlearnt: frozenset[int]
    tools: list[Any] | None
    put: int


class ConversationChunks:
    """Conversations of supervised training, with the loss on the assistant's tokens. bound: of their lengths."""

    what = "conversation"

    def __init__(self, config: Config, tokenizer: PromptTokenizer, part: Part) -> None:
        self._config, self._tokenizer, self._part, self._source = config, tokenizer, part, part.source
        longest, rule = config.policy.model_max_length, part.dataset.overlong_prompts
        self.bound = Bound(longest, "a conversation", "policy.model_max_length", part.section, rule)
        self._columns = frozenset(config.sft.columns.values())
        self._order = order_column(config, part)
        self._answered = part.role == "validation" and config.generates
        self._reference = config.validation.reference_column_name
        self._stops, self._shows_tools = stops_of(config, tokenizer), tokenizer.shows_tools()

    def __call__(self, batch: list[tuple[int, Row]]) -> Prepared:
        """Prepare the rows of a batch."""
        out = Prepared(FileReport(source=self._source.name, what=self.what, read=len(batch)))
        talks = list(self._talks(batch, out))
        for talk, learnt in self._encoded(talks, out):
            self._add(talk, learnt, out)
        return out

    def _talks(self, batch: list[tuple[int, Row]], out: Prepared) -> Iterator[_Talk]:
        """The rows as conversations; those that are none are bad rows."""
        config = self._config
        for i, raw in batch:
            where = self._source.where(i)
            with judged(out.report.bad):
                written = _conversation(config, self._source, i, raw)
                conversation = put_system(config, written, raw, where, out)
                refuse_media(self._part.dataset, self._part.section, raw, conversation, where)
                messages, unlearnt = without_flags(as_messages(conversation), where)
                if unlearnt:
                    what = f"have turns of the assistant that are not learnt, as a key says ({', '.join(LOSS_FLAGS)})"
                    note(out, what, where)
                read = {*self._columns, config.sft.system_prompt_column_name}
                note_not_in_prompt(raw, read, where, out, _OF_PAIRS if config.sft.has_pairs else {})
                tools = tools_of(config, raw, where, self._shows_tools, out)
                yield _Talk(i, raw, messages, unlearnt, tools, len(messages) - len(written))

    def _encoded(self, talks: list[_Talk], out: Prepared) -> Iterator[tuple[_Talk, Learnt]]:
        """The conversations with tokens and loss masks; one by one where the template refuses some of them."""
        # Definitions that are equal in Python may be other texts: true and 1, or keys in another order.
        for _, group in groupby(talks, lambda talk: json.dumps(talk.tools)):
            same = list(group)
            tokenizer = self._tokenizer.with_tools(same[0].tools)
            try:
                unlearnt = [talk.unlearnt for talk in same]
                every = tokenizer.conversations([talk.messages for talk in same], self._stops.ids, unlearnt)
            except DataError:
                for talk in same:
                    with judged(out.report.bad), named(self._source.where(talk.i)):
                        (learnt,) = tokenizer.conversations([talk.messages], self._stops.ids, [talk.unlearnt])
                        yield talk, learnt
                continue
            for talk, learnt in zip(same, every, strict=True):
                yield talk, learnt

    def _add(self, talk: _Talk, learnt: Learnt, out: Prepared) -> None:
        """Keep a conversation, or count why it is left out."""
        where, (ids, mask) = self._source.where(talk.i), learnt
        with judged(out.report.bad):
            kept = self.bound.fit(len(ids), where, out) if mask.any() else slice(None)
            if kept is None:
                return
            if not mask[kept].any():
                out.leave_out("nothing to learn that the assistant says", where)
                return
            if learnt.differs:
                out.report.encoded_apart.add(where)
            if learnt.incomplete:
                out.report.incomplete.add(where)
            if not self._stops.stop(ids[kept], mask[kept], self._tokenizer.decode):
                out.report.without_stop.add(where)
            others = {name: content for name, content in talk.raw.items() if name not in self._columns}
            key: Row = {"key": self._part.key(talk.i)}
            read: dict[str, str] = {}
            if self._answered:
                if (asked := self._asked(talk, ids[kept][: start_of_answer(mask[kept])], out)) is None:
                    return
                key, others = key | asked, talk.raw  # rewards get all columns
                read = {"prompt": self._config.sft.prompt_column_name, "answer": self._reference}
            order = [number(talk.raw, self._order, self._source, talk.i)] if self._order else []
            out.add(ids[kept], with_columns(key, read, others, self._source, talk.i, out.report), mask[kept])
            out.order += order

    def _asked(self, talk: _Talk, prompt: Ids, out: Prepared) -> Row | None:
        """Return what rewards get of a row whose last learnt turn is generated as well; None: it is left out.

        prompt: the tokens in front of that turn.
        """
        config, where = self._config, self._source.where(talk.i)
        longest = config.longest_sequence
        longest_answer = config.validation.of_set(self._part.label).max_response_length
        room = longest - (longest_answer or config.rollout.max_response_length)
        if not 0 < len(prompt) <= room:
            needs = f"1 to {room} tokens in front of it (validation.generate)"
            out.leave_out(f"a last turn that has not {needs}", where)
            return None
        turns = [i for i, message in enumerate(talk.messages) if message["role"] == "assistant"]
        last = max(i for i in turns if i not in talk.unlearnt)
        tokenizer = self._tokenizer.with_tools(talk.tools)
        (rendered,) = tokenizer.encode([tokenizer.text(talk.messages[:last])])
        if not np.array_equal(rendered, prompt):
            note(out, "are answered behind other tokens than the chat template puts before an answer", where)
        answer = talk.messages[last].get("content") or ""
        if self._reference:
            answer = reference(talk.raw, self._reference, self._source, talk.i, out.report)
            if is_blank(answer):
                out.report.empty_references.add(where)
        asked = talk.messages[talk.put : last]
        row: Row = {"prompt": _question(config, self._source, talk.i, talk.raw) or asked, "answer": answer}
        key = rewards_by_source(config, self._part)
        if self._part.gives_source or key is not None:
            given = self._part.named_source(talk.raw, SOURCE_COLUMN)
            name = value(talk.raw, SOURCE_COLUMN, self._source, talk.i) if given is None else given
            if key is not None:
                check_source(name, where, key)
            row["data_source"] = jsonable(name)
        return row

    def warn(self, report: FileReport) -> None:
        """Warn of a model that would not learn where to end."""
        if endless := report.without_stop.count:
            logger.warning(
                "%s: the last learnt token of %s conversations is none at which generation stops, so the model does "
                "not learn from them where to end; let the chat template (or one of your own, in "
                "rollout.multi_turn_config.custom_chat_template_path) end the assistant's turns, and name that end "
                "in rollout.sampling_config.stop_token_ids or stop where the model's generation_config.json does not",
                self._part.name,
                f"{endless:,}",
            )


def stops_of(config: Config, tokenizer: PromptTokenizer) -> Stops:
    """The tokens and texts at which generation of this run's samples stops."""
    from transformers.utils import cached_file

    sampling = config.rollout.sampling_config
    ids = eos_token_ids(config.policy, tokenizer.eos_token_id, fetched_by(cached_file))
    return Stops(ids.union(sampling.stop_token_ids), tuple(sampling.stop))


def _question(config: Config, source: RowSource, i: int, raw: Row) -> str | list[Message]:
    """The question of a row of two columns, as rewards of reinforcement get it; empty for a conversation."""
    sft, where = config.sft, source.where(i)
    if not sft.has_pairs:
        return ""
    question = value(raw, sft.prompt_column_name, source, i)
    if sft.query_column_name:
        question = with_query(question, optional_column(raw, sft.query_column_name), where)
    return read_prompt(question, where)


def _conversation(config: Config, source: RowSource, i: int, raw: Row) -> list[Message]:
    sft, where = config.sft, source.where(i)
    if sft.has_pairs:
        question = _question(config, source, i, raw)
        return pair_of(question, value(raw, sft.response_column_name, source, i), where)
    return read_messages(value(raw, sft.conversation_column_name, source, i), where)
