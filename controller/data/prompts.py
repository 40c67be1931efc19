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
from controller.data.rows import (
    Bound,
    Keep,
    Prepared,
    Row,
    batches,
    judged,
    named,
    reference,
    report_of,
    value,
    with_columns,
)
from controller.data.sources import RowSource
from controller.data.tokenizer import PromptTokenizer
from controller.data.values import jsonable, without_nulls
from schema.config import SOURCE_SCORERS, Config, DatasetConfig
from schema.config.dataset_files import Role
from schema.wire.data_report import FileReport, Rows

_POLICY = "train.train_policy"


def prepare_prompts(
    config: Config, tokenizer: PromptTokenizer, source: RowSource, keep: Keep, role: Role
) -> Prepared:
    """Prompts of reinforcement, each with room for a whole answer."""
    column, out = config.grpo.prompt_column, Prepared(report_of(source, "prompt"))
    bound, (section, dataset) = _prompt_bound(config, role), dataset_of(config, role)
    shows_tools = tokenizer.shows_tools()
    for batch in batches(source, keep):
        out.report.read += len(batch)
        good: list[tuple[int, Row, str | list[Message]]] = []
        texts: list[str] = []
        for i, raw in batch:
            with judged(out.report.bad):
                content = value(raw, column, source, i)
                prompt = read_prompt(content, source.where(i))
                refuse_media(dataset, section, raw, prompt, source.where(i))
                if isinstance(content, str) and not isinstance(prompt, str):
                    note(out, "are JSON texts of messages, which the model gets as messages", source.where(i))
                note_not_in_prompt(raw, (column, config.grpo.response_column_name), source.where(i), out)
                tools = tools_of(raw, source.where(i), shows_tools, out)
                with named(source.where(i)):
                    asked = put_system(config, prompt, source.where(i), out)
                    texts.append(tokenizer.with_tools(tools).text(asked))
                good.append((i, raw, prompt))
        forms = prompt_forms(config, tokenizer, [prompt for _, _, prompt in good], texts)
        for (i, raw, prompt), ids, added in zip(good, tokenizer.encode(texts), forms, strict=True):
            with judged(out.report.bad):
                if not prompt or not len(ids):
                    out.leave_out("an empty prompt", source.where(i))
                elif (kept := bound.fit(len(ids), source.where(i), out)) is not None:
                    row = prompt_row(config, role, source, i, raw, prompt, added, out.report)
                    if config.grpo.response_column_name and _is_blank(row["answer"]):
                        out.report.empty_references.add(source.where(i))
                    out.add(ids[kept], row)
    return out.finish(bound, tokenizer.decode)


def _is_blank(answer: Any) -> bool:
    """Whether a value, as JSON holds it, says nothing."""
    return not answer.strip() if isinstance(answer, str) else answer in (None, [], {})


def note(out: Prepared, what: str, where: str) -> None:
    """Count the row at `where` as special. what: the words that say so, behind the number of rows."""
    out.report.noted.setdefault(what, Rows()).add(where)


def tools_of(raw: Row, where: str, shows_tools: bool, out: Prepared) -> list[Any] | None:
    """The tools that the chat template gets for a row: of its column `tools`, where the template shows them."""
    if "tools" not in raw:
        return None
    if not shows_tools:
        if raw["tools"] not in (None, [], "", "[]", "null"):
            note(out, "have a column `tools`, which the chat template does not show the model", where)
        return None
    tools = read_tools(raw["tools"], where)
    has = "have" if tools else "have no"
    note(out, f"{has} tools in the column `tools`, which the chat template gets", where)
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
        if name not in names and not _is_blank(without_nulls(raw.get(name))):
            note(out, f"have a column `{name}`, which is not put into the prompt; {remedy}", where)


def with_system(config: Config, prompt: str | list[Message]) -> str | list[Message]:
    """A prompt or conversation behind `system_prompt`, unless it is empty or has a system message of its own."""
    system, messages = config.train.train_policy.system_prompt, as_messages(prompt)
    if not system or not prompt or has_system(messages):
        return prompt
    return [{"role": "system", "content": system}, *messages]


def put_system(config: Config, prompt: str | list[Message], where: str, out: Prepared) -> str | list[Message]:
    """Answer what `with_system` does; note a row that keeps a system message of its own."""
    if config.train.train_policy.system_prompt and has_system(as_messages(prompt)):
        out.report.own_system.add(where)
    return with_system(config, prompt)


def _prompt_bound(config: Config, role: Role) -> Bound:
    """The longest prompt: what the longest answer leaves, or `max_prompt_length` where that is less.

    An answer that may be as long as a whole sequence leaves nothing: then a prompt leaves it one token at least.
    Rows that training holds out for validation keep the training data's rule.
    """
    answer, (section, dataset) = config.rollout.max_response_length, dataset_of(config, role)
    if role == "validation":
        answer = config.validation.max_response_length or answer
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
    config: Config,
    role: Role,
    source: RowSource,
    i: int,
    raw: Row,
    prompt: str | list[Message],
    forms: Row,
    report: FileReport,
) -> Row:
    """Row i as rewards get it; forms: the prompt's `prompt_forms`. What becomes of columns is noted in the report.

    Raises `DataError` where reference or source is missing, or JSON cannot hold a value.
    """
    grpo = config.grpo
    row: Row = {"key": f"{role}/{i}", "prompt": prompt}
    columns = {"prompt": grpo.prompt_column, "answer": grpo.response_column_name}
    if grpo.response_column_name:
        row["answer"] = reference(raw, grpo.response_column_name, source, i, report)
    if wants_source(config, role):
        name = value(raw, grpo.data_source_column_name, source, i)
        if _scored_by_source(config, role):
            check_source(name, source.where(i), f"{_POLICY}.reward_function")
        row["data_source"] = jsonable(name)
        columns["data_source"] = grpo.data_source_column_name
    return with_columns(row | forms, columns, raw, source, i, report)


def check_source(name: Any, where: str, key: str) -> None:
    """Refuse a row that `by_source` could not score; `key` names the rewards. Raises `DataError`."""
    if not isinstance(name, str) or name not in SOURCE_SCORERS:
        raise DataError(
            f"{where}: no built-in reward function is known for the data source {name!r}; by_source knows "
            f"{', '.join(SOURCE_SCORERS)}; for other data name a function of your own in {key}: "
            '"path/to/file.py:function"'
        )


def dataset_of(config: Config, role: Role) -> tuple[str, DatasetConfig]:
    """The section that names the rows of a role, and what it says; held-out rows are those of training."""
    if role == "validation" and config.validation.dataset.is_named:
        return "validation.dataset", config.validation.dataset
    return f"{_POLICY}.dataset", config.train.train_policy.dataset


def wants_source(config: Config, role: Role) -> bool:
    """Whether a row needs its `data_source`: a reward or a teacher asks for it, or its column is named."""
    taught = role == "train" and any(teacher.source for teacher in config.teacher)
    named = config.grpo.data_source_column_name != "data_source"
    return taught or named or _scored_by_source(config, role)


def _scored_by_source(config: Config, role: Role) -> bool:
    weights = config.grpo.reward_weights if role == "train" else config.validation_reward_weights
    return "by_source" in weights
