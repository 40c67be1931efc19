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
from controller.data.loss_masks import Learnt, Stops
from controller.data.media import refuse_media
from controller.data.prompts import dataset_of, note, note_not_in_prompt, put_system, tools_of
from controller.data.rows import (
    Bound,
    Keep,
    Prepared,
    Row,
    batches,
    judged,
    named,
    report_of,
    value,
    with_columns,
)
from controller.data.sources import Source, optional_column
from controller.data.tokenizer import PromptTokenizer
from schema.config import Config
from schema.config.dataset_files import Role
from schema.config.end_tokens import eos_token_ids
from schema.config.fetched import fetched_by

logger = logging.getLogger("controller.data.prepare")  # one name for all of the preparation


def prepare_conversations(
    config: Config, tokenizer: PromptTokenizer, source: Source, keep: Keep, role: Role = "train"
) -> Prepared:
    """Conversations of supervised training, with the loss on the assistant's tokens alone."""
    sft, out = config.sft, Prepared(report_of(source, "conversation"))
    section, dataset = dataset_of(config, role)
    longest, rule = config.policy.model_max_length, dataset.overlong_prompts
    bound = Bound(longest, "a conversation", "policy.model_max_length", section, rule)
    read = (
        [sft.prompt_column_name, sft.response_column_name]
        if sft.has_pairs
        else [sft.conversation_column_name]
    )
    stops, shows_tools = _stops(config, tokenizer), tokenizer.shows_tools()
    for batch in batches(source, keep):
        out.report.read += len(batch)
        good: list[_Talk] = []
        for i, raw in batch:
            with judged(out.report.bad):
                talk = put_system(config, _conversation(config, source, i, raw), source.where(i), out)
                refuse_media(dataset, section, raw, talk, source.where(i))
                messages, unlearnt = without_flags(as_messages(talk), source.where(i))
                if unlearnt:
                    how = f"have turns of the assistant that are not learnt, as a key says ({', '.join(LOSS_FLAGS)})"
                    note(out, how, source.where(i))
                note_not_in_prompt(raw, [*read, sft.query_column_name], source.where(i), out)
                tools = tools_of(raw, source.where(i), shows_tools, out)
                good.append(_Talk(i, raw, messages, unlearnt, tools))
        for i, raw, learnt in _encoded(tokenizer, source, good, stops.ids, out):
            with judged(out.report.bad):
                ids, mask = learnt
                kept = bound.fit(len(ids), source.where(i), out) if mask.any() else slice(None)
                if kept is None:
                    continue
                if mask[kept].any():
                    if learnt.differs:
                        out.report.encoded_apart.add(source.where(i))
                    if learnt.incomplete:
                        out.report.incomplete.add(source.where(i))
                    if not stops.stop(ids[kept], mask[kept], tokenizer.decode):
                        out.report.without_stop.add(source.where(i))
                    others = {name: content for name, content in raw.items() if name not in read}
                    row = with_columns({"key": f"{role}/{i}"}, {}, others, source, i, out.report)
                    out.add(ids[kept], row, mask[kept])
                else:
                    out.leave_out("nothing to learn that the assistant says", source.where(i))
    if endless := out.report.without_stop.count:
        logger.warning(
            "%s: the last learnt token of %s conversations is none at which generation stops, so the model does not "
            "learn from them where to end; let the chat template (or one of your own, in rollout.multi_turn_config."
            "custom_chat_template_path) end the assistant's turns, and name that end in rollout.sampling_config."
            "stop_token_ids or stop where the model's generation_config.json does not",
            role,
            f"{endless:,}",
        )
    return out.finish(bound, tokenizer.decode)


def _stops(config: Config, tokenizer: PromptTokenizer) -> Stops:
    """Where generation of this run's samples stops."""
    from transformers.utils import cached_file

    sampling = config.rollout.sampling_config
    ids = eos_token_ids(config.policy, tokenizer.eos_token_id, fetched_by(cached_file))
    return Stops(ids.union(sampling.stop_token_ids), tuple(sampling.stop))


class _Talk(NamedTuple):
    """A conversation, and of which row it is; unlearnt: the places of turns that have no loss."""

    i: int
    raw: Row
    messages: list[Message]
    unlearnt: frozenset[int]
    tools: list[Any] | None


def _encoded(
    tokenizer: PromptTokenizer, source: Source, talks: list[_Talk], stops: frozenset[int], out: Prepared
) -> Iterator[tuple[int, Row, Learnt]]:
    """The rows with their tokens and loss masks; one by one where the template refuses some of them."""
    for tools, group in groupby(talks, lambda talk: talk.tools):
        own, same = tokenizer.with_tools(tools), list(group)
        try:
            unlearnt = [talk.unlearnt for talk in same]
            encoded = own.conversations([talk.messages for talk in same], stops, unlearnt)
        except DataError:
            for talk in same:
                with judged(out.report.bad):
                    with named(source.where(talk.i)):
                        (learnt,) = own.conversations([talk.messages], stops, [talk.unlearnt])
                    yield talk.i, talk.raw, learnt
            continue
        for talk, learnt in zip(same, encoded, strict=True):
            yield talk.i, talk.raw, learnt


def _conversation(config: Config, source: Source, i: int, raw: Row) -> list[Message]:
    sft, where = config.sft, source.where(i)
    if sft.has_pairs:
        question = value(raw, sft.prompt_column_name, source, i)
        if sft.query_column_name:
            question = with_query(question, optional_column(raw, sft.query_column_name), where)
        return read_pair(question, value(raw, sft.response_column_name, source, i), where)
    return read_messages(value(raw, sft.conversation_column_name, source, i), where)
