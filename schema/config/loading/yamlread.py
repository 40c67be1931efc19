"""YAML files, read safely: plain values only, with the line of every key, and bounded in size.

PyYAML's node graph is walked by hand rather than constructed, because that gives line numbers, refuses
duplicate keys, bounds what aliases may expand to, and reads numbers as OmegaConf does (`1e-6` is a number
there, while YAML 1.1 calls it a string).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from schema.config.loading.tomlread import MAX_FILE_BYTES
from schema.config.problem import ConfigError, Problem

Path = tuple[str, ...]

if TYPE_CHECKING:
    import yaml  # type: ignore[import-untyped,unused-ignore]

MAX_VALUES = 100_000  # after aliases are expanded: a few hundred keys are usual, a billion laughs are not
MAX_DEPTH = 64  # deeper than any configuration, shallower than Python's stack

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_HEXADECIMAL = re.compile(r"[-+]?0[xX][0-9a-fA-F_]+")
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9_]+|[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?")
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"), True),
    **dict.fromkeys(("false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "inf"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF", "-inf"), float("-inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN", "nan"), float("nan")),
}
_STANDARD = "tag:yaml.org,2002:"
_STRING, _MERGE = f"{_STANDARD}str", f"{_STANDARD}merge"
_TAGS = {f"{_STANDARD}{name}" for name in ("str", "int", "float", "bool", "null", "timestamp", "value")}
_TABLES = {f"{_STANDARD}{name}" for name in ("map", "seq")}


class YamlFile(NamedTuple):
    """The mapping that a YAML text holds, the line (from 1) of each of its keys by path, and its keys with aliases.

    shared: keys at the top whose value stands elsewhere too, by an alias (`*name`) or merged (`<<`).
    """

    data: dict[str, Any]
    lines: dict[Path, int]
    shared: frozenset[str]


def read_yaml(text: str, name: str) -> YamlFile:
    """Read the mapping that a YAML text holds.

    Keys that are not strings become their text. Raises ConfigError with the line where the text is not YAML,
    holds something else than a mapping at the top, repeats a key, uses tags, or is too large.
    """
    import yaml  # type: ignore[import-untyped,unused-ignore]  # 30 ms that only conversions pay for

    if len(text.encode("utf-8", "surrogatepass")) > MAX_FILE_BYTES:
        raise _error(f"larger than {MAX_FILE_BYTES} bytes: not a configuration", name)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_depth(yaml.parse(text, Loader=loader), name)
        documents = [node for node in yaml.compose_all(text, Loader=loader) if node is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else mark.line + 1
        message = " ".join(part for part in (error.context, error.problem) if part)
        if "nesting depth" in message:  # of newer libyaml, before an event tells the depth
            raise _error(f"nested more than {MAX_DEPTH} deep", name, line) from None
        raise _error(f"not YAML: {message}", name, line, _hint(text, line)) from None
    except (yaml.YAMLError, ValueError) as error:
        raise _error(f"not YAML: {' '.join(str(error).split())}", name) from None
    except RecursionError:
        raise _error("not a configuration: nested too deeply", name) from None
    if len(documents) != 1:
        content, hint = "nothing", _RIGHT_FILE
        if documents:
            content, hint = f"{len(documents)} documents", "keep that of the job: each `---` begins another"
        raise _error(f"holds {content}, expected one mapping of keys", name, hint=hint)
    if not isinstance(documents[0], yaml.MappingNode):
        line = documents[0].start_mark.line + 1
        hint = _hint(text, line, "a configuration is lines of `key: value`; this is a text or a list")
        raise _error("expected keys and values at the top", name, line, hint)
    walk = _Walk(name)
    data = walk.mapping(documents[0], ())
    return YamlFile(data, walk.lines, frozenset(walk.shared))


def _check_depth(events: Iterable[yaml.Event], name: str) -> None:
    """Refuse deep nesting while it is still a stream: PyYAML's C composer recurses and would crash Python."""
    depth = 0
    for event in events:
        kind = type(event).__name__
        depth += kind.endswith("StartEvent") - kind.endswith("EndEvent")
        if depth > MAX_DEPTH + 2:  # the stream and the document count too
            raise _error(f"nested more than {MAX_DEPTH} deep", name, event.start_mark.line + 1)


class _Walk:
    """One walk over a node graph. Aliases are expanded, so what they cost is counted like written values."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: dict[Path, int] = {}
        self.shared: set[str] = set()
        self._tops: dict[int, str] = {}  # the node of a value at the top -> its key
        self._values = 0

    def mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        """A mapping; `<<` merges others into it, written keys first."""
        self._count(node, path)
        self._check_tag(node, _TABLES)
        table: dict[str, Any] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == _MERGE:
                merged.append(value_node)
                continue
            key = self._key(key_node, line)
            if key in table:
                raise _error(f"the key `{key}` is repeated here", self.name, line, "keep one of the two")
            self.lines[(*path, key)] = line
            table[key] = self._value(value_node, (*path, key))
        for source in self._merge_sources(merged):
            for key, value in self._value_of_merge(source, path).items():
                if key not in table:
                    self.lines.setdefault((*path, key), source.start_mark.line + 1)
                    table[key] = value
        return table

    def _look_for_aliases(self, node: yaml.Node, path: Path) -> None:
        """An alias is the very node of its anchor."""
        if id(node) in self._tops:
            self.shared.add(self._tops[id(node)])
        elif len(path) == 1:
            self._tops[id(node)] = path[0]

    def _merge_sources(self, nodes: list[yaml.Node]) -> Iterator[yaml.Node]:
        for node in nodes:
            if type(node).__name__ == "SequenceNode":
                yield from node.value
            else:
                yield node

    def _value_of_merge(self, node: yaml.Node, path: Path) -> dict[str, Any]:
        self._look_for_aliases(node, ())
        if type(node).__name__ != "MappingNode":
            raise _error("`<<` can merge mappings only", self.name, node.start_mark.line + 1)
        lines, self.lines = self.lines, {}
        value = self.mapping(node, path)
        merged, self.lines = self.lines, lines
        for key, line in merged.items():
            lines.setdefault(key, line)
        return value

    def _key(self, node: yaml.Node, line: int) -> str:
        if type(node).__name__ != "ScalarNode":
            raise _error("a key must be plain text", self.name, line, "quote it where it is meant as text")
        key = str(node.value)
        if key.startswith(("•", "`", "- `")):
            raise _error(f"`{key[:40]}` is not a key", self.name, line, _PAGE)
        return key

    def _value(self, node: yaml.Node, path: Path) -> Any:
        self._look_for_aliases(node, path)
        if type(node).__name__ == "MappingNode":
            return self.mapping(node, path)
        self._count(node, path)
        if type(node).__name__ == "SequenceNode":
            self._check_tag(node, _TABLES)
            return [self._value(item, (*path, str(index))) for index, item in enumerate(node.value)]
        return self._scalar(node)

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        self._check_tag(node, _TAGS)
        text = str(node.value)
        is_quoted = bool(node.style)  # a plain scalar has None, or from the C parser ""
        explicit_text = node.tag == _STRING and not is_quoted and not _looks_plain(text)
        if is_quoted or explicit_text:
            return text
        return scalar(text)

    def _check_tag(self, node: yaml.Node, allowed: set[str]) -> None:
        if node.tag not in allowed and node.tag != "!":
            line = node.start_mark.line + 1
            raise _error(f"the tag {node.tag} makes objects, which is not read", self.name, line)

    def _count(self, node: yaml.Node, path: Path) -> None:
        self._values += 1
        line = node.start_mark.line + 1
        if self._values > MAX_VALUES:
            raise _error(f"more than {MAX_VALUES} values after aliases are expanded", self.name, line)
        if len(path) > MAX_DEPTH:
            raise _error(f"nested more than {MAX_DEPTH} deep", self.name, line)


def _looks_plain(text: str) -> bool:
    return text in _WORDS or _FLOAT.fullmatch(text) is not None or _HEXADECIMAL.fullmatch(text) is not None


def scalar(text: str) -> Any:
    """An unquoted scalar as a value: null, booleans, integers, numbers (`1e-6` too), else text."""
    if text in _WORDS:
        return _WORDS[text]
    digits = text.replace("_", "")
    if len(digits) > 400:
        return text  # no number of a configuration; Python refuses to parse thousands of digits
    if _INTEGER.fullmatch(text):
        return int(digits)
    if _HEXADECIMAL.fullmatch(text):
        return int(digits, 16)
    if _FLOAT.fullmatch(text) and re.search(r"[0-9]", text):
        return float(digits)
    return text


_RIGHT_FILE = "is it the right file?"


def _error(message: str, name: str, line: int | None = None, hint: str = _RIGHT_FILE) -> ConfigError:
    return ConfigError([Problem("", message, hint=hint, file=name, line=line)])


_PAGE = "this is the list of a documentation page: keep only the lines of the configuration"


_FEW_LINES = 8  # too few to tell a text from a broken configuration
_KEY_LINE = re.compile(r"\s*(?:-\s|(?:-\s+)?[^\s:]+:(?:\s|$))")
_COLUMN = "check the indentation: keys of one table begin in the same column"


def _hint(text: str, line: int | None, otherwise: str = _COLUMN) -> str:
    """Name the most frequent cause of a line that is not YAML: a page of documentation copied with it."""
    lines = text.splitlines()
    near = lines[max(0, (line or 1) - 2) : (line or 1)]
    for written in (*near, *lines):
        bare = written.strip()
        if bare.startswith(("•", "- ``")):
            return _PAGE
        if bare.startswith(("```", ".. code", "~~~", "===", "---|")):
            return "this is markup of a documentation page: keep only the content of the code block"
    for written in near or lines[:1]:
        if "\t" in written:
            return "YAML indents with blanks, not with tabs"
        if re.match(r"\[[^\]]+\]\s*$", written.strip()) or re.match(r"\s*[\w.]+\s*=", written):
            return "this looks like TOML: give the file the ending .toml"
    filled = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if sum(_KEY_LINE.match(line) is not None for line in filled) * 2 < len(filled) > _FEW_LINES:
        return "most of its lines are text: keep only those of the configuration"
    for written in near:
        if re.match(r"\w", written) and not _KEY_LINE.match(written):
            return f"`{written.strip()[:40]}` is text: keep only the lines of the configuration"
    return otherwise
