"""Prepare the data of a run: `python -m controller.data.prepare --run-dir DIR`.

    DIR/config.json  ->  DIR/data/train.safetensors, and DIR/data/validation.safetensors if validation is on
                         DIR/data/report.json: what became of the rows (schema.wire.data_report)

A prepared row is {"key", "prompt", "answer", ...}: a stable name of where it came from, the prompt as text or
messages, the reference answer (if `response_column_name` is set), its `data_source` (if something asks for it), the
prompt in the `reward.prompt_forms`, and every column of the data as JSON holds it (`controller.data.values`); those
with the name of one of these are in its `columns`.
For supervised training it is {"key", ...} and the file has a loss mask.

Invariant: a row is written whole, or left out, or (where `overlong_prompts` says so) its tokens are cut; the last two
are counted and reported. A row that cannot be used at all is an error, once all rows have been looked at. Exit code
2: the config or the data is at fault, and the last line of stderr says how.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Collection, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from controller.data.conversations import (
    LOSS_FLAGS,
    Message,
    as_messages,
    has_system,
    read_messages,
    read_pair,
    read_prompt,
    read_tools,
    with_query,
    without_flags,
)
from controller.data.errors import DataError
from controller.data.loss_masks import Learnt, Stops
from controller.data.media import refuse_media
from controller.data.rows import (
    Bound,
    Keep,
    Prepared,
    Row,
    batches,
    command,
    judged,
    named,
    reference,
    refuse_bad,
    report_of,
    reported,
    value,
    with_columns,
)
from controller.data.sources import Source, open_source, optional_column, require_column
from controller.data.tokenizer import PromptTokenizer
from controller.data.values import jsonable, without_nulls
from schema.config import SOURCE_SCORERS, Config, DatasetConfig
from schema.config.chat_template import keep_template, kept_template
from schema.config.dataset_files import Role, files_of
from schema.config.end_tokens import eos_token_ids
from schema.config.fetched import fetched_by
from schema.config.model_facts import BrokenModelError, read_facts
from schema.config.modules import import_external
from schema.wire.data_report import FileReport, Rows, lines
from schema.wire.prompts import write_prompts

__all__ = ["held_out_rows", "main", "prepare", "prepare_conversations", "prepare_prompts"]

logger = logging.getLogger("controller.data.prepare")  # run with -m, __name__ would say nothing

_POLICY = "train.train_policy"


def prepare(config: Config, run_dir: Path, report_only: bool = False) -> dict[str, int]:
    """Write the data files of a run and their report; answers rows by file. Raises `DataError`.

    report_only: write nothing else.
    """
    with reported(run_dir) as report:
        template, ready = _ready(config)
        if not report_only and (earlier := run_dir / "data" / "train.safetensors").exists():
            earlier.unlink()  # however this ends, it is not data of this configuration
            if kept_template(run_dir) != template:
                logger.warning(
                    "earlier steps of this run were trained with another chat template of the job's own"
                )
        report.files |= {role: prepared.report for role, prepared in ready}
        _note_trained(dict(ready))
        refuse_bad(report)
        for role, prepared in ready:
            refuse_unknown_ids(config, role, prepared)
            _check_left(role, prepared.report)
        for text in lines(report):
            logger.info("%s", text)
        report.write(run_dir)
        if not report_only:
            keep_template(run_dir, template)
            # The training data last: where it is, everything is, however this process may have ended.
            for role, prepared in reversed(ready):
                _write(run_dir / "data" / f"{role}.safetensors", prepared)
        return {role: prepared.report.kept for role, prepared in ready}


def refuse_unknown_ids(config: Config, role: Role, prepared: Prepared) -> None:
    """Refuse rows with token ids that the model has no embeddings for. Raises `DataError`.

    Rules of the configuration compare the tokenizer with the model; special tokens that only a text which spells them
    out becomes are left to this.
    """
    policy = config.policy
    try:
        facts = read_facts(policy.model_name_or_path, policy.model_revision, policy.override_config)
    except BrokenModelError:
        return  # whoever loads the model reports it
    if facts is None or facts.vocabulary is None:
        return
    rows = [
        f"{prepared.rows[i]['key']} ({ids.max()})"
        for i, ids in enumerate(prepared.token_ids)
        if len(ids) and ids.max() >= facts.vocabulary
    ]
    if rows:
        few = ", ".join(rows[:3]) + ", …" * (len(rows) > 3)
        raise DataError(
            f"{len(rows)} rows of the {role} data have token ids that policy.model_name_or_path = {facts.name} has "
            f"no embeddings for (vocab_size = {facts.vocabulary}): {few}; leave these rows out, or name the "
            f"tokenizer that the model was made with"
        )


def _ready(config: Config) -> tuple[str | None, list[tuple[Role, Prepared]]]:
    """The job's own chat template, and the prepared rows of each file."""
    source, held_out = training_source(config)
    jobs: list[tuple[Role, Source, Keep]] = [("train", source, lambda i: i not in held_out)]
    if config.validation.enable:
        jobs.append(("validation", *_validation_source(config, source, held_out)))
    tokenizer = tokenizer_of(config)
    prepared = prepare_prompts if config.is_grpo else prepare_conversations
    return tokenizer.own_template, [
        (role, prepared(config, tokenizer, rows, keep, role)) for role, rows, keep in jobs
    ]


def _note_trained(ready: dict[Role, Prepared]) -> None:
    """Note the rows of validation whose tokens are trained on too, whichever file they are from."""
    if "validation" not in ready:
        return
    trained, validated = (
        np.array([hash(ids.tobytes()) for ids in ready[role].token_ids], np.int64)
        for role in ("train", "validation")
    )
    rows = ready["validation"]
    for i in np.flatnonzero(np.isin(validated, trained)).tolist():
        text = f"{rows.report.what}s that are trained on too: their results say little"
        rows.report.noted.setdefault(text, Rows()).add(str(rows.rows[i]["key"]))


def training_source(config: Config) -> tuple[Source, frozenset[int]]:
    """The training data, and which of its rows are held out for validation. Raises `DataError`."""
    dataset = config.train.train_policy.dataset
    if not dataset.is_named:
        raise DataError(f"{_POLICY}.dataset.name is empty: a job needs training data")
    if dataset.is_synthetic and dataset.test_size:
        raise DataError(
            "train.train_policy.dataset.test_size: synthetic:addition holds out pairs of operands, not rows; "
            "name it in validation.dataset.name instead"
        )
    apart = files_of(config.validation.dataset, "validation") if config.validation.enable else frozenset()
    source = open_source(dataset, "train", config.effective_seed, apart)
    _check_columns(config, source, "train")
    return source, held_out_rows(len(source), dataset.test_size, config.effective_seed)


def tokenizer_of(config: Config) -> PromptTokenizer:
    """The policy's tokenizer, after its external modules are imported."""
    policy = config.policy
    import_external(policy.external_modules)
    if policy.trust_remote_code:
        logger.warning("policy.trust_remote_code = true: code of %s may run here", policy.tokenizer[0])
    return PromptTokenizer.of(config)


def held_out_rows(n: int, test_size: float | int | None, seed: int) -> frozenset[int]:
    """The rows that `test_size` takes from training: the first of a seeded permutation.

    A float is a share of the rows (rounded up), an integer a number. Raises `DataError` if nothing would be
    left to train on.
    """
    if not test_size:
        return frozenset()
    wanted = math.ceil(test_size * n) if isinstance(test_size, float) else test_size
    if wanted >= n:
        raise DataError(
            f"train.train_policy.dataset.test_size = {test_size} holds out {wanted} of {n} rows: "
            "none is left to train on"
        )
    return frozenset(np.random.default_rng(seed).permutation(n)[:wanted].tolist())


def _validation_source(config: Config, train: Source, held_out: frozenset[int]) -> tuple[Source, Keep]:
    dataset = config.validation.dataset
    if dataset.is_named:
        apart = files_of(config.train.train_policy.dataset, "train")
        source = open_source(dataset, "validation", config.effective_seed, apart)
        _check_columns(config, source, "validation")
        return source, lambda _: True
    if held_out:
        return train, lambda i: i in held_out
    raise DataError(
        "validation has no rows: name a dataset in validation.dataset.name (synthetic:addition: its held-out "
        "pairs), or hold rows of the training data out with train.train_policy.dataset.test_size"
    )


def dataset_of(config: Config, role: Role) -> tuple[str, DatasetConfig]:
    """The section that names the rows of a role, and what it says; held-out rows are those of training."""
    if role == "validation" and config.validation.dataset.is_named:
        return "validation.dataset", config.validation.dataset
    return f"{_POLICY}.dataset", config.train.train_policy.dataset


def _check_columns(config: Config, source: Source, role: Role) -> None:
    if not config.is_grpo:
        sft = config.sft
        names = (
            ["prompt_column_name", "response_column_name"] if sft.has_pairs else ["conversation_column_name"]
        )
        names += ["query_column_name"] if sft.has_pairs and sft.query_column_name else []
        for name in names:
            where = "" if role == "train" else " (dataset of [validation])"
            require_column(source, getattr(sft, name), f"{_POLICY}.{name}{where}")
        return
    grpo, where = config.grpo, "" if role == "train" else " (dataset of [validation])"
    require_column(source, grpo.prompt_column, f"{_POLICY}.prompt_column_name{where}")
    if grpo.response_column_name:
        require_column(source, grpo.response_column_name, f"{_POLICY}.response_column_name{where}")
    elif "answer" in source.columns:
        logger.warning(
            "%s has a column `answer`, but train.train_policy.response_column_name is empty: rewards get no "
            'reference answer, and the column as row["columns"]["answer"]',
            source.name,
        )
    if _wants_source(config, role):
        require_column(source, grpo.data_source_column_name, f"{_POLICY}.data_source_column_name{where}")


def _wants_source(config: Config, role: Role) -> bool:
    """Whether a row needs its `data_source`: a reward or a teacher asks for it, or its column is named."""
    taught = role == "train" and any(teacher.source for teacher in config.teacher)
    named = config.grpo.data_source_column_name != "data_source"
    return taught or named or _scored_by_source(config, role)


def _scored_by_source(config: Config, role: Role) -> bool:
    weights = config.grpo.reward_weights if role == "train" else config.validation_reward_weights
    return "by_source" in weights


# ---- prompts ----------------------------------------------------------------------------------------------


def prepare_prompts(
    config: Config, tokenizer: PromptTokenizer, source: Source, keep: Keep, role: Role
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
                    _note(
                        out, "are JSON texts of messages, which the model gets as messages", source.where(i)
                    )
                _note_not_in_prompt(raw, (column, config.grpo.response_column_name), source.where(i), out)
                tools = _tools(raw, source.where(i), shows_tools, out)
                with named(source.where(i)):
                    asked = _with_system(config, prompt, source.where(i), out)
                    texts.append(tokenizer.with_tools(tools).text(asked))
                good.append((i, raw, prompt))
        forms = prompt_forms(config, tokenizer, [prompt for _, _, prompt in good], texts)
        for (i, raw, prompt), ids, more in zip(good, tokenizer.encode(texts), forms, strict=True):
            with judged(out.report.bad):
                if not prompt or not len(ids):
                    out.leave_out("an empty prompt", source.where(i))
                elif (kept := bound.fit(len(ids), source.where(i), out)) is not None:
                    row = prompt_row(config, role, source, i, raw, prompt, more, out.report)
                    if config.grpo.response_column_name and _is_blank(row["answer"]):
                        out.report.empty_references.add(source.where(i))
                    out.add(ids[kept], row)
    return out.finish(bound, tokenizer.decode)


def _is_blank(answer: Any) -> bool:
    """Whether a value, as JSON holds it, says nothing."""
    return not answer.strip() if isinstance(answer, str) else answer in (None, [], {})


def _note(out: Prepared, how: str, where: str) -> None:
    out.report.noted.setdefault(how, Rows()).add(where)


def _tools(raw: Row, where: str, shows_tools: bool, out: Prepared) -> list[Any] | None:
    """The tools that the chat template gets for a row: of its column `tools`, where the template shows them."""
    if "tools" not in raw:
        return None
    if not shows_tools:
        if raw["tools"] not in (None, [], "", "[]", "null"):
            _note(out, "have a column `tools`, which the chat template does not show the model", where)
        return None
    tools = read_tools(raw["tools"], where)
    has = "have" if tools else "have no"
    _note(out, f"{has} tools in the column `tools`, which the chat template gets", where)
    return tools


_NOT_IN_PROMPT = {
    **dict.fromkeys(
        ("system", "system_prompt"), "put it before the prompt's messages, as one of the role system"
    ),
    **dict.fromkeys(("history", "documents"), "write it into the prompt's messages"),
    **dict.fromkeys(("functions", "functions_json"), "call the column `tools`"),
    "chat_template_kwargs": "rollout.multi_turn_config has enable_thinking for all rows",
}
"""Columns that published data keeps beside the prompt, for a prompt that has them too; and what to do instead."""


def _note_not_in_prompt(raw: Row, read: Collection[str], where: str, out: Prepared) -> None:
    """Note columns of a row that others would put into its prompt. read: the columns that the config names."""
    names = {name.partition(".")[0] for name in read}
    for name, remedy in _NOT_IN_PROMPT.items():
        if name not in names and not _is_blank(without_nulls(raw.get(name))):
            _note(out, f"have a column `{name}`, which is not put into the prompt; {remedy}", where)


def with_system(config: Config, prompt: str | list[Message]) -> str | list[Message]:
    """A prompt or conversation behind `system_prompt`, unless it is empty or has a system message of its own."""
    system, messages = config.train.train_policy.system_prompt, as_messages(prompt)
    if not system or not prompt or has_system(messages):
        return prompt
    return [{"role": "system", "content": system}, *messages]


def _with_system(
    config: Config, prompt: str | list[Message], where: str, out: Prepared
) -> str | list[Message]:
    """As `with_system`; a row that keeps its own is noted."""
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
    """What `reward.prompt_forms` adds to each row: the prompt's own tokens, its text in the template. Never cut."""
    rows: list[Row] = [{} for _ in prompts]
    forms = config.reward.prompt_forms
    found: dict[str, list[Any]] = {
        "raw_prompt_ids": tokenizer.raw_ids(prompts) if "raw_prompt_ids" in forms else [],
        "full_prompt": texts,
    }
    for form in forms:
        for row, item in zip(rows, found[form], strict=True):
            row[form] = item
    return rows


def prompt_row(
    config: Config,
    role: Role,
    source: Source,
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
    if _wants_source(config, role):
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


# ---- conversations ----------------------------------------------------------------------------------------


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
                talk = _with_system(config, _conversation(config, source, i, raw), source.where(i), out)
                refuse_media(dataset, section, raw, talk, source.where(i))
                messages, unlearnt = without_flags(as_messages(talk), source.where(i))
                if unlearnt:
                    how = f"have turns of the assistant that are not learnt, as a key says ({', '.join(LOSS_FLAGS)})"
                    _note(out, how, source.where(i))
                _note_not_in_prompt(raw, [*read, sft.query_column_name], source.where(i), out)
                tools = _tools(raw, source.where(i), shows_tools, out)
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


# ---- files ------------------------------------------------------------------------------------------------


def _check_left(role: Role, report: FileReport) -> None:
    if report.kept:
        return
    reasons = "; ".join(f"{rows.count} with {reason}" for reason, rows in report.left_out.items())
    raise DataError(
        f"{role}: no row of {report.source} is left" + (f": {reasons}" if reasons else ": it is empty")
    )


def _write(path: Path, prepared: Prepared) -> None:
    report = prepared.report
    counted = {
        name: json.dumps({reason: rows.count for reason, rows in found.items()})
        for name, found in (("left_out", report.left_out), ("cut", report.cut))
    }
    metadata = {"source": report.source, **counted}
    write_prompts(path, prepared.token_ids, prepared.rows, prepared.masks or None, metadata)  # type: ignore[arg-type]


def main(argv: list[str] | None = None) -> int:
    """The command line; answers the exit code."""
    return command("controller.data.prepare", "Prepare a run's data.", prepare, argv)


if __name__ == "__main__":
    sys.exit(main())
