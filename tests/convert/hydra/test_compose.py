"""Words and composed files, case by case; `test_oracle` compares random ones with Hydra."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from convert.hydra.compose import Composed, compose
from convert.hydra.words import BadWord, parse_word
from tests.schema.config_samples import refused

FILES = {
    "main": "defaults:\n- engine: dp\n- role@actor: ${engine}_role\n- _self_\nn: 1\nlist: [{a: 1}]\n",
    "engine/dp": "# @package _global_\nengine: dp\n",
    "engine/ep": "# @package _global_\nengine: ep\n",
    "role/base": "lr: 1e-3\npath: ???\n",
    "role/dp_role": "defaults:\n- base\n- _self_\nkind: dp\n",
    "role/ep_role": "defaults: [base, _self_]\nkind: ep\n",
}


@pytest.fixture
def main(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path / "main.yaml"


def composed(main: Path, *words: str, known: tuple[str, ...] = ()) -> Composed:
    return compose(main, [parse_word(word) for word in words], (), known)


def test_files_and_words_are_one_table_with_the_lines_of_the_primary_file(main: Path) -> None:
    result = composed(main, "engine=ep", "actor.lr=2", "+actor.new.key=[x,1]", "~n", "list.0.a=3", "actor.path=/x")
    assert result.data == {
        "engine": "ep",
        "actor": {"lr": 2, "path": "/x", "kind": "ep", "new": {"key": ["x", 1]}},
        "list": [{"a": 3}],
    }
    assert [path.relative_to(main.parent).as_posix() for path in result.files] == [
        "engine/ep.yaml", "role/base.yaml", "role/ep_role.yaml", "main.yaml",
    ]  # fmt: skip
    assert composed(main).lines[("n",)] == 5
    assert ("n",) not in composed(main, "n=2").lines
    assert composed(main, "+n=2").notes == ("`+n=2` adds a key that is there, with 1: read as n=2",)


FAULTS: list[tuple[dict[str, str], list[str], str]] = [
    ({}, ["m=2"], "`m=2` sets `m`, which the configuration does not have"),
    ({}, ["actor={lr: 1, m: 2}"], "sets `actor.m`, which the configuration does not have"),
    ({}, ["n.x=2"], "sets `n.x`, which"),
    ({}, ["~m"], "`~m` removes a key that is not there"),
    ({}, ["~n=7"], "removes another value than 1"),
    ({}, ["list.4.a=2"], "`list` has no item 4"),
    ({}, ["engine=np"], "`defaults` of main names `engine/np`, which is not there"),
    ({}, ["role=dp_role"], "no list of defaults has an entry role"),
    ({}, ["~role"], "no list of defaults has an entry role"),
    ({}, ["x@actor=1"], "chooses a file of the group x, which is not there"),
    ({"main": "defaults: [base]"}, [], "`defaults` of main names `base`, which is not there"),
    ({"main": "defaults: [main]"}, [], "leads back to it: main -> main"),
    ({"main": "defaults: x"}, [], "`defaults` of main is not a list"),
    ({"main": "defaults: [{a: b, c: d}]"}, [], "neither a name nor `group: name`"),
    ({"main": "defaults: [_self_, _self_]"}, [], "has _self_ twice"),
    ({"main": "defaults: [{engine: \"???\"}]"}, [], "engine must be chosen"),
    ({"main": "defaults: [{engine: '${oops}'}]"}, [], "`${oops}` in `defaults` of main names no group"),
    ({"engine/dp": "engine: !!python/name:os.system"}, [], "makes objects, which is not read"),
    ({"engine/dp": "a: &a [x, x]\nb: [" + ", ".join(["*a"] * 60_000) + "]"}, [], "more than 100000 values"),
    ({"main": "hydra: {searchpath: nowhere}"}, [], "hydra.searchpath is not a list"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "words", "message"), FAULTS, ids=[message[:40] for _, _, message in FAULTS])
def test_what_does_not_fit_together_is_named(
    main: Path, files: dict[str, str], words: list[str], message: str
) -> None:
    for name, text in files.items():
        (main.parent / f"{name}.yaml").write_text(text)
    (problem,) = refused(composed, main, *words)
    assert message in problem.message
    assert problem.hint


def test_files_are_looked_for_on_the_search_path_and_known_ones_may_be_missing(main: Path, tmp_path: Path) -> None:
    other = tmp_path / "job" / "job.yaml"
    other.parent.mkdir()
    other.write_text("hydra: {searchpath: [file://..]}\ndefaults: [main, _self_]\nn: 3\n")
    assert (composed(other).data["n"], composed(other).data["actor"]["kind"]) == (3, "dp")
    other.write_text("defaults: [verl_file, _self_]\nn: 3\n")
    result = composed(other, "actor.lr=1", known=("verl_file",))
    assert (result.data, result.left_out) == ({"n": 3, "actor": {"lr": 1}}, ("verl_file",))


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("a=", ""),
        ("a=1e-6", 1e-6),
        ("a=1_000", 1000),
        ("a=TRUE", True),
        ("a=null", None),
        ("a='1'", "1"),
        ("a=x:y/z", "x:y/z"),
        ("a=[a b,'c,d',{e: 1}]", ["a b", "c,d", {"e": 1}]),
        ("a=x\\,y", "x,y"),
        ("a=${b.c}_x", "${b.c}_x"),
        (r"a='it\'s'", "it's"),
    ],
)
def test_values_of_words(word: str, value: Any) -> None:
    assert parse_word(word).value == value


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("a", "not of the form key=value"),
        ("a b=1", "not of the form"),
        ("a=b=c", "`=` cannot stand here unquoted"),
        ("a=1,2,3", "start up to 3 jobs"),
        ("a=[1,2", "ends too early"),
        ("a='x", "a quote that is not closed"),
        ("a=choice(1,2)", "`choice(…)` is a function of Hydra"),
        ("a=" + "[" * 40, "more than 32 deep"),
        ("a=" + "x" * 70_000, "not an override"),
    ],
    ids=lambda text: text[:12],
)
def test_words_that_hydra_refuses_or_that_start_several_jobs(word: str, message: str) -> None:
    with pytest.raises(BadWord, match=message.replace("(", r"\(").replace(")", r"\)").replace("[", r"\[")):
        parse_word(word)
