"""Rules of the datasets that the user names: what is read, which columns, how long a prompt may be; and of the
places where the job writes. Models and rewards have rules of their own (`rules.model`, `rules.reward`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from schema.config.chat_template import TemplateError, read_template
from schema.config.columns import Columns, columns_of, flat
from schema.config.data_files import FileId, UnreadableDataError
from schema.config.dataset_files import Role, files_of
from schema.config.loading.explain import closest
from schema.config.paths import DATA_FORMATS, address_fault, exists, home_hint, is_file, local_path
from schema.config.problem import Absent, Problem
from schema.config.root import Config
from schema.config.rules.batch import longest_sequence
from schema.config.rules.idle import written
from schema.config.rules.own_code import own_function
from schema.config.rules.rows import Each, Refusal, Row, Rule, section
from schema.config.secrets import masked
from schema.config.sections.dataset import DatasetConfig, DatasetKeys, DatasetPart
from schema.config.sections.evaluation import EvaluationConfig
from schema.config.sections.train_policy import SFTDataConfig
from schema.config.sections.validation import ValidationPart
from schema.storage.address import EXAMPLES, AddressError, is_remote, parse_address

_POLICY = "train.train_policy"
_TRAIN, _VALIDATION = f"{_POLICY}.dataset", "validation.dataset"
_SYNTHETIC = "synthetic:addition"
_SYNTHETIC_SPLITS = ("train", "held_out")
_SYNTHETIC_COLUMNS = frozenset({"prompt", "answer", "a", "b", "data_source"})
_SYNTHETIC_OPTIONS: dict[str, tuple[type, float, float]] = {  # type, least, most
    "n": (int, 1, 5_000_000),
    "digits": (int, 1, 12),
    "phrasings": (int, 1, 4),
    "held_out": (float, 0.0, 0.99),
    "seed": (int, 0, 2**63 - 1),
    "demonstrations": (bool, False, True),
}


def _validates(config: Config) -> bool:
    return config.validation.enable


# ---- what is read -----------------------------------------------------------------------------------------


def dataset_can_be_read(config: Config) -> Iterator[Problem]:
    """Local data exists and has the named columns; the built-in generator knows its options."""
    yield from dataset_problems(config, _TRAIN, config.train.train_policy.dataset, "train")
    if _validates(config):
        yield from dataset_problems(config, _VALIDATION, config.validation.dataset, "validation")


def dataset_problems(config: Config, key: str, dataset: DatasetConfig, role: Role) -> Iterator[Problem]:
    """Report the faults of all parts of a dataset: `key` is its section."""
    for place, part in dataset.parts:
        yield from _part_problems(config, f"{key}{place}", part, role)


def _part_problems(config: Config, key: str, dataset: DatasetKeys, role: Role) -> Iterator[Problem]:
    if dataset.custom_class:
        problem = own_function(f"{key}.custom_class", dataset.custom_class, "dataset file", classes=True)
        if isinstance(problem, Problem):
            yield problem
        for name in ("subset", "revision", "options"):
            if value := getattr(dataset, name):
                message = "has no effect: a dataset class gets the keys of [custom]"
                yield Problem(
                    f"{key}.{name}", message, value, "write it in [custom]", related=(f"{key}.custom_class",)
                )
        return
    yield from _idle_keys(key, dataset)
    if dataset.files:
        yield from _file_problems(config, key, dataset)
        return
    if dataset.is_synthetic:
        demonstrated = ["conversations"] if dataset.options.get("demonstrations") is True else []
        generated = flat([*sorted(_SYNTHETIC_COLUMNS), *demonstrated])
        yield from _synthetic_problems(key, dataset)
        yield from _column_problems(config, key, dataset, dataset.name, generated)
        return
    path = local_path(dataset.name) if dataset.name else None
    if path is None:
        return
    if "://" in dataset.name:
        yield from _address_problems(f"{key}.name", dataset.name)
        return
    try:
        columns = columns_of(path, dataset.splits, role, _apart(config, key))
        if columns is not None:
            yield from _column_problems(config, key, dataset, dataset.name, columns)
    except UnreadableDataError as error:
        kind, hint = Problem if exists(path) else Absent, error.hint or _PATH_HINT
        yield kind(f"{key}.name", str(error), dataset.name, hint, related=(f"{key}.split",))
    if is_file(path) and dataset.splits not in ([], ["train"]):
        message = f"{path} is one file and has no splits"
        yield Problem(f"{key}.split", message, dataset.split, "leave it out")


def _address_problems(key: str, name: str) -> Iterator[Problem]:
    """Whether data can be read from an address is seen when it is read: here nothing is asked."""
    if not is_remote(name):
        if fault := address_fault(name, "data is"):
            remedy = fault[1] if name.startswith(("file:", "hf:")) else f"{fault[1]}; or at {EXAMPLES}"
            yield Problem(key, fault[0], name, remedy)
        return
    try:
        parse_address(name)
    except AddressError as error:
        yield Problem(key, str(error), masked(name), error.hint)


def _apart(config: Config, key: str) -> frozenset[FileId]:
    """The files that the dataset of this section leaves out of a directory, since the other role reads them."""
    section = _section_of(key)
    if section == _TRAIN and _validates(config):
        return files_of(config.validation.dataset, "validation")
    return files_of(config.train.train_policy.dataset, "train") if section == _VALIDATION else frozenset()


def _section_of(key: str) -> str:
    """The section of a dataset, or of a part of it."""
    return key.partition(".part[")[0]


_PATH_HINT = f"paths are relative to the current directory; files end in {DATA_FORMATS}"


def _file_problems(config: Config, key: str, dataset: DatasetKeys) -> Iterator[Problem]:
    """Each of the files is there and has the columns."""
    for file in dict.fromkeys(dataset.files):
        path = Path(file)
        if "://" in file:
            yield from _address_problems(f"{key}.files", file)
            continue
        if exists(path) and path.is_dir():
            hint = f'name its files, or the directory alone: {key}.name = "{file}"'
            yield Problem(f"{key}.files", f"{file} is a directory", file, hint)
            continue
        try:
            columns = columns_of(path)
        except UnreadableDataError as error:
            kind = Problem if exists(path) else Absent
            yield kind(f"{key}.files", str(error), file, error.hint or _PATH_HINT)
            continue
        if columns is not None:
            yield from _column_problems(config, key, dataset, file, columns)


def _idle_keys(key: str, dataset: DatasetKeys) -> Iterator[Problem]:
    """Keys that mean nothing for this kind of dataset."""
    idle: list[tuple[str, str, tuple[str, ...]]] = []
    names = (f"{key}.name", f"{key}.files")
    if dataset.files:
        idle.append(("name", "the data is named twice: by its name and by its files", names[1:]))
        idle.append(("split", "files have no splits", names[1:]))
    if dataset.files or (dataset.name and not dataset.is_synthetic):
        idle.append(("options", f"only the built-in generator ({_SYNTHETIC}) takes options", names))
    if dataset.files or dataset.is_synthetic or (dataset.name and local_path(dataset.name) is not None):
        idle += [(name, f"only a dataset on the hub has a {name}", names) for name in ("subset", "revision")]
    for name, message, related in idle:
        if value := getattr(dataset, name):
            yield Problem(f"{key}.{name}", message, value, "leave it out", related=related)


# ---- columns ----------------------------------------------------------------------------------------------


def _column_problems(
    config: Config, key: str, dataset: DatasetKeys, source: str, columns: Columns
) -> Iterator[Problem]:
    has_source = isinstance(dataset, DatasetPart) and bool(dataset.source)
    named_columns = list(_wanted_columns(config, _section_of(key), dataset, has_source=has_source))
    if not isinstance(dataset, DatasetPart) and _section_of(key) != "evaluation.dataset":
        policy = config.train.train_policy
        named_columns += [(f"{_POLICY}.{name}", column, False) for name, column in policy.optional_columns.items()]
    for column_key, column, is_default in named_columns:
        if columns.has(column):
            continue
        close = closest(column, columns.names())
        message = f"{source} does not have the {'default ' if is_default else ''}column `{column}`"
        hint = f'write {column_key} = "{close}"' if close else f"its columns: {', '.join(sorted(columns.fields))}"
        if dataset.is_synthetic and column == "conversations":
            hint = f"write {key}.options.demonstrations = true"
        related = (f"{key}.name", f"{key}.files", f"{key}.options")
        yield Problem(column_key, message, column, hint, related=related)


def _wanted_columns(
    config: Config, dataset_key: str, dataset: DatasetKeys, *, has_source: bool
) -> Iterator[tuple[str, str, bool]]:
    """(key, column, whether it is the default) of each column that is read of a dataset.

    has_source: whether a part names its source itself.
    """
    if dataset_key == "evaluation.dataset":
        yield from _evaluation_columns(config.evaluation)
        return
    curriculum = config.curriculum.column_name
    if curriculum and dataset_key == _TRAIN:
        yield f"{_POLICY}.curriculum.column_name", curriculum, False
    reference = config.validation.reference_column_name
    if reference and not config.is_grpo and config.generates and dataset_key == _VALIDATION:
        yield "validation.reference_column_name", reference, False
    if not config.is_grpo:
        for name, column in config.sft.columns.items():
            yield f"{_POLICY}.{name}", column, column == "conversations"
        return
    policy = config.grpo
    yield f"{_POLICY}.prompt_column_name", policy.prompt_column, not policy.prompt_column_name
    if policy.response_column_name:
        yield f"{_POLICY}.response_column_name", policy.response_column_name, False
    source, is_default = policy.data_source_column_name, policy.data_source_column_name == "data_source"
    if not has_source and (not is_default or _scored_by_source(config, dataset_key, dataset)):
        yield f"{_POLICY}.data_source_column_name", source, is_default
    if policy.domain_column_name and dataset_key == _TRAIN:
        yield f"{_POLICY}.domain_column_name", policy.domain_column_name, False


def _evaluation_columns(section: EvaluationConfig) -> Iterator[tuple[str, str, bool]]:
    default = EvaluationConfig()
    names = ["prompt_column_name", "responses_column_name", "reference_column_name"]
    if "by_source" in section.reward_weights or (section.data_source_column_name != default.data_source_column_name):
        names.append("data_source_column_name")
    for name in names:
        value = getattr(section, name)
        if value:
            yield f"evaluation.{name}", value, value == getattr(default, name)


def _scored_by_source(config: Config, dataset_key: str, dataset: DatasetKeys) -> bool:
    """Whether rewards of the dataset's rows are chosen by their source; held-out rows are validated too."""
    roles = [config.training_reward_weights] if dataset_key == _TRAIN else []
    if _validates(config) and (dataset_key == _VALIDATION or not config.validation.dataset.is_named):
        label = dataset.label if dataset_key == _VALIDATION and isinstance(dataset, DatasetPart) else ""
        roles.append(config.validation.of_set(label).reward_weights or config.grpo.reward_weights)
    return any("by_source" in weights for weights in roles)


# ---- lengths ----------------------------------------------------------------------------------------------


def prompts_fit(config: Config) -> Iterator[Problem]:
    """The longest prompt and the longest answer fit into a sequence."""
    dataset = config.train.train_policy.dataset
    if not config.is_grpo:
        for section, conversations in (*_parts(_TRAIN, dataset), *_parts(_VALIDATION, config.validation.dataset)):
            if (longest := conversations.max_prompt_length) is not None:
                message = "supervised training reads whole conversations"
                hint = "leave it out, and write policy.model_max_length for the longest of them"
                related = (f"{_POLICY}.type",)
                yield Problem(f"{section}.max_prompt_length", message, longest, hint, related=related)
        if _validates(config):
            yield from _idle_validation(config.validation.dataset)
        return
    answer = ("rollout.max_response_length", config.rollout.max_response_length)
    for section, part in _parts(_TRAIN, dataset):
        yield from _prompt_problem(config, section, part, *answer)
    if _validates(config):
        own, validation = config.validation.max_response_length, config.validation.dataset
        if own is not None:
            answer = ("validation.max_response_length", own)
        if validation.is_named:
            for section, part in _parts(_VALIDATION, validation):
                longest = part.max_response_length if isinstance(part, ValidationPart) else None
                of_part = answer if longest is None else (f"{section}.max_response_length", longest)
                yield from _prompt_problem(config, section, part, *of_part)
        elif own is not None:
            for section, part in _parts(_TRAIN, dataset):
                yield from _prompt_problem(config, section, part, *answer)
        yield from _idle_validation(validation)


def _parts(section: str, dataset: DatasetConfig) -> list[tuple[str, DatasetKeys]]:
    return [(f"{section}{place}", part) for place, part in dataset.parts]


def _prompt_problem(
    config: Config, section: str, dataset: DatasetKeys, answer_key: str, answer: int
) -> Iterator[Problem]:
    key, longest = f"{section}.max_prompt_length", dataset.max_prompt_length
    limit_key, limit = longest_sequence(config)
    least = answer if answer < limit else 1  # one that may fill the sequence takes what the prompt leaves
    if longest is None or longest + least <= limit:
        return
    message = f"{longest} tokens and {answer_key} = {answer} are more than {limit_key} = {limit}"
    hint = f"write {key} = {limit - least}, or {limit_key} = {longest + answer}"
    yield Problem(key, message, longest, hint, related=(answer_key, limit_key))


def _idle_validation(dataset: DatasetConfig) -> Iterator[Problem]:
    """Without data of its own, validation takes held-out training rows, prepared as those are."""
    if dataset.is_named:
        return
    of_rows = ("max_samples", "max_prompt_length", "overlong_prompts", "image_column_name")
    keys = ("subset", "revision", "split", "options", *of_rows)
    for name, value in written(dataset, *keys, "custom_class_timeout"):
        message = "has no effect on rows that the training data holds out"
        hint = f"write {_TRAIN}.{name}, or name the data: {_VALIDATION}.name"
        yield Problem(f"{_VALIDATION}.{name}", message, value, hint, related=(f"{_VALIDATION}.name",))


# ---- the built-in generator -------------------------------------------------------------------------------


def _synthetic_problems(key: str, dataset: DatasetKeys) -> Iterator[Problem]:
    if dataset.name != _SYNTHETIC:
        message = f'unknown generator "{dataset.name}"'
        yield Problem(f"{key}.name", message, dataset.name, f'write {key}.name = "{_SYNTHETIC}"')
    for split in dataset.splits:
        if split not in _SYNTHETIC_SPLITS:
            hint = f"its splits: {', '.join(_SYNTHETIC_SPLITS)}"
            yield Problem(f"{key}.split", f"{_SYNTHETIC} has no split `{split}`", split, hint)
    for name, value in dataset.options.items():
        option = f"{key}.options.{name}"
        if name not in _SYNTHETIC_OPTIONS:
            close = closest(name, _SYNTHETIC_OPTIONS)
            hint = f"did you mean `{close}`?" if close else f"known here: {', '.join(_SYNTHETIC_OPTIONS)}"
            yield Problem(option, f"unknown option of {_SYNTHETIC}", value, hint)
            continue
        kind, least, most = _SYNTHETIC_OPTIONS[name]
        if kind is bool and not isinstance(value, bool):
            yield Problem(option, "expected true or false", value, f"write {option} = true")
        elif kind is not bool and not (_is_number(value, kind) and least <= value <= most):
            words = "an integer" if kind is int else "a number"
            message = f"expected {words} from {least} to {most}, got {value!r}"
            yield Problem(option, message, value, f"write {option} = {least}")


def _is_number(value: Any, kind: type) -> bool:
    return not isinstance(value, bool) and isinstance(value, int if kind is int else int | float)


# ---- places -----------------------------------------------------------------------------------------------


def places_can_be_used(config: Config) -> Iterator[Problem]:
    """Directories that will be written are not files, and what is resumed from exists."""
    key, name = "train.output_dir", config.train.output_dir
    if "://" in name:
        hint = "write the path of a directory that all machines of the job see"
        yield Problem(key, f"{name} is not a directory", name, hint)
    elif name.startswith("~"):
        yield Problem(key, f"{name} is not a path", name, home_hint(name))
    elif is_file(Path(name)):
        yield Problem(key, f"{name} is a file, not a directory", name, "name a directory")
    resume = config.train.resume
    if isinstance(resume, str) and not (resume and exists(Path(resume))):
        newest = "name a checkpoint's directory, or write train.resume = true for the newest of output_dir"
        missing = (f"checkpoint '{resume}' does not exist", home_hint(resume) or newest)
        message, hint = address_fault(resume, "a checkpoint is") or missing
        yield Problem("train.resume", message, resume, hint)


# ---- the chat template ------------------------------------------------------------------------------------


def template_can_be_read(config: Config) -> Iterator[Problem]:
    """The file of a chat template is there; whether it renders is seen before the first row is."""
    try:
        read_template(config)
    except TemplateError as error:
        yield error.problem


def _own_validation_data(config: Config) -> str:
    synthetic = all(part.is_synthetic for _, part in config.train.train_policy.dataset.parts)
    own = f'"{_SYNTHETIC}" for its held-out pairs' if synthetic else '"path/to/heldout.parquet"'
    return f"write {{!}} = {own}, or {_TRAIN}.test_size = 0.1"


def held_out_rows_are_of_training(config: Config) -> Iterator[Problem]:
    """Rows are held out of training data, less than all of them."""
    for key, part in _parts(_TRAIN, config.train.train_policy.dataset):
        if _is_share(part.test_size):
            message = f"a float is a share of the dataset, below 1.0, got {part.test_size}"
            hint = f"write {key}.test_size = {int(part.test_size or 0)} for rows, or a share below 1.0"
            yield Problem(f"{key}.test_size", message, part.test_size, hint)
    for key, part in _parts(_VALIDATION, config.validation.dataset):
        if part.test_size is not None:
            hint = f"write {_TRAIN}.test_size to hold out training rows"
            yield Problem(f"{key}.test_size", "has no effect here", part.test_size, hint)


def _is_share(size: float | None) -> bool:
    return isinstance(size, float) and size >= 1.0


Pair = Row[SFTDataConfig]
DATA_RULES: tuple[Rule, ...] = (
    Refusal(f"{_TRAIN}.name", lambda c: not c.train.train_policy.dataset.is_named, "no dataset is named",
        'write {.name!} = "path/to/data.parquet", or "synthetic:addition" to try it out', (".files",)),
    held_out_rows_are_of_training,
    Refusal(f"{_VALIDATION}.name",
        lambda c: _validates(c) and not c.validation.dataset.is_named
        and c.train.train_policy.dataset.is_named and not c.train.train_policy.dataset.holds_out,
        "no dataset is named and the training data holds nothing out",
        _own_validation_data, (_TRAIN, "validation.enable", ".files")),
    dataset_can_be_read,
    Each(
        section(_POLICY, lambda c: None if c.is_grpo else c.sft),
        Pair("prompt_column_name", lambda sft: bool(sft.prompt_column_name) and not sft.response_column_name,
            "needs {.response_column_name!}",
            "write {.response_column_name!} too, or {.conversation_column_name!} in place of both",
            (".response_column_name",)),
        Pair("response_column_name", lambda sft: bool(sft.response_column_name) and not sft.prompt_column_name,
            "needs {.prompt_column_name!}",
            "write {.prompt_column_name!} too, or {.conversation_column_name!} in place of both",
            (".prompt_column_name",)),
        Pair("query_column_name", lambda sft: bool(sft.query_column_name) and not sft.prompt_column_name,
            "follows the question, which {.prompt_column_name!} names",
            "write {.prompt_column_name!} too, or leave it out", (".prompt_column_name",)),
        Pair("conversation_column_name",
            lambda sft: sft.has_pairs and "conversation_column_name" in sft.model_fields_set,
            "{.prompt_column_name!} and {.response_column_name!} are read in place of a conversation",
            "leave it out, or those two", (".prompt_column_name", ".response_column_name")),
    ),
    prompts_fit,
    places_can_be_used,
    template_can_be_read,
)  # fmt: skip
