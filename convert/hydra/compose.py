"""A configuration composed by Hydra's rules: its files merged in the order of its defaults, then the words applied.

The files are read like any other YAML here: bounded, without tags, without objects. `${…}` stays as written.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convert.engine.keys import Path as KeyPath
from convert.engine.keys import leaves, lookup
from convert.hydra.defaults import CompositionError, Part, ordered
from convert.hydra.words import Act, Override
from schema.config.loading.tomlread import read_text
from schema.config.loading.yamlread import YamlFile, read_yaml
from schema.config.problem import ConfigError, Problem

_HEADER = re.compile(r"^\s*#\s*@package\s+(\S+)\s*$", re.MULTILINE)
_REFERENCE = re.compile(r"\$\{([\w.\-]+)\}")
_ABSENT: Any = object()
HEADER_BYTES = 512
"""Where the line `# @package …` of a file has to stand."""
SEARCH_PATH = "hydra.searchpath"


@dataclass(frozen=True)
class Composed:
    """The result. data: nested. lines: of keys that the primary file has and no word has changed.

    files: what was merged, in this order. left_out: names that are not there and whose keys are known otherwise.
    notes: what Hydra itself would refuse, and how it is read here.
    """

    data: dict[str, Any]
    lines: dict[KeyPath, int]
    files: tuple[Path, ...]
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass
class SearchPath:
    """Directories in which named files are looked for, the first one first.

    known: names of files that may be missing, since what they say is known otherwise.
    """

    folders: list[Path]
    known: Collection[str] = ()
    read: dict[str, YamlFile | None] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def path_of(self, name: str) -> Path | None:
        """The first file of this name."""
        paths = (folder / f"{name}.yaml" for folder in self.folders)
        return next((path for path in paths if path.is_file()), None)

    def load(self, name: str, at: Path | None = None) -> YamlFile | None:
        """A file, read once; None where it is not there. at: its place, where that is known.

        Raises ConfigError where it is not YAML that can be read.
        """
        if name not in self.read:
            path = at or self.path_of(name)
            if path is None:
                return None
            text = read_text(path, "YAML")
            is_empty = not re.sub(r"#[^\n]*", "", text).strip()
            self.read[name] = YamlFile({}, {}, frozenset()) if is_empty else read_yaml(text, str(path))
            header = _HEADER.search(text[:HEADER_BYTES])
            self.headers[name] = header[1] if header else ""
        return self.read[name]

    def defaults_of(self, name: str) -> tuple[list[Any], str] | None:
        """The list of defaults of a file and its package header; None where the file is not there."""
        loaded = self.load(name)
        if loaded is None:
            return None
        listed = loaded.data.get("defaults", [])
        if not isinstance(listed, list):
            raise CompositionError(f"`defaults` of {name} is not a list")
        return listed, self.headers[name]

    def has_group(self, name: str) -> bool:
        """Whether there is a directory of this name."""
        return any((folder / name).is_dir() for folder in self.folders)

    def is_left_out(self, name: str) -> bool:
        """Whether a file that is not there may be passed over; it is noted."""
        if name not in self.known:
            return False
        if name not in self.missing:
            self.missing.append(name)
        return True


def compose(
    primary: Path, words: Sequence[Override], folders: Iterable[Path] = (), known: Collection[str] = ()
) -> Composed:
    """The configuration of a primary file and the words of a command line.

    folders: more directories of the search path, after that of the file and those of `hydra.searchpath`.
    known: names of files that may be missing. Raises ConfigError.
    """
    files = SearchPath([primary.parent], known)
    name = primary.stem
    try:
        first = files.load(name, primary)
        assert first is not None
        files.folders += [*_search_path(first.data, words, primary.parent), *folders]
        groups = [word for word in words if files.has_group(word.key) and not isinstance(word.value, dict)]
        parts = ordered(files, name, groups)
        data: dict[str, Any] = {}
        for part in parts:
            _place(data, part, files)
        applied = _Applied(data, not files.missing)
        for word in words:
            if word not in groups:
                applied.apply(word)
    except CompositionError as error:
        searched = ", ".join(map(str, files.folders))
        hint = error.hint or f"looked in {searched}; --search-path DIR adds a directory"
        raise ConfigError([Problem("", str(error), hint=hint, file=str(primary))]) from None
    data.pop("defaults", None)
    lines = {
        path: line
        for path, line in first.lines.items()
        if path not in applied.changed and lookup(data, path, _ABSENT) == lookup(first.data, path, None)
    }
    merged = tuple(path for part in parts if (path := files.path_of(part.file)) is not None)
    return Composed(data, lines, tuple(dict.fromkeys(merged)), tuple(files.missing), tuple(applied.notes))


def _search_path(primary: Mapping[str, Any], words: Sequence[Override], folder: Path) -> list[Path]:
    """The directories of `hydra.searchpath`: those that are here, or below that of the file."""
    listed = next((word.value for word in words if word.key == SEARCH_PATH), None)
    if listed is None:
        listed = lookup(primary, tuple(SEARCH_PATH.split(".")), [])
    if not isinstance(listed, list) or not all(isinstance(entry, str) for entry in listed):
        raise CompositionError(f"{SEARCH_PATH} is not a list of addresses", "write [file:///a/directory]")
    names = [entry.removeprefix("file://") for entry in listed if not entry.startswith("pkg://")]
    places = [place for name in names for place in (Path(name), folder / name) if place.is_dir()]
    return list(dict.fromkeys(places))


def _place(data: dict[str, Any], part: Part, files: SearchPath) -> None:
    """Merge one file below its package."""
    loaded = files.load(part.file)
    assert loaded is not None
    content: Any = {key: value for key, value in loaded.data.items() if key != "defaults"}
    for name in reversed(part.package.split(".") if part.package else ()):
        content = {name: content}
    _merge(data, content, data, part.file)


def _merge(into: dict[str, Any], new: Mapping[str, Any], root: dict[str, Any], file: str) -> None:
    """Merge tables key by key; lists and other values are replaced, and `???` replaces nothing that is there."""
    for key, value in new.items():
        old = into.get(key, _ABSENT)
        if isinstance(value, Mapping):
            if isinstance(old, str) and (match := _REFERENCE.fullmatch(old)) is not None:
                old = _copied(lookup(root, tuple(match[1].split(".")), _ABSENT))
            if isinstance(old, list):
                raise CompositionError(f"{file} has a table for `{key}`, which is a list before")
            if not isinstance(old, dict):
                old = {}
            into[key] = old
            _merge(old, value, root, file)
        elif isinstance(value, list) and isinstance(old, dict):
            raise CompositionError(f"{file} has a list for `{key}`, which is a table before")
        elif not (value == "???" and old is not _ABSENT):
            into[key] = _copied(value)


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


@dataclass
class _Applied:
    """Words that change keys, applied one after the other. is_whole: whether all files of the configuration are here.

    changed: keys that they have changed. notes: words that Hydra itself would refuse for these files.
    """

    data: dict[str, Any]
    is_whole: bool
    changed: set[KeyPath] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def apply(self, word: Override) -> None:
        """Apply one word. Raises `CompositionError`."""
        if word.package is not None or "/" in word.key:
            raise CompositionError(f"`{word.word}` chooses a file of the group {word.key}, which is not there")
        if word.act is Act.REMOVE:
            self._remove(word)
        else:
            self._set(word)
        below = word.value if isinstance(word.value, dict) else {}
        self.changed |= {word.parts, *((*word.parts, *path) for path, _ in leaves(below))}

    def _remove(self, word: Override) -> None:
        holder, last = lookup(self.data, word.parts[:-1], None) if word.parts[1:] else self.data, word.parts[-1]
        if not isinstance(holder, dict) or holder.get(last) is None:
            raise CompositionError(f"`{word.word}` removes a key that is not there", "take the word out")
        if word.has_value and word.value is not None and holder[last] != word.value:
            raise CompositionError(f"`{word.word}` removes another value than {holder[last]!r}")
        del holder[last]

    def _set(self, word: Override) -> None:
        holder, last = self._holder(word), word.parts[-1]
        if isinstance(holder, list):
            holder[self._index(holder, word, len(word.parts) - 1)] = word.value
            return
        old = holder.get(last, _ABSENT)
        if old is _ABSENT:
            self._must_exist(word, word.key)
        elif word.act is Act.ADD and old not in (None, "???", word.value) and not isinstance(word.value, dict | list):
            self.notes.append(f"`{word.word}` adds a key that is there, with {old!r}: read as {word.word[1:]}")
        if isinstance(word.value, dict) and isinstance(old, dict):
            for path, _ in leaves(word.value):
                if lookup(old, path, _ABSENT) is _ABSENT:
                    self._must_exist(word, ".".join((word.key, *path)))
            _merge(old, word.value, self.data, word.word)
        elif isinstance(word.value, list) and isinstance(old, dict):
            raise CompositionError(f"`{word.word}` has a list for `{word.key}`, which is a table")
        else:
            holder[last] = _copied(word.value)

    def _holder(self, word: Override) -> dict[str, Any] | list[Any]:
        """The table or list that has the word's key; tables on the way are made where the word adds."""
        holder: Any = self.data
        for position, name in enumerate(word.parts[:-1]):
            if isinstance(holder, list):
                holder = holder[self._index(holder, word, position)]
                continue
            old = holder.get(name, _ABSENT)
            if not isinstance(old, dict | list):
                self._must_exist(word, word.key)
                holder[name] = {}
            holder = holder[name]
        if not isinstance(holder, dict | list):
            raise CompositionError(f"`{word.word}`: `{'.'.join(word.parts[:-1])}` is not a table")
        return holder

    def _index(self, items: list[Any], word: Override, position: int) -> int:
        name = word.parts[position]
        if not name.isdigit() or int(name) >= len(items):
            raise CompositionError(f"`{word.word}`: `{'.'.join(word.parts[:position])}` has no item {name}")
        return int(name)

    def _must_exist(self, word: Override, key: str) -> None:
        """Raise for a key that is not there, unless the word adds it, or files that may have it are not here."""
        if word.act is Act.SET and self.is_whole and word.parts[0] != "hydra":  # which has tables of its own
            hint = f"correct the name, or write +{word.word} to add it"
            raise CompositionError(f"`{word.word}` sets `{key}`, which the configuration does not have", hint)
