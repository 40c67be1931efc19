"""Tables of rows: what a row becomes, what is wrong with one, and that every row and every function is used."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from convert.engine.model import Result
from convert.engine.registry import readers
from convert.engine.rules import ABSENT, ConversionContext, KeyPath, Rule
from convert.engine.table import Table, TableError


def _twice(context: ConversionContext, leaf: KeyPath) -> Result:
    return leaf.to(2 * leaf.value, leaf.value)


def is_idle(context: ConversionContext) -> str:
    return "idle"


NAMES = {"_twice": _twice, "is_idle": is_idle, "ours": "train", "sizes": ("a", "b")}


def table(tmp_path: Path, text: str) -> Table:
    (tmp_path / "keys.txt").write_text(text)
    return Table(tmp_path / "keys.txt", NAMES)


def rule(tmp_path: Path, text: str) -> Rule:
    """The only rule of a part."""
    (only,) = table(tmp_path, f"$grown = train.seed\n\n== part\n{text}\n").rules("part")
    return only


@pytest.mark.parametrize(
    ("text", "key", "default", "also", "ours", "words"),
    [
        ("x  number($ours.lr)", "x", ABSENT, (), ("train.lr",), ""),
        ("[t]\nx/y = [1, None]  flag($grown) | so", "t.x", [1, None], ("t.y",), ("train.seed",), "so"),
        ("x\n    twice(a.b, a.c)", "x", ABSENT, (), ("a.b", "a.c"), ""),
        ('x  always(\n  "a no")', "x", ABSENT, (), (), "a no"),
    ],
)
def test_a_row_is_a_rule(
    tmp_path: Path, text: str, key: str, default: object, also: tuple[str, ...], ours: tuple[str, ...], words: str
) -> None:
    made = rule(tmp_path, text)
    assert (made.key, made.default, made.also, made.converter.ours) == (key, default, also, ours)
    assert made.converter.words == words


def test_functions_of_a_row_get_the_keys_that_it_names(tmp_path: Path) -> None:
    made = rule(tmp_path, 'x  twice(a.b, a.c, null="none")')
    context: ConversionContext = None  # type: ignore[assignment]
    assert made.converter.run(context, KeyPath("x", 3)).targets == (("a.b", 6), ("a.c", 3))
    assert made.converter.run(context, KeyPath("x", None)).note == "none"


def test_parts_stand_below_the_table_that_includes_them(tmp_path: Path) -> None:
    inner = "== inner\n[in]\n{x y}.{$sizes} z  flag(a.b)\n"
    text = f"{inner}\n== outer\n[out] when is_idle\n@ inner\n[]\nv = @out.in.z  flag(a.b)"
    rules = table(tmp_path, text).rules("outer")
    assert [rule.key for rule in rules] == [*(f"out.in.{name}" for name in ("x.a", "x.b", "y.a", "y.b", "z")), "v"]
    assert [rule.when for rule in rules] == [is_idle] * 5 + [None]
    assert rules[-1].follows == "out.in.z"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("x  strange(a.b)", "`strange` is not known"),
        ("x  flag(a.b", "was never closed"),
        ("x  flag()", "missing 1 required positional argument"),
        ("x", "needs a converter"),
        ("x  flag($nothing)", "`nothing` is not known"),
        ("x  flag(a.b) when never", "`never` is not known"),
        ("x  sizes", "expected a converter"),
    ],
)
def test_an_error_names_file_and_line(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(TableError, match=rf"^[^/]*/keys\.txt:5: .*{message}"):
        table(tmp_path, f"\n# a word\n== part\n[a]\n{row}\n").rules("part")


OWNERS = {
    "convert.verl": ("facts", "actor algorithm data mesh optim rollout shared trainer"),
    "convert.roll": ("converters", "actor_infer algorithm converters pipeline reader rewards training"),
    "convert.cosmos": ("rules", "rules"),
}
"""System -> the module of its table and the modules of the functions of its keys."""
HELPERS = {
    "_contents",
    "_of_own_class",
    "_oversampled",
    "_profiles",
    "_samples",
    "_worker",
    "named_devices",
    "truncated",
}
"""Functions of a key that other functions call."""


@pytest.mark.parametrize("package", OWNERS)
def test_every_row_becomes_a_rule_and_every_function_of_a_row_is_used(package: str) -> None:
    for reader in readers():
        for kind in reader.kinds:
            assert reader.rules(kind)
    of_keys, names = OWNERS[package]
    keys, closed = (import_module(f"{package}.{name}") for name in (of_keys, "unsupported"))
    used = keys.KEYS.used
    assert keys.KEYS.parts.keys() - {"prose"} <= used, "a part that nothing includes"
    assert closed.LISTED.parts.keys() <= closed.LISTED.used, "a part that nothing includes"
    assert closed.LISTED.constants.keys() <= closed.LISTED.used | used, "a text that no row has"
    modules = [import_module(f"{package}.{name}") for name in names.split()]
    classes = [one for module in modules for one in vars(module).values() if isinstance(one, type)]
    for owner in (*modules, *classes):
        for name, function in vars(owner).items():
            arguments = getattr(getattr(function, "__code__", None), "co_varnames", ())
            if {"context", "leaf"} <= set(arguments[:3]) and function.__code__.co_argcount < 4:
                assert {name, name.lstrip("_")} & (used | HELPERS), f"{owner}: {name}"
