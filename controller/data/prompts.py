"""Prompts of reinforcement, with room for an answer, and rows as rewards get them.

    Source ─read_prompt, put_system─▶ text ─encode, Bound.fit─▶ ids, prompt_row ─▶ Prepared

Supervised conversations share what is noted of a row's columns, its tools and its system message.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from controller.data.conversations import Message, as_messages, has_system, read_prompt, read_tools
from controller.data.errors import DataError
from controller.data.media import refuse_media
from controller.data.parts import Part, check_source, rewards_by_source, wants_source
from controller.data.reading.sources import RowSource, optional_column
from controller.data.rows import Bound, Prepared, Row, judged, named, number, reference, value, with_columns
from controller.data.tokenizer import PromptTokenizer
from controller.data.values import is_missing, jsonable, key_text, without_nulls
from schema.config import Config
from schema.wire.data_report import FileReport, Rows

_POLICY = "train.train_policy"


class PromptChunks:
    """Prompts of reinforcement, each with room for a whole answer. bound: of their lengths."""

    what = "prompt"

    def __init__(self, config: Config, tokenizer: PromptTokenizer, part: Part) -> None:
        self._config, self._tokenizer, self._part = config, tokenizer, part
        self.bound, self._shows_tools = _prompt_bound(config, part), tokenizer.shows_tools()
        self._domains = config.grpo.domain_shares if part.role == "train" else {}
        self._order = order_column(config, part)

    def __call__(self, batch: list[tuple[int, Row]]) -> Prepared:
        """Prepare the rows of a batch."""
        config, part, source = self._config, self._part, self._part.source
        column, out = config.grpo.prompt_column, Prepared(FileReport(source=source.name, what=self.what))
        out.report.read = len(batch)
        good: list[tuple[int, Row, str | list[Message]]] = []
        texts: list[str] = []
        for i, raw in batch:
            with judged(out.report.bad):
                if self._domains and domain_of(config, source, i, raw) not in self._domains:
                    out.leave_out("a domain that has no share", source.where(i))
                    continue
                content = value(raw, column, source, i)
                prompt = read_prompt(content, source.where(i))
                refuse_media(part.dataset, part.section, raw, prompt, source.where(i))
                if isinstance(content, str) and not isinstance(prompt, str):
                    note(out, "are JSON texts of messages, which the model gets as messages", source.where(i))
                read = (column, config.grpo.response_column_name, config.train.train_policy.system_prompt_column_name)
                note_not_in_prompt(raw, read, source.where(i), out)
                tools = tools_of(config, raw, source.where(i), self._shows_tools, out)
                with named(source.where(i)):
                    asked = put_system(config, prompt, raw, source.where(i), out)
                    texts.append(self._tokenizer.with_tools(tools).text(asked))
                good.append((i, raw, prompt))
        forms = prompt_forms(config, self._tokenizer, [prompt for _, _, prompt in good], texts)
        for (i, raw, prompt), ids, added in zip(good, self._tokenizer.encode(texts), forms, strict=True):
            with judged(out.report.bad):
                if not prompt or not len(ids):
                    out.leave_out("an empty prompt", source.where(i))
                elif (kept := self.bound.fit(len(ids), source.where(i), out)) is not None:
                    row = prompt_row(config, part, i, raw, prompt, added, out.report)
                    if config.grpo.response_column_name and is_blank(row["answer"]):
                        out.report.empty_references.add(source.where(i))
                    order = [number(raw, self._order, source, i)] if self._order else []
                    out.add(ids[kept], row)
                    out.order += order
                    out.sources += [domain_of(config, source, i, raw)] if self._domains else []
        return out

    def warn(self, report: FileReport) -> None:
        """Warn of what the whole part lacks: nothing."""


def order_column(config: Config, part: Part) -> str:
    """The column of numbers by which the rows of a part are ordered; empty: none."""
    return config.curriculum.column_name if part.role == "train" else ""


def domain_of(config: Config, source: RowSource, i: int, raw: Row) -> str:
    """The domain of row i, as text. Raises `DataError`."""
    name = value(raw, config.grpo.domain_column_name, source, i)
    if not isinstance(name, str | int | bool):
        raise DataError(f"{source.where(i)}: the domain must be a text, not {type(name).__name__}")
    return key_text(name)


def is_blank(answer: Any) -> bool:
    """Whether a value, as JSON holds it, says nothing."""
    return not answer.strip() if isinstance(answer, str) else answer in (None, [], {})


def note(out: Prepared, what: str, where: str) -> None:
    """Count the row at `where` as special. what: the words that say so, behind the number of rows."""
    out.report.noted.setdefault(what, Rows()).add(where)


def tools_of(config: Config, raw: Row, where: str, shows_tools: bool, out: Prepared) -> list[Any] | None:
    """The tools that the chat template gets for a row: of `tools_column_name`, where the template shows them."""
    column = config.train.train_policy.tools_column_name
    definitions = optional_column(raw, column) if column else None
    if definitions is None and column not in raw:
        return None
    if not shows_tools:
        if definitions not in (None, [], "", "[]", "null"):
            note(out, f"have a column `{column}`, which the chat template does not show the model", where)
        return None
    tools = read_tools(definitions, where, column)
    has = "have" if tools else "have no"
    note(out, f"{has} tools in the column `{column}`, which the chat template gets", where)
    return tools


_NOT_IN_PROMPT = {
    **dict.fromkeys(("system", "system_prompt"), "put it before the prompt's messages, as one of the role system"),
    **dict.fromkeys(("history", "documents"), "write it into the prompt's messages"),
    **dict.fromkeys(("functions", "functions_json"), "call the column `tools`"),
    "chat_template_kwargs": "rollout.multi_turn_config has enable_thinking for all rows",
}
"""Columns that published data keeps next to the prompt, which a prompt may contain as well; and a remedy."""


def note_not_in_prompt(
    raw: Row, read: Collection[str], where: str, out: Prepared, others: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Note columns of a row that other systems would put into its prompt.

    read: the columns that the config names. others: columns to look at too, with what to do instead.
    """
    names = {name.partition(".")[0] for name in read}
    for name, remedy in {**_NOT_IN_PROMPT, **others}.items():
        if name in raw and name not in names and not is_blank(without_nulls(raw[name])):
            note(out, f"have a column `{name}`, which is not put into the prompt; {remedy}", where)


def with_system(config: Config, prompt: str | list[Message], raw: Row, where: str) -> str | list[Message]:
    """A prompt or conversation behind its row's system prompt, else `system_prompt`.

    Not where it is empty or has a system message of its own. Raises `DataError` where the column holds no text.
    """
    system, messages = _system_of(config, raw, where), as_messages(prompt)
    if not system or not prompt or has_system(messages):
        return prompt
    return [{"role": "system", "content": system}, *messages]


def _system_of(config: Config, raw: Row, where: str) -> str:
    policy = config.train.train_policy
    content = optional_column(raw, policy.system_prompt_column_name) if policy.system_prompt_column_name else None
    if is_missing(content):
        return policy.system_prompt
    if not isinstance(content, str):
        kind = type(content).__name__
        raise DataError(f"{where}: `{policy.system_prompt_column_name}` must be a text, not {kind}")
    return content or policy.system_prompt


def put_system(
    config: Config, prompt: str | list[Message], raw: Row, where: str, out: Prepared
) -> str | list[Message]:
    """Answer what `with_system` does; note a row that keeps a system message of its own."""
    if has_system(as_messages(prompt)) and _system_of(config, raw, where):
        out.report.own_system.add(where)
    return with_system(config, prompt, raw, where)


def _prompt_bound(config: Config, part: Part) -> Bound:
    """The longest prompt: what the longest answer leaves, or `max_prompt_length` where that is less.

    An answer that may be as long as a whole sequence leaves nothing: then a prompt leaves it one token at least.
    Rows that training holds out for validation keep the training data's rule.
    """
    answer, section, dataset = config.rollout.max_response_length, part.section, part.dataset
    if part.role == "validation":
        answer = config.validation.of_set(part.label).max_response_length or answer
    limit = config.longest_sequence
    room, less = limit - answer, f"less max_response_length = {answer}"
    if room < 1:
        room, less = limit - 1, "less one token for the answer"
    longest = dataset.max_prompt_length
    if longest is not None and longest <= room:
        return Bound(longest, "a prompt", f"{section}.max_prompt_length", section, dataset.overlong_prompts)
    reason = f"policy.model_max_length or rollout.max_model_len, {less}"
    return Bound(room, "a prompt", reason, section, dataset.overlong_prompts)


def prompt_forms(
    config: Config, tokenizer: PromptTokenizer, prompts: list[str | list[Message]], texts: list[str]
) -> list[Row]:
    """Make what `reward.prompt_forms` adds to each row, never cut: the prompt's own tokens, its text."""
    rows: list[Row] = [{} for _ in prompts]
    forms = config.reward.prompt_forms
    items: dict[str, list[Any]] = {
        "raw_prompt_ids": tokenizer.raw_ids(prompts) if "raw_prompt_ids" in forms else [],
        "full_prompt": texts,
    }
    for form in forms:
        for row, item in zip(rows, items[form], strict=True):
            row[form] = item
    return rows


def prompt_row(
    config: Config, part: Part, i: int, raw: Row, prompt: str | list[Message], forms: Row, report: FileReport
) -> Row:
    """Row i as rewards get it; forms: the prompt's `prompt_forms`. What becomes of columns is noted in the report.

    Raises `DataError` where reference or source is missing, or JSON cannot hold a value.
    """
    grpo, source = config.grpo, part.source
    row: Row = {"key": part.key(i), "prompt": prompt}
    columns = {"prompt": grpo.prompt_column, "answer": grpo.response_column_name}
    if grpo.response_column_name:
        row["answer"] = reference(raw, grpo.response_column_name, source, i, report)
    given = part.named_source(raw, grpo.data_source_column_name)
    if given is not None or wants_source(config, part):
        name = value(raw, grpo.data_source_column_name, source, i) if given is None else given
        if (rewards := rewards_by_source(config, part)) is not None:
            check_source(name, source.where(i), rewards)
        row["data_source"] = jsonable(name)
        columns["data_source"] = grpo.data_source_column_name
    return with_columns(row | forms, columns, raw, source, i, report)
