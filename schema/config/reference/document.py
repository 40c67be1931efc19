"""The reference of the configuration, `docs/config.md`: read off the schema, so it cannot be out of date.

    overview of sections ─▶ for each section a table: key, type, default, bounds, meaning, observable, source

`python -m convert.document` writes it, with other systems' names for a key; a test compares the file with the tree.
"""

from __future__ import annotations

from collections.abc import Iterator

from schema.config.availability import refused_by
from schema.config.keys import leaf_keys, published_keys, section_keys
from schema.config.loading.explain import is_list_of_tables
from schema.config.loading.other_systems import other_systems
from schema.config.loading.tomlwrite import toml_value
from schema.config.reference.lookup import MUST, UNSET, KeyInfo, SectionInfo, all_infos, look_up

FILE_NAME = "docs/config.md"
MAX_NAMES = 3
"""Names of another system in a cell; the tables of `docs/migrate.md` have all of them."""

_HEAD = """# Configuration reference

<!-- Made from the schema by `make schema`. A change here is lost; change the descriptions in schema/config. -->

Every key of a job's TOML file: {keys} keys in {sections} sections. The same text, key by key:
`cosmos-launch explain KEY`. As a JSON schema for editors: [`config.schema.json`](../config.schema.json); a file
that begins with `#:schema config.schema.json` is completed and checked while it is written.

A value comes from, later ones before earlier ones: the default, the `--config` files from left to right, the
environment (`COSMOS_TRAIN__OPTM_LR=1e-5` for `train.optm_lr`), `--set train.optm_lr=1e-5`. `cosmos-launch show`
prints each value with its origin. Tables of files are merged key by key; those that a later file names in a list at
its top, `replace = ["train.train_policy.reward_function"]`, are that file's alone.

**A key acts or is refused.** {live} keys act in this build, each with an *observable*: what it changes that one can
see, tested by flipping the key. {refused} belong to parts that are not built yet; they accept the value that needs
nothing of that part, and any other is refused by name. They are marked *not yet*.

**Source**: `cosmos-rl` where name and default are those of its published schema (a deviation is explained with the
key); names of verl and ROLL where `cosmos-launch convert` maps them here; `ours` for the rest. *unset* is the
absence of a key: TOML has no null.
"""

_COLUMNS = ("key", "type", "default", "bounds", "meaning", "observable", "source")


def document() -> str:
    """The text of `docs/config.md`."""
    refused = len({info.key for info in all_infos() if not info.acts})
    total, sections = len(leaf_keys()), len(section_keys())
    head = _HEAD.format(keys=total, sections=sections, live=total - refused, refused=refused)
    parts = [head, *_overview(), *(text for section in _sections() for text in _section(section))]
    return "\n".join(parts)


def _sections() -> Iterator[SectionInfo]:
    """The keys outside of sections, then each section in the order of the schema."""
    for key in ("", *section_keys()):
        section = look_up(key).section
        assert section is not None
        if section.keys:
            yield section


def _overview() -> Iterator[str]:
    yield "## Sections\n"
    yield _row("section", "what it holds", "keys", "not yet")
    yield _row("---", "---", "---:", "---:")
    for section in _sections():
        keys = {info.key for info in section.keys}
        missing = len({info.key for info in section.keys if not info.acts})
        name = _link(section.key) if section.key else "outside of sections"
        yield _row(name, section.description.partition("\n")[0], str(len(keys)), str(missing or ""))
    yield ""


def _section(section: SectionInfo) -> Iterator[str]:
    yield f"## `{_title(section.key)}`\n" if section.key else "## Outside of sections\n"
    if section.key:
        yield section.description.replace("\n", "  \n") + "\n"
        row = refused_by(section.key)
        if row == section.key:
            yield f"*Not yet:* {_limits(section.keys[0])}\n"
    if section.sections:
        yield "Sections inside: " + ", ".join(_link(key) for key, _ in section.sections) + ".\n"
    yield _row(*_COLUMNS)
    yield _row(*["---"] * len(_COLUMNS))
    for info in section.keys:
        yield _key(info)
    yield ""


def _key(info: KeyInfo) -> str:
    name = f"`{info.key.rpartition('.')[2]}`"
    meaning = _line(info.description)
    if info.deviation:
        meaning += f" *Deviation:* {_line(info.deviation)}"
    if info.limits:
        meaning += f" *Not yet:* {_limits(info)}"
    return _row(
        f"{name} ({info.when})" if info.when else name,
        info.type,
        _default(info),
        ", ".join(info.bounds),
        meaning,
        f"{info.kind}: {_line(info.effect)}" if info.acts else "refusal",
        _source(info.key),
    )


def _limits(info: KeyInfo) -> str:
    return f"this build {_line(info.limits)}."


def _default(info: KeyInfo) -> str:
    if info.default in (UNSET, MUST):
        return f"*{info.default}*"
    return f"`{toml_value(info.default)}`"


def _source(key: str) -> str:
    """Where the name comes from, and what other systems call it."""
    origin = "cosmos-rl" if key in published_keys() else ""
    others = []
    for system, names in other_systems().names_elsewhere().get(key, {}).items():
        shown = [f"`{name}`" for name in names[:MAX_NAMES]]
        ellipsis = " …" if len(names) > MAX_NAMES else ""
        others.append(f"{system} {', '.join(shown)}{ellipsis}")
    return "; ".join([*([origin] if origin else []), *others]) or "ours"


def _line(text: str) -> str:
    return " ".join(text.split())


def _link(key: str) -> str:
    """A link to a section: the anchor is the heading without its signs."""
    return f"[`{_title(key)}`](#{key.replace('.', '')})"


def _title(key: str) -> str:
    return f"[[{key}]]" if is_list_of_tables(tuple(key.split("."))) else f"[{key}]"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
