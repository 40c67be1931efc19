"""Lists of defaults: which files they name, in which order these are merged, and below which package.

    defaults:
      - actor@role.actor: dp_actor     the file actor/dp_actor, below role.actor
      - ../base@_here_                 a file by its path, below this file's own package
      - override model_engine: ep      another choice for an entry of a file that is named before
      - _self_                         the keys of this file; at the end where it is not written

A name is relative to the group (the directory) of the file that has the list, or with a leading slash to the search
path. `${name}` in a choice stands for the choice of another group. Words of the command line choose first, then the
outermost list. Groups below `hydra/` are settings of Hydra's own and are passed over.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from convert.hydra.words import Act, Override

MAX_FILES = 500
"""Files of one composition; verl's largest has 17."""
_GLOBAL, _GROUP, _HERE, _SELF = "_global_", "_group_", "_here_", "_self_"


class CompositionError(ValueError):
    """The files and words do not fit together. hint: what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class Files(Protocol):
    """Where named configurations are looked for."""

    def defaults_of(self, name: str) -> tuple[list[Any], str] | None:
        """The list of defaults of a file and its package header ("" for none); None where the file is not there."""

    def is_left_out(self, name: str) -> bool:
        """Whether a file that is not there is passed over, since its keys are known otherwise."""


@dataclass(frozen=True)
class Part:
    """One file of a composition. file: its name on the search path. package: the dotted table it goes below."""

    file: str
    package: str


@dataclass(frozen=True)
class _Entry:
    """One line of a list. group: None for a file by its name. choice: file or files; None where nothing is chosen."""

    group: str | None
    choice: str | list[str] | None
    package: str | None = None
    is_optional: bool = False
    is_override: bool = False


@dataclass
class _Choices:
    """Choices for groups, by `group@package`: those of the words, then of `override` entries."""

    chosen: dict[str, Any] = field(default_factory=dict)
    by: dict[str, str] = field(default_factory=dict)
    removed: dict[str, Any] = field(default_factory=dict)
    appended: list[_Entry] = field(default_factory=list)
    made: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)


def ordered(files: Files, primary: str, groups: Sequence[Override]) -> list[Part]:
    """The files of the configuration `primary` in the order in which they are merged.

    groups: the words that choose, add or remove files. Raises `CompositionError`.
    """
    tree = _Tree(files, _choices(groups))
    parts = tree.expand(primary, "", "", is_primary=True)
    tree.check_used()
    return parts


def _choices(groups: Sequence[Override]) -> _Choices:
    choices = _Choices()
    for word in groups:
        if word.act is Act.REMOVE:
            choices.removed[word.group_key] = word.value
        elif word.act is Act.FORCE:
            raise CompositionError(f"`{word.word}`: Hydra adds no group by ++", f"write +{word.word[2:]}")
        elif word.value is not None and not isinstance(word.value, str | list):
            raise CompositionError(f"`{word.word}`: a group is chosen by the name of a file")
        elif word.act is Act.ADD:
            choices.appended.append(_Entry(word.key, word.value, word.package))
        else:
            choices.chosen[word.group_key], choices.by[word.group_key] = word.value, word.word
    return choices


class _Tree:
    def __init__(self, files: Files, choices: _Choices) -> None:
        self.files, self.choices = files, choices
        self._open: list[str] = []
        self._placed: set[str] = set()
        self._loaded = 0

    def expand(self, name: str, base: str, package: str, is_primary: bool = False) -> list[Part]:
        """The parts of one file: what its list names, and itself. base: its group. package: where it goes."""
        loaded = self.files.defaults_of(name)
        if loaded is None:
            raise CompositionError(f"the configuration `{name}` is not there")
        if name in self._open:
            raise CompositionError(f"`defaults` of {name} leads back to it: {' -> '.join((*self._open, name))}")
        self._loaded += 1
        if self._loaded > MAX_FILES:
            raise CompositionError(f"`defaults` names more than {MAX_FILES} files")
        entries = [_entry(item, name) for item in loaded[0]]
        if sum(_is_self(entry) for entry in entries) > 1:
            raise CompositionError(f"`defaults` of {name} has _self_ twice")
        if not any(map(_is_self, entries)):
            entries.append(_Entry(None, _SELF))
        if is_primary:
            entries += self.choices.appended
        self._open.append(name)
        try:
            return self._children(entries, name, base, package)
        finally:
            self._open.pop()

    def _children(self, entries: list[_Entry], name: str, base: str, package: str) -> list[Part]:
        """Entries from the last to the first, as `override` lets the outermost choose; `${…}` when all are chosen."""
        entries = [entry for entry in entries if not (entry.group or "").lstrip("/").startswith("hydra/")]
        for entry in entries:
            if entry.is_override:
                key = self._key(entry, base, package)
                if key not in self.choices.chosen:
                    self.choices.chosen[key], self.choices.by[key] = entry.choice, f"`defaults` of {name}"
        listed = [entry for entry in entries if not entry.is_override]
        parts: list[list[Part]] = [[] for _ in listed]
        later: list[int] = []
        for index in reversed(range(len(listed))):
            entry = listed[index] = self._chosen(listed[index], base, package)
            if _is_self(entry):
                parts[index] = [Part(name, package)]
            elif "${" in str(entry.choice):
                later.insert(0, index)
            else:
                parts[index] = self._of_entry(entry, name, base, package)
        for index in later:
            parts[index] = self._of_entry(self._interpolated(listed[index], name), name, base, package)
        return [part for of_entry in parts for part in of_entry]

    def _chosen(self, entry: _Entry, base: str, package: str) -> _Entry:
        if entry.group is None:
            return entry
        key = self._key(entry, base, package)
        if key not in self.choices.chosen:
            return entry
        self.choices.used.add(key)
        return replace(entry, choice=self.choices.chosen[key])

    def _interpolated(self, entry: _Entry, name: str) -> _Entry:
        def choice(match: re.Match[str]) -> str:
            made = self.choices.made.get(match[1].strip())
            if made is None:
                known = ", ".join(sorted(self.choices.made)) or "none"
                raise CompositionError(
                    f"`{match[0]}` in `defaults` of {name} names no group that has a choice ({known})"
                )
            return made

        return replace(entry, choice=re.sub(r"\$\{([^${}]*)\}", choice, str(entry.choice)))

    def _of_entry(self, entry: _Entry, name: str, base: str, package: str) -> list[Part]:
        if entry.group is not None and not isinstance(entry.choice, list):
            key = self._key(entry, base, package)
            if key in self.choices.removed and self.choices.removed[key] in (None, entry.choice):
                self.choices.used.add(f"~{key}")
                return []
            made = self.choices.made.setdefault(key, str(entry.choice))
            if made != str(entry.choice):
                raise CompositionError(f"{key} is chosen twice: {made}, and {entry.choice} by `defaults` of {name}")
        if entry.choice is None:
            return []
        chosen = entry.choice if isinstance(entry.choice, list) else [entry.choice]
        parts: list[Part] = []
        for choice in chosen:
            path = choice if entry.group is None else f"{entry.group}/{choice}"
            file = _joined(base, path)
            if choice == "???":
                key = self._key(entry, base, package)
                raise CompositionError(f"{key} must be chosen, and has ???", f"add {key}=NAME")
            loaded = self.files.defaults_of(file)
            if loaded is None:
                if entry.is_optional or self.files.is_left_out(file):
                    continue
                raise CompositionError(f"`defaults` of {name} names `{file}`, which is not there")
            if entry.group is not None and not isinstance(entry.choice, list):
                key = self._key(entry, base, package)
                if key in self._placed:
                    message = f"`defaults` of {name} names {key} a second time"
                    raise CompositionError(message, f"write {key}@ANOTHER_PACKAGE")
                self._placed.add(key)
            group = posixpath.dirname(path)
            below = _package(entry.package, loaded[1], group, file, package)
            parts += self.expand(file, posixpath.dirname(file), below)
        return parts

    def _key(self, entry: _Entry, base: str, package: str) -> str:
        """`group`, or `group@package` where the package is another than the group's own."""
        path = entry.group if entry.group is not None else posixpath.dirname(str(entry.choice))
        group = _joined(base, path)
        below = _package(entry.package, "", path, f"{group}/x", package)
        return group if below == group.replace("/", ".") else f"{group}@{below or _GLOBAL}"

    def check_used(self) -> None:
        """Raise for a choice or removal that no list has an entry for."""
        choices = self.choices
        for key, by in choices.by.items():
            if key not in choices.used:
                near = sorted(made for made in choices.made if made.split("@")[0] == key.split("@")[0])
                hint = f"write one of {', '.join(near)}" if near else f"to add it: +{key}={choices.chosen[key]}"
                raise CompositionError(f"`{by}`: no list of defaults has an entry {key}", hint)
        for key in choices.removed:
            if f"~{key}" not in choices.used:
                raise CompositionError(f"`~{key}`: no list of defaults has an entry {key}")


def _is_self(entry: _Entry) -> bool:
    return entry.group is None and entry.choice == _SELF


def _joined(base: str, path: str) -> str:
    """A path below a group, or below the search path where it begins with a slash."""
    return path[1:] if path.startswith("/") else f"{base}/{path}" if base else path


def _package(written: str | None, header: str, group: str, file: str, parent: str) -> str:
    """The dotted table that a file goes below. written: what follows `@`. group: its directory as written."""
    package = written if written is not None else header or group.lstrip("/").replace("/", ".")
    if written is None and header:
        package = header if header.split(".", maxsplit=1)[0] == _GLOBAL else f"{_GLOBAL}.{header}"
    if written is not None and _GROUP in written:
        group_package = posixpath.dirname(file).replace("/", ".")
        package = f"{_GLOBAL}.{written.replace(_GROUP, group_package)}"
    if package == _HERE:
        package = ""
    below = ".".join(filter(None, (parent, package)))
    _, is_global, rest = below.rpartition(_GLOBAL)
    return rest.lstrip(".") if is_global else below


def _entry(item: Any, name: str) -> _Entry:
    """One line of a list as it is written."""
    if isinstance(item, str):
        optional = item.startswith("optional ")
        path, _, package = item.removeprefix("optional ").partition("@")
        return _Entry(None, path.removesuffix(".yaml"), package if "@" in item else None, optional)
    if not isinstance(item, Mapping) or len(item) != 1:
        raise CompositionError(f"`defaults` of {name} has an entry that is neither a name nor `group: name`: {item}")
    (key, choice), *_ = item.items()
    words = str(key).split()
    flags, target = words[:-1], words[-1] if words else ""
    if not target or not set(flags) <= {"override", "optional"}:
        raise CompositionError(f"`defaults` of {name}: `{key}` is not a group")
    group, _, package = target.partition("@")
    if isinstance(choice, list):
        choice = [str(option) for option in choice]
    elif choice is not None:
        choice = str(choice)
    return _Entry(group, choice, package if "@" in target else None, "optional" in flags, "override" in flags)
