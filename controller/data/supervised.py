"""Conversations of supervised training, with the loss on the assistant's tokens alone.

Source ─read_messages, without_flags─▶ turns ─conversations─▶ ids, mask ─Bound.fit─▶ Prepared
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

from controller.data.conversations import (
    LOSS_FLAGS,
    Message,
    as_messages,
    read_messages,
    read_pair,
    with_query,
    without_flags,
)
from controller.data.errors import DataError
from controller.data.loss_masks.tokens import Learnt, Stops
from controller.data.media import refuse_media
from controller.data.prompts import dataset_of, note, note_not_in_prompt, put_system, tools_of
from controller.data.rows import Bound, Keep, Prepared, Row, batches, judged, named, report_of, value, with_columns
from controller.data.sources import RowSource, optional_column
from controller.data.tokenizer import PromptTokenizer
from schema.config import Config
from schema.config.dataset_files import Role
from schema.config.end_tokens import eos_token_ids
from schema.config.fetched import fetched_by

logger = logging.getLogger("controller.data.prepare")  # one name for all of the preparation


_OF_PAIRS = dict.fromkeys(("input", "query"), "query_column_name puts it behind the question")
"""Columns that published pairs keep next to the question, which a prompt may contain as well; and what to do."""


def prepare_conversations(
    config: Config, tokenizer: PromptTokenizer, source: RowSource, keep: Keep, role: Role
) -> Prepared:
    """Conversations of supervised training, with the loss on the assistant's tokens alone."""
    conversations = _Conversations(config, tokenizer, source, role)
    for batch in batches(source, keep):
        talks = list(conversations.talks(batch))
        for talk, learnt in conversations.encoded(talks):
            conversations.add(talk, learnt)
    return conversations.finish()


class _Talk(NamedTuple):
    """A conversation, and of which row it is; unlearnt: the places of turns that have no loss."""

    i: int
    raw: Row
    messages: list[Message]
    unlearnt: frozenset[int]
    tools: list[Any] | None


class _Conversations:
    """The conversations of one file on their way into `Prepared`."""

    def __init__(self, config: Config, tokenizer: PromptTokenizer, source: RowSource, role: Role) -> None:
        self._config, self._tokenizer, self._source, self._role = config, tokenizer, source, role
        self._out = Prepared(report_of(source, "conversation"))
        self._section, self._dataset = dataset_of(config, role)
        longest, rule = config.policy.model_max_length, self._dataset.overlong_prompts
        self._bound = Bound(longest, "a conversation", "policy.model_max_length", self._section, rule)
        self._columns = frozenset(config.sft.columns.values())
        self._stops, self._shows_tools = _stops(config, tokenizer), tokenizer.shows_tools()

    def talks(self, batch: list[tuple[int, Row]]) -> Iterator[_Talk]:
        """The rows as conversations; those that are none are bad rows."""
        config, out = self._config, self._out
        out.report.read += len(batch)
        for i, raw in batch:
            where = self._source.where(i)
            with judged(out.report.bad):
                conversation = put_system(config, _conversation(config, self._source, i, raw), where, out)
                refuse_media(self._dataset, self._section, raw, conversation, where)
                messages, unlearnt = without_flags(as_messages(conversation), where)
                if unlearnt:
                    what = f"have turns of the assistant that are not learnt, as a key says ({', '.join(LOSS_FLAGS)})"
                    note(out, what, where)
                note_not_in_prompt(raw, self._columns, where, out, _OF_PAIRS if config.sft.has_pairs else {})
                tools = tools_of(raw, where, self._shows_tools, out)
                yield _Talk(i, raw, messages, unlearnt, tools)

    def encoded(self, talks: list[_Talk]) -> Iterator[tuple[_Talk, Learnt]]:
        """The conversations with tokens and loss masks; one by one where the template refuses some of them."""
        for tools, group in groupby(talks, lambda talk: talk.tools):
            tokenizer, same = self._tokenizer.with_tools(tools), list(group)
            try:
                unlearnt = [talk.unlearnt for talk in same]
                every = tokenizer.conversations([talk.messages for talk in same], self._stops.ids, unlearnt)
            except DataError:
                for talk in same:
                    with judged(self._out.report.bad), named(self._source.where(talk.i)):
                        (learnt,) = tokenizer.conversations([talk.messages], self._stops.ids, [talk.unlearnt])
                        yield talk, learnt
                continue
            for talk, learnt in zip(same, every, strict=True):
                yield talk, learnt

    def add(self, talk: _Talk, learnt: Learnt) -> None:
        """Keep a conversation, or count why it is left out."""
        out, where, (ids, mask) = self._out, self._source.where(talk.i), learnt
        with judged(out.report.bad):
            kept = self._bound.fit(len(ids), where, out) if mask.any() else slice(None)
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
            key = {"key": f"{self._role}/{talk.i}"}
            out.add(ids[kept], with_columns(key, {}, others, self._source, talk.i, out.report), mask[kept])

    def finish(self) -> Prepared:
        """Complete the report; answers what was prepared."""
        if endless := self._out.report.without_stop.count:
            logger.warning(
                "%s: the last learnt token of %s conversations is none at which generation stops, so the model does "
                "not learn from them where to end; let the chat template (or one of your own, in "
                "rollout.multi_turn_config.custom_chat_template_path) end the assistant's turns, and name that end "
                "in rollout.sampling_config.stop_token_ids or stop where the model's generation_config.json does not",
                self._role,
                f"{endless:,}",
            )
        return self._out.finish(self._bound, self._tokenizer.decode)


def _stops(config: Config, tokenizer: PromptTokenizer) -> Stops:
    """The tokens and texts at which generation of this run's samples stops."""
    from transformers.utils import cached_file

    sampling = config.rollout.sampling_config
    ids = eos_token_ids(config.policy, tokenizer.eos_token_id, fetched_by(cached_file))
    return Stops(ids.union(sampling.stop_token_ids), tuple(sampling.stop))


def _conversation(config: Config, source: RowSource, i: int, raw: Row) -> list[Message]:
    sft, where = config.sft, source.where(i)
    if sft.has_pairs:
        question = value(raw, sft.prompt_column_name, source, i)
        if sft.query_column_name:
            question = with_query(question, optional_column(raw, sft.query_column_name), where)
        return read_pair(question, value(raw, sft.response_column_name, source, i), where)
    return read_messages(value(raw, sft.conversation_column_name, source, i), where)
