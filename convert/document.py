"""The tables of `docs/migrate.md`, made from the readers' rules: `python -m convert.document` writes them.

It writes `docs/config.md` too, whose last column has the readers' names.

The prose of the page is written by hand. Between a pair of markers stands what this module makes:

    <!-- keys: verl rl -->     …  one table for each table of the file: their key, ours, how the value changes
    <!-- prose: roll -->       …  the reader's own paragraphs
    <!-- method: verl -->      …  of that list, the keys that decide what is trained: they make a file unsupported
    <!-- none: verl -->        …  the closed list of what has no counterpart, with the reasons
    <!-- nearest -->           …  keys that get the nearest value where their part is not built
    <!-- tables: verl -->      …  the tables in which a key that is not understood goes into `[unsupported]`
    <!-- foreign -->           …  the systems without a reader that are recognised
    <!-- end -->

A test holds that the page is what this module would write, and that no kind of file is forgotten.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from convert import hints
from convert.engine.engine import yaml_value
from convert.engine.fallback import SPEED_ONLY
from convert.engine.foreign import SYSTEMS_WITHOUT_READER
from convert.engine.registry import reader
from convert.engine.rules import ABSENT, Rule
from convert.engine.unsupported import EITHER_WAY
from schema.config.availability import UNAVAILABLE
from schema.config.reference import document as reference

PAGE = Path(__file__).resolve().parents[1] / "docs" / "migrate.md"

LONG = 20  # rows; longer tables are folded, or nobody finds the prose between them

_BLOCK = re.compile(
    r"<!-- (keys|prose|method|none|nearest|tables|foreign)(?:: ([^>]*?))? -->\n.*?<!-- end -->", re.DOTALL
)
_DEEP = ("actor_rollout_ref",)  # tables so large that each of their tables gets a section


def render(page: str) -> str:
    """The page with every block between markers made anew. Raises ValueError for a marker it does not know."""
    return _BLOCK.sub(lambda match: _block(match[1], (match[2] or "").split()), page)


def blocks(page: str) -> list[tuple[str, str]]:
    """The markers of a page: what is asked for, and of what."""
    return [(match[1], match[2] or "") for match in _BLOCK.finditer(page)]


def _block(marker_kind: str, arguments: Sequence[str]) -> str:
    if marker_kind == "nearest":
        lines = list(_nearest())
    elif marker_kind == "foreign":
        lines = ["", f"{', '.join(system.title for system in SYSTEMS_WITHOUT_READER)}.", ""]
    elif marker_kind == "tables" and len(arguments) == 1:
        lines = ["", _tables(arguments[0]), ""]
    elif marker_kind == "prose" and len(arguments) == 1:
        lines = [line for paragraph in reader(arguments[0]).prose for line in ("", paragraph)] + [""]
    elif marker_kind == "method" and len(arguments) == 1:
        lines = list(_method(arguments[0]))
    elif marker_kind == "none" and len(arguments) == 1:
        lines = list(_none(arguments[0]))
    elif marker_kind == "keys" and len(arguments) == 2:
        lines = list(_keys(*arguments))
    else:
        raise ValueError(f"marker `{marker_kind}: {' '.join(arguments)}` is not known")
    if sum(line.startswith("| ") for line in lines) > LONG:
        count = sum(line.startswith("| `") for line in lines)
        lines = ["", "<details>", f"<summary>{count} keys</summary>", *lines, "</details>", ""]
    marker = f"<!-- {marker_kind}{': ' if arguments else ''}{' '.join(arguments)} -->"
    return "\n".join([marker, *lines, "<!-- end -->"])


def _keys(system: str, kind: str) -> Iterator[str]:
    groups: dict[str, list[Rule]] = {}
    rules = reader(system).rules(kind)
    listed = telling(rules)
    for rule in listed:
        groups.setdefault(_group(rule.key), []).append(rule)
    for group, members in groups.items():
        if group:
            yield f"\n**`{group}`**"
        yield "\n| their key | ours | how the value changes | their default |"
        yield "|---|---|---|---|"
        for rule in members:
            yield _line(rule, group)
    if len(listed) < len(rules):
        yield f"\n{len(rules) - len(listed)} further keys have the same name and meaning here."
    yield ""


def telling(rules: Sequence[Rule]) -> list[Rule]:
    """The rules that say something: not those whose key is ours, unchanged."""
    return [
        rule
        for rule in rules
        if rule.converter.ours != (rule.key,) or rule.also or rule.converter.words != "as it is"
    ]


def _group(key: str) -> str:
    parts = key.split(".")
    depth = 2 if parts[0] in _DEEP and len(parts) > 2 else 1
    return ".".join(parts[:depth]) if len(parts) > depth else ""


def _line(rule: Rule, group: str) -> str:
    name = _short(rule.key, group)
    also = ", ".join(f"`{_short(other, group)}`" for other in rule.also)
    ours = ", ".join(f"`{key}`" for key in rule.converter.ours) or "–"
    default = "" if rule.default is ABSENT else f"`{yaml_value(rule.default)}`"
    default = f"that of `{rule.follows}`" if rule.follows else default
    words = rule.words or rule.converter.words or ("as it is" if rule.converter.ours else "")
    cells = [f"`{name}`" + (f" (also {also})" if also else ""), ours, words, default]
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _short(key: str, group: str) -> str:
    return key.removeprefix(f"{group}.") if group else key


def _method(system: str) -> Iterator[str]:
    yield "\n| their key | asks for nothing | why it is not the same method |"
    yield "|---|---|---|"
    for key, neutral in reader(system).unsupported.method.items():
        values = ", ".join(f"`{yaml_value(value)}`" for value in neutral if value is not EITHER_WAY)
        if EITHER_WAY in neutral:
            values = f"{values} (not false, not 0)".strip()
        yield f"| `{key}` | {values} | {_cell(_reason(system, key))} |"
    yield ""


def _tables(system: str) -> str:
    listed = reader(system).unsupported
    at_top = ", and in values at the top of a file that no other key refers to" if listed.flat else ""
    names = ", ".join(f"`{table}`" for table in listed.tables)
    text = f"Keys that are not understood are refused in {names}{at_top}."
    if listed.plumbing is not None:
        mixed = ", ".join(f"`{table}`" for table in listed.mixed)
        text += (
            f" Unknown keys are refused in {mixed}, too, and in unknown tables, unless their names are those of "
            "logging, checkpoints, profilers, machines and the like."
        )
    return text


def _reason(system: str, key: str) -> str:
    """The reason of a key, or of its first value that has one."""
    listed = reader(system).unsupported
    of_values = (reason for name, reason in listed.reasons.items() if name.startswith(f"{key}="))
    return listed.reason(key) or next(of_values)


def _none(system: str) -> Iterator[str]:
    yield "\n| their key | why it has no counterpart |"
    yield "|---|---|"
    listed = reader(system).unsupported
    for key, reason in listed.reasons.items():
        if key.partition("=")[0] not in listed.method:
            yield f"| `{key}` | {_cell(reason)} |"
    yield ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _nearest() -> Iterator[str]:
    yield "\n| key | what this build lacks | nearest value |"
    yield "|---|---|---|"
    for key in sorted(SPEED_ONLY & UNAVAILABLE.keys()):
        rule = UNAVAILABLE[key]
        value = rule.neutral[0]
        yield f"| `{key}` | {rule.missing} | {'unset' if value is None else f'`{yaml_value(value)}`'} |"
    yield ""


def main() -> int:
    """Write both pages; return the exit code."""
    hints.install()
    PAGE.write_text(render(PAGE.read_text("utf-8")), "utf-8")
    PAGE.with_name("config.md").write_text(reference.document(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
