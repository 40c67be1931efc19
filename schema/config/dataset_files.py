"""Which files of a directory are a dataset's, and to which of its splits each belongs. No data file is opened.

    choose(directory, splits, role, apart) ─▶ Choice: the files that are read, and why each of the others is not

A file belongs to the split that a word of its name tells, else the nearest folder above it, in any case and with
digits or `set` behind the word (`train.jsonl`, `data/test-00000-of-00002.parquet`, `devSet/1.json`); words that are
glued to another count where a file next to it differs by them alone (`mathtrain.jsonl`, `mathtest.jsonl`). One whose
name tells splits of two kinds belongs to none. So no file is of two splits, and another split never takes the place
of one whose files are there and cannot be read. Of a folder that `datasets` saved, the Arrow files that its
`state.json` lists are read, and no others. Where `dataset_dict.json`, or the `configs` of the dataset card
(`README.md`), say which files are a split's, their word counts instead of names.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from schema.config.data_files import (
    DEAD_LINK,
    KINDS,
    OTHER_FORMAT,
    UNPACK,
    DataFile,
    FileId,
    UnreadableDataError,
    data_files,
    distinct,
    file_id,
    listing,
    split_words,
    without_suffix,
    words_of,
)
from schema.config.paths import DATA_FORMATS, read_regular
from schema.config.sections.dataset import DatasetConfig, DatasetKeys

Role = Literal["train", "validation"]
_GLUED = re.compile(r"(.+)(train|validation|valid|val|dev|test|eval)")
_DICT, _CARD = "dataset_dict.json", "README.md"
_MOST_OF_CARD = 1024 * 1024  # bytes; long cards have some tens of kilobytes
_FRONT = re.compile(r"---[ \t]*\r?\n(.*?)\n---[ \t]*\r?$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Choice:
    """read: the files in the order in which they are read. unread: those that look like data too, by reason.

    how: what was chosen where no split is named; empty: one is.
    """

    read: list[Path]
    unread: dict[str, list[Path]] = field(default_factory=dict)
    how: str = ""


def files_of(dataset: DatasetConfig, role: Role) -> frozenset[FileId]:
    """The local files of a dataset that the other role leaves out of a directory.

    Those of validation, and those that training names one by one. Empty where they cannot be read: the rule for that
    dataset reports it.
    """
    try:
        paths = [path for _, part in dataset.parts for path in _own_files(part, role)]
        return frozenset(file_id(path) for path in paths if path.is_file())
    except (OSError, ValueError):
        return frozenset()


def _own_files(dataset: DatasetKeys, role: Role) -> list[Path]:
    paths = [Path(file) for file in dataset.files or [dataset.name] if file]
    if len(paths) == 1 and paths[0].is_dir() and role == "validation":
        return choose(paths[0], dataset.splits, role).read
    return paths


def _with_glued(files: list[DataFile]) -> list[DataFile]:
    """The files, those with a glued word given to its split."""
    stems = {(file.path.parent, without_suffix(file.path.name).lower()) for file in files}

    def labelled(file: DataFile) -> DataFile:
        match = None if file.words else _GLUED.fullmatch(without_suffix(file.path.name).lower())
        if match is None:
            return file
        prefix, word = match[1], match[2]
        others = ["", *(other for other, kind in KINDS.items() if kind != KINDS[word])]
        near = any((file.path.parent, prefix + other) in stems for other in others)
        return replace(file, words=(word,)) if near else file

    return [labelled(file) for file in files]


def choose(directory: Path, splits: Sequence[str], role: Role, apart: Collection[FileId] = frozenset()) -> Choice:
    """The files of the wanted splits, split by split, each in order of its names.

    Without named splits: those of the role; else those that name none; else the only split that there is. apart:
    files of the other role (`files_of`). Raises `UnreadableDataError` where nothing is left or more
    than one split could be meant, OSError.
    """
    unread: dict[str, list[Path]] = {}
    every = sorted(data_files(directory, unread), key=lambda file: file.path)
    declared = _saved_splits(directory, every) or _card_splits(directory, every, unread)
    if declared:
        listed = {path for paths in declared.values() for path in paths}
        others = [file.path for file in every if file.path not in listed]
        unread |= {f"of no split that {_DICT} or {_CARD} declares": others} if others else {}
        every = [file for file in every if file.path in listed]
    files = _with_glued(list(distinct(every, unread)))
    if not files:
        not_read = f"; not read: {_described(directory, unread)}" if unread else ""
        raise UnreadableDataError(
            f"{directory} holds no data file ({DATA_FORMATS}){not_read}",
            "write the rows as one of these, or name its files in `files`",
        )
    if declared:
        chosen = splits or [default_split(str(directory), list(declared), role)]
        chosen_files = _declared(directory, files, declared, chosen)
        how = "" if splits else f"no split is named: {chosen[0]} of {', '.join(declared)}"
    else:
        chosen_files, how = _named(directory, files, splits) if splits else _default(directory, files, role, unread)
    read = [file for file in chosen_files if file.id not in apart]
    other_role = "validation" if role == "train" else "training"
    if not read:
        raise UnreadableDataError(
            f"{directory}: {other_role} reads all of the files that would be of {role} "
            f"({listing([file.name for file in chosen_files])}), none is left",
            "name a split of its own for each, or hold rows out with train.train_policy.dataset.test_size; to train "
            "and validate on the same rows, name the files in `files`",
        )
    read_ids, chosen_ids = {file.id for file in read}, {file.id for file in chosen_files}
    for file in files:
        if file.id not in read_ids:
            reason = f"{other_role} reads it" if file.id in chosen_ids else _why_not(file, how, declared)
            unread.setdefault(reason, []).append(file.path)
    return Choice([file.path for file in read], unread, how)


def default_split(name: str, splits: Sequence[str], role: Role) -> str:
    """The split that is read of a dataset whose splits are declared, where none is named.

    Raises `UnreadableDataError` where more than one could be meant.
    """
    if len(splits) == 1:
        return splits[0]
    for word in (word for word, kind in KINDS.items() if (kind == "train") == (role == "train")):
        for split in splits:
            if split.lower() == word:
                return split
    raise UnreadableDataError(f"dataset `{name}` has the splits {', '.join(splits)}", "name one with `split`")


def _saved_splits(directory: Path, files: Sequence[DataFile]) -> dict[str, set[Path]]:
    """The files of each split of a `DatasetDict` that was saved in a directory; empty: it is none."""
    try:
        names = json.loads((directory / _DICT).read_text(encoding="utf-8"))["splits"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return {
        str(name): {file.path for file in files if Path(file.name).parts[0] == str(name)}
        for name in (names if isinstance(names, list) else ())
    }


def _card_splits(directory: Path, files: Sequence[DataFile], unread: dict[str, list[Path]]) -> dict[str, set[Path]]:
    """The files of each split that the card of a dataset declares (`configs`); empty: it declares none.

    Raises `UnreadableDataError` where it declares several configurations and says of none that it is the default.
    """
    configs = [entry for entry in _card_configs(directory / _CARD, unread) if entry.get("data_files")]
    if not configs:
        return {}
    defaults = [entry for entry in configs if entry.get("default") is True] or [
        entry for entry in configs if len(configs) == 1 or entry.get("config_name") == "default"
    ]
    if not defaults:
        names = listing([str(entry.get("config_name")) for entry in configs])
        raise UnreadableDataError(
            f"{directory / _CARD} declares several configurations ({names}), which are datasets of their own",
            "name the folder of one, or its files in `files`",
        )
    splits: dict[str, set[Path]] = {}
    for entry in _as_list(defaults[0]["data_files"]):
        part = entry if isinstance(entry, dict) else {"split": "train", "path": entry}
        paths = splits.setdefault(str(part.get("split")), set())
        for glob in _as_list(part.get("path")):
            pattern = _pattern(os.path.join(str(defaults[0].get("data_dir") or ""), str(glob)))
            paths.update(file.path for file in files if pattern.fullmatch(file.name))
    return splits


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _card_configs(card: Path, unread: dict[str, list[Path]]) -> list[dict[str, Any]]:
    """The entries of `configs` in the card of a dataset, if any; one whose YAML is broken goes to `unread`."""
    from schema.config.loading.yamlread import read_yaml
    from schema.config.problem import ConfigError

    try:
        head = _FRONT.match(read_regular(card, _MOST_OF_CARD).decode("utf-8-sig"))
        configs = read_yaml(head[1], _CARD).data.get("configs") if head and "configs:" in head[1] else None
    except ConfigError:
        unread.setdefault("its YAML is broken, so names tell the splits", []).append(card)
        return []
    except (OSError, ValueError):
        return []
    return [entry for entry in configs if isinstance(entry, dict)] if isinstance(configs, list) else []


_WILD = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


def _pattern(glob: str) -> re.Pattern[str]:
    """A pattern of a card for paths below its directory: `*` stays in one folder, `**` does not."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", os.path.normpath(glob))
    return re.compile("".join(_WILD.get(part, re.escape(part)) for part in parts))


def _declared(
    directory: Path, files: list[DataFile], declared: Mapping[str, set[Path]], splits: Sequence[str]
) -> list[DataFile]:
    """The files of declared splits, split by split."""
    if unknown := [split for split in splits if split not in declared]:
        raise UnreadableDataError(
            f"{directory} holds no data file of split {unknown[0]!r}; it has the splits {', '.join(declared)}",
            "name one of these, or the files in `files`",
        )
    by_id = {file.id: file for split in splits for file in files if file.path in declared[split]}
    if not by_id:
        raise UnreadableDataError(f"{directory}: no file of the split {listing(splits)} can be read")
    return list(by_id.values())


def _default(
    directory: Path, files: list[DataFile], role: Role, unread: Mapping[str, list[Path]]
) -> tuple[list[DataFile], str]:
    """The files that are read where no split is named, and how they were chosen.

    Raises `UnreadableDataError`: more than one split could be meant, or the files of the one cannot be read.
    """
    labels = {file.word for file in files if file.word}
    for kind in ("train",) if role == "train" else ("validation", "test"):
        words = [word for word, of in KINDS.items() if of == kind and word in labels]
        if words:
            taken = words if role == "train" else words[:1]
            chosen = [file for file in files if file.word in taken]
            return chosen, f"no split is named: the files of {listing(taken)}"
        _refuse_lost(directory, kind, files, unread)
    plain = [file for file in files if not file.words]
    if plain:
        return plain, f"no split is named: no file is of a {role} split, so those that name none"
    kinds = {KINDS[word] for word in labels}
    if len(kinds) == 1:
        return [file for file in files if file.word], f"no split is named: {listing(sorted(labels))} is the only one"
    others = f"and the splits {listing(sorted(labels))}" if labels else "and none whose path names one kind of split"
    names = listing([file.name for file in files])
    raise UnreadableDataError(
        f"{directory} has no file of a {role} split, {others}; its files are {names}",
        "name one with `split`, or name the files in `files`",
    )


def _refuse_lost(directory: Path, kind: str, files: list[DataFile], unread: Mapping[str, list[Path]]) -> None:
    """Raise `UnreadableDataError` where files of a kind of split are there and none of them is read."""
    lost = {file.name: _why_not(file, "", {}) for file in files if kind in file.kinds}
    for reason, paths in unread.items():
        for path in paths if reason in (UNPACK, OTHER_FORMAT, DEAD_LINK) else ():
            relative = path.relative_to(directory)
            parts = (*relative.parts[:-1], relative.name.partition(".")[0])
            if kind in {KINDS[word] for word in words_of(parts)}:
                lost[str(relative)] = reason
    if lost:
        name, reason = next(iter(lost.items()))
        raise UnreadableDataError(
            f"{directory}: no file of a {kind} split can be read, although {listing(list(lost))} is there ({name}: "
            f"{reason})",
            "make it readable, rename it, name one with `split`, or name the files in `files`",
        )


def _named(directory: Path, files: list[DataFile], splits: Sequence[str]) -> tuple[list[DataFile], str]:
    chosen: dict[FileId, DataFile] = {}
    for split in splits:
        end = r"(?![A-Za-z0-9])" if split[-1:].isdigit() else "(?![A-Za-z])"
        pattern = re.compile(rf"(?<![A-Za-z0-9]){re.escape(split)}{end}", re.IGNORECASE)
        kinds = {KINDS[word] for word in split_words(split)}
        named = [file for file in files if split and (pattern.search(file.name) or split.lower() in file.words)]
        # A name of two kinds is of the named one where that has no other.
        of_split = [file for file in named if file.kinds <= kinds] or [
            file for file in named if len(file.kinds) > 1 and pattern.search(file.path.name)
        ]
        if not of_split:
            names = listing([file.name for file in files])
            hint = "name a split by a word of its path that no other split has, or name the files in `files`"
            raise UnreadableDataError(f"{directory} holds no data file of split {split!r}; it has {names}", hint)
        for file in of_split:
            chosen.setdefault(file.id, file)
    return list(chosen.values()), ""


def _why_not(file: DataFile, how: str, declared: Mapping[str, Collection[Path]]) -> str:
    """Why a file that could be read is not. how: as in `Choice`. declared: the files of splits that are declared."""
    if split := next((split for split, paths in declared.items() if file.path in paths), ""):
        return f"of the split {split}"
    if len(file.kinds) > 1:
        return f"its name or names tell splits of two kinds, {listing(sorted(file.kinds))}"
    if file.word:
        return f"of the split {file.word}"
    return "it names no split, and others do" if how else "not of the named split"


def _described(directory: Path, unread: dict[str, list[Path]]) -> str:
    return "; ".join(
        f"{listing([str(path.relative_to(directory)) for path in paths])} ({reason})"
        for reason, paths in unread.items()
    )
