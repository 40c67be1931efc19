"""Ways to spoil a configuration: what a hurried, mistaken or hostile writer of a TOML file may do.

base ─ drop | retype | rename | nest | unnest | repeat | deep | move | many | long ─▶ some other data, one to four
times over; and what may stand where a file is expected
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from schema.config import Config
from schema.config.loading.explain import all_fields
from tests.schema.config_samples import GRPO, SFT, changed

Path_ = tuple[str, ...]
MANY = 400  # more than are shown
KEYS = list(dict.fromkeys(all_fields()))
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").rglob("*.toml"))


def _without_none(value: Any) -> Any:
    """What TOML can write."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


def bases() -> list[dict[str, Any]]:
    """Configurations to start from: small ones, every key written, and all examples."""
    everything = [_without_none(Config.model_validate(data).to_dict()) for data in (GRPO, SFT)]
    adapters = changed(GRPO, policy__lora={"r": 4, "target_modules": ["q_proj"]}, critic__lora={"r": 2})
    examples = [tomllib.loads(path.read_text(encoding="utf-8")) for path in EXAMPLES]
    for data in examples:  # whose models are made by running them
        data.setdefault("policy", {})["model_name_or_path"] = "Qwen/Qwen3-0.6B"
    return [{}, GRPO, SFT, adapters, *everything, *examples]


def paths(data: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Every key that is written, tables included."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield (*path, key)
            yield from paths(value, (*path, key))


scalars = st.one_of(
    st.booleans(),
    st.integers(min_value=-3, max_value=9),
    st.integers(min_value=-(10**400), max_value=10**400),
    st.sampled_from(
        [0, -1, 2**31, 2**63, 2**64, 1e308, -0.0, 5e-324, float("inf"), float("-inf"), float("nan")]
    ),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from([
        "", " ", "grpo", "sft", "none", "None", "null", "true", "float32", "auto", "x" * 5000, "\u202e", "🦙",
        "x.py:f", "../nope", "~", "~nobody/x", "/", "/dev/null", "nul\0", "synthetic:addition", "synthetic:",
        "s3://bucket", "redis://", "redis://:secret@h:1/0", "file.parquet", "a/b", "a/b/c", "${train.epoch}",
        "/dev/zero", "/dev/zero.jsonl", ".", "..", "../" * 40, "/" + "d" * 300, "a/" * 3000, "a//b/./c",
        "\t", "a\nb", "a\x1b]0;title\x07", "\x9b1m", "\u2028", "\0.jsonl", " x", "x\r",
        "list(range(0,8))", "__import__('os').getcwd()", "(a+)+$", "[", "\ud800",
    ]),
)  # fmt: skip
sizes = st.sampled_from([256, 1024, 65_536, 65_537, 2**20, 2**31, 10**18, 2**63, 2**64, 10**300, 1e9, 1e18])
names = st.one_of(st.text(max_size=6), st.sampled_from(sorted({path[-1] for path in KEYS})))
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=6
)
operators = st.sampled_from([
    "drop", "retype", "retype", "retype", "write", "write", "rename", "typo", "nest", "unnest", "repeat", "deep",
    "move", "many", "long",
])  # fmt: skip
changes = st.lists(st.tuples(operators, st.integers(0, 10**6), names, values | sizes), min_size=1, max_size=4)


def mutate(base: dict[str, Any], steps: list[tuple[str, int, str, Any]]) -> dict[str, Any]:
    """The base after all steps; a step that finds nothing to do does nothing."""
    data = deepcopy(base)
    for operator, index, name, value in steps:
        written = list(paths(data))
        if operator == "write" or not written:
            _write(data, KEYS[index % len(KEYS)], value)
            continue
        path = written[index % len(written)]
        parent = _table(data, path[:-1])
        old = parent.pop(path[-1])
        if operator == "retype":
            parent[path[-1]] = value
        elif operator == "rename":
            parent[name] = old
        elif operator == "typo":
            at = index % (len(path[-1]) + 1)
            parent[path[-1][:at] + path[-1][at + 1 :] or "x"] = old
        elif operator == "nest":
            parent[path[-1]] = {name: old}
        elif operator == "unnest" and isinstance(old, dict):
            parent.update(old)
        elif operator == "repeat":
            parent[path[-1]] = [old, value]
        elif operator == "deep":
            parent[path[-1]] = _deep(old, 5 + index % 60, name)
        elif operator == "many":
            parent[path[-1]] = old
            parent.update((f"{name}{number}", index) for number in range(index % MANY))
        elif operator == "long":
            parent[path[-1]] = [old, value, *[index] * (index % MANY)]
        elif operator == "move":
            data[name] = old
    return data


def _table(data: dict[str, Any], path: Path_) -> dict[str, Any]:
    for part in path:
        data = data[part]
    return data


def _write(data: dict[str, Any], path: Path_, value: Any) -> None:
    for part in path[:-1]:
        if not isinstance(data.get(part), dict):
            data[part] = {}
        data = data[part]
    data[path[-1]] = value


def _deep(value: Any, levels: int, name: str) -> Any:
    for level in range(levels):
        value = [value] if level % 3 == 0 else {name: value}
    return value


# ---- files ------------------------------------------------------------------------------------------------

Spoil = Callable[[Path, bytes, int], object]
FILES: dict[str, Spoil] = {
    "mark": lambda path, text, at: path.write_bytes(b"\xef\xbb\xbf" + text),
    "another mark": lambda path, text, at: path.write_bytes(text.decode("utf-8", "replace").encode("utf-16")),
    "line ends": lambda path, text, at: path.write_bytes(text.replace(b"\n", b"\r\n")),
    "old line ends": lambda path, text, at: path.write_bytes(text.replace(b"\n", b"\r")),
    "no text": lambda path, text, at: path.write_bytes(_spliced(text, at, b"\xff\xc3")),
    "nul": lambda path, text, at: path.write_bytes(_spliced(text, at, b"\0")),
    "control": lambda path, text, at: path.write_bytes(_spliced(text, at, b"\x1b[2J\x07")),
    "cut": lambda path, text, at: path.write_bytes(text[: at % (len(text) + 1)]),
    "twice": lambda path, text, at: path.write_bytes(text + text),
    "quotes": lambda path, text, at: path.write_bytes(_spliced(text, at, b'"""' * (at % 3))),
    "brackets": lambda path, text, at: path.write_bytes(_spliced(text, at, b"[" * (at % 3000))),
    "dots": lambda path, text, at: path.write_bytes(b"a." * (at % 100_000) + b"a = 1\n" + text),
    "digits": lambda path, text, at: path.write_bytes(text + b"\n[custom]\nx = " + b"9" * (at % 100_000)),
    "long word": lambda path, text, at: path.write_bytes(text + b"\n" + b"k" * (at % 900_000) + b" = 1\n"),
    "large": lambda path, text, at: path.write_bytes(text + b"#" * (900_000 + at % 300_000)),
    "empty": lambda path, text, at: path.write_bytes(b""),
    "missing": lambda path, text, at: None,
    "directory": lambda path, text, at: path.mkdir(),
    "pipe": lambda path, text, at: os.mkfifo(path),
    "endless": lambda path, text, at: path.symlink_to("/dev/zero"),
    "loop": lambda path, text, at: path.symlink_to(path.name),
    "nowhere": lambda path, text, at: path.symlink_to("/nowhere/at/all"),
}
"""What may stand where a configuration is expected: its path, the text that it should hold, any number."""
ARGUMENTS = [
    "", ".", "..", "/", "nul\0.toml", "x" * 5000, "a/" * 3000 + "b.toml", "run.toml/x", "\x1b[2J.toml", "~",
]  # fmt: skip
"""Paths that name no configuration."""


def _spliced(text: bytes, at: int, piece: bytes) -> bytes:
    at %= len(text) + 1
    return text[:at] + piece + text[at:]
