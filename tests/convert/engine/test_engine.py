"""The core without a real system: rows, spellings, defaults, contradictions, fallbacks, reports, detection."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from convert import convert, convert_text
from convert.engine import to
from convert.engine.engine import convert_source
from convert.engine.fallback import SPEED_ONLY, nearest
from convert.engine.keys import dotted, leaves, split_key, store
from convert.engine.model import Conversion, Outcome, mapped
from convert.engine.registry import detect, readers
from convert.engine.rules import ConversionContext, Converter, Reader, Rule
from convert.engine.source import Source, read_source
from convert.engine.unsupported import ClosedList
from convert.engine.write import to_json, to_report, to_toml
from schema.config import ConfigError
from schema.config.availability import UNAVAILABLE, Unavailable
from tests.schema.config_samples import refused

ROWS = (
    Rule("lr", to.number("train.optm_lr"), default=1e-5, also=("learning_rate",)),
    Rule("steps", to.integer("train.max_num_steps")),
    Rule("compile", to.flag("train.compile"), default=False),
    Rule("kl", to.number("train.train_policy.kl_beta")),
    Rule("model.path", to.path("policy.model_name_or_path")),
    Rule("model.other", to.text("policy.model_name_or_path")),
    Rule("style", to.choice("train.optm_decay_type", {"flat": None, "line": "linear"})),
    Rule("noise", to.unless([0], "0: none", to.always("not here"))),
    Rule("free.*", to.always("whatever it is")),
    Rule("idle", to.integer("train.epoch"), default=9, when=lambda context: "off"),
    Rule("logger", to.text("logging.project_name"), default="theirs"),
)


def finish(context: ConversionContext) -> None:
    """What follows from the system as such."""
    context.add("train.epsilon", 1e-7, "theirs")


NOTHING = ClosedList({}, {})
READER = Reader("toy", "Toy", {"toy": "a toy"}, NOTHING, lambda source: "toy", ("lr",), lambda kind: ROWS, finish)


def run(yaml: str, reader: Reader = READER) -> Conversion:
    """The conversion of a text by the toy reader."""
    return convert_source(read_source(yaml, "toy.yaml"), reader, "toy", {})


def test_each_leaf_has_one_entry_with_its_line() -> None:
    conversion = run("lr: 1e-4\nmodel:\n  path: m\nfree: {a: 1, b: {c: 2}}\nwhat: 3\n")
    assert conversion.leaves == ("lr", "model.path", "free.a", "free.b.c", "what")
    assert [entry.line for entry in conversion.entries] == [1, 3, 4, 4, 5]
    outcomes = [entry.outcome for entry in conversion.entries]
    assert outcomes == [Outcome.MAPPED, Outcome.MAPPED, Outcome.IMPLICIT, Outcome.IMPLICIT, Outcome.UNKNOWN]
    assert conversion.config["train"]["optm_lr"] == 1e-4


def test_other_spellings() -> None:
    assert run("learning_rate: 3e-4").config["train"]["optm_lr"] == 3e-4
    both = run("learning_rate: 3e-4\nlr: 1e-4")
    assert both.config["train"]["optm_lr"] == 1e-4
    assert both.entry("learning_rate").outcome is Outcome.IMPLICIT
    assert any("contradict" in warning for warning in both.warnings)
    assert not run("learning_rate: 1e-4\nlr: 1e-4").warnings
    assert run("learning_rate: 3e-4\nlr: null").config["train"]["optm_lr"] == 3e-4


def test_defaults_are_written_only_where_they_differ_and_act() -> None:
    additions = {addition.key: addition.value for addition in run("steps: 3").additions}
    assert additions["train.optm_lr"] == 1e-5
    assert additions["logging.project_name"] == "theirs"
    assert additions["train.epsilon"] == 1e-7
    assert "train.epoch" not in additions  # its row has no effect
    same = Rule("lr", to.number("train.optm_lr"), default=1e-6)
    reader = Reader("toy", "Toy", {}, NOTHING, READER.detect, (), lambda kind: (same,))
    assert "train.optm_lr" not in {addition.key for addition in run("a: 1", reader).additions}


def test_the_first_of_two_contradicting_keys_wins_and_it_is_said() -> None:
    conversion = run("model: {path: first, other: second}")
    assert conversion.config["policy"]["model_name_or_path"] == "first"
    assert conversion.entry("model.other").outcome is Outcome.IMPLICIT
    assert any("second" in warning for warning in conversion.warnings)
    assert not run("model: {path: one, other: one}").warnings


def test_null_and_empty_tables() -> None:
    conversion = run("model: null\nfree: {}\nlr: null")
    assert {entry.outcome for entry in conversion.entries} == {Outcome.IMPLICIT}


@pytest.mark.parametrize(
    ("yaml", "words"),
    [
        ("model: 3", "table"),
        ("lr: {a: 1}", "single value"),
        ("lr: soon", "a number"),
        ("steps: 1.5", "whole number"),
        ("compile: maybe", "true or false"),
        ("style: round", "flat, line"),
        ("lr: .nan", "finite"),
        ("stesp: 1", "did you mean `steps`"),
        ("train: {lr: 1}", "did you mean `lr`"),
    ],
)
def test_what_cannot_be_understood_says_why(yaml: str, words: str) -> None:
    (entry,) = run(yaml).of(Outcome.UNKNOWN)
    assert words in entry.note


def test_what_toml_cannot_hold_is_not_written() -> None:
    rules = (Rule("list", Converter(lambda context, leaf: mapped(("custom.x", leaf.value)))),)
    reader = Reader("toy", "Toy", {}, NOTHING, READER.detect, (), lambda kind: rules)
    for value in ("[1, null]", "[[.nan]]", "[{a: null}]"):
        (entry,) = run(f"list: {value}", reader).entries
        assert entry.outcome is Outcome.UNKNOWN, value
    assert run("list: [1, {a: 2}]", reader).config["custom"] == {"x": [1, {"a": 2}]}


def test_numbers_in_text_are_numbers() -> None:
    keys = run("lr: '1e-4'\nsteps: '8'\ncompile: 'False'").config["train"]
    assert (keys["optm_lr"], keys["max_num_steps"], keys["compile"]) == (1e-4, 8, False)


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that cannot compile."""
    monkeypatch.setitem(UNAVAILABLE, "train.compile", Unavailable((False,), "torch.compile"))


@pytest.mark.usefixtures("without_compiler")
def test_speed_falls_back_and_vanishes_with_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    conversion = run("compile: true")
    entry = conversion.entry("compile")
    assert entry.outcome is Outcome.FALLBACK
    assert entry.faithful == (("train.compile", True),)
    assert conversion.config["train"]["compile"] is False
    assert "faithful: compile = true" in to_toml(conversion)
    monkeypatch.delitem(UNAVAILABLE, "train.compile")
    later = run("compile: true")
    assert later.entry("compile").outcome is Outcome.MAPPED
    assert later.config["train"]["compile"] is True


@pytest.mark.usefixtures("without_compiler")
def test_our_own_defaults_fall_back_too() -> None:
    rules = (Rule("lr", to.number("train.optm_lr")),)
    reader = Reader("toy", "Toy", {}, NOTHING, READER.detect, (), lambda kind: rules)
    conversion = run("lr: 1e-5", reader)
    assert conversion.config["train"]["compile"] is False
    assert any(addition.key == "train.compile" and addition.faithful is True for addition in conversion.additions)


def test_what_changes_numbers_never_falls_back() -> None:
    conversion = run("kl: 0.1")
    assert conversion.config["train"]["train_policy"]["kl_beta"] == 0.1
    assert conversion.entry("kl").outcome is Outcome.MAPPED
    assert not any(key in SPEED_ONLY for key in ("train.train_policy.kl_beta", "policy.parallelism.tp_size"))


def test_keys_of_a_role_that_is_not_built_stay_as_meant() -> None:
    asked = {"reward_model": {"enable": True, "mini_batch": 5}}
    assert "reward_model.mini_batch" not in nearest(asked)
    assert nearest({"reward_model": {"mini_batch": 5}})["reward_model.mini_batch"][0] == 16


@pytest.mark.usefixtures("without_compiler")
def test_a_faulty_value_does_not_stop_fallbacks() -> None:
    assert nearest({"train": {"compile": True, "optm_lr": "soon"}})["train.compile"][0] is False
    assert nearest({"train": {"train_policy": {"type": "dance"}, "compile": True}})["train.compile"][0] is False


def test_toml_and_reports_carry_anything() -> None:
    nasty = 'model: {path: "a\\n#b \'c\' \\\\ \\u2028"}\n"we\\nird": "x\\u0000y"\nls: [1, {a: null}]\nd: .inf\n'
    conversion = run(nasty)
    written = to_toml(conversion)
    assert tomllib.loads(written) == conversion.config
    assert "\x00" not in written
    json.dumps(to_json(conversion), allow_nan=False)
    assert all(ord(char) >= 32 or char == "\n" for char in to_report(conversion))


def test_keys_are_written_in_the_order_of_the_schema() -> None:
    written = to_toml(run("logger: a\nlr: 1\nmodel: {path: p}"))
    assert written.index("[train]") < written.index("[policy]") < written.index("[logging]")


def test_dotted_keys_and_back() -> None:
    for parts in (("a", "b"), ("a.b", "c"), ('q"uote', "数据"), ("with blank", "x"), ("",)):
        assert split_key(dotted(parts)) == parts


def test_leaves_and_store() -> None:
    assert list(leaves({"a": {"b": 1, "c": {}}, "d": [1]})) == [(("a", "b"), 1), (("a", "c"), {}), (("d",), [1])]
    table: dict[str, Any] = {}
    assert store(table, ("a", "b"), 1)
    assert not store(table, ("a", "b", "c"), 1)
    assert not store(table, ("a",), 2)
    assert table == {"a": {"b": 1}}


# --- files and detection --------------------------------------------------------------------------------------


def test_a_file_that_belongs_to_nobody_says_what_was_looked_for() -> None:
    (problem,) = refused(convert_text, "colour: red\nsize: 3", "paint.yaml")
    assert "colour, size" in problem.message
    assert "actor_rollout_ref" in problem.hint


def test_keys_with_dots_are_named() -> None:
    (problem,) = refused(convert_text, "algorithm.adv_estimator: grpo\n++trainer.total_epochs: 3", "run.yaml")
    assert "nest its parts" in problem.hint


def test_a_file_of_two_systems_asks_which() -> None:
    twin = Reader("twin", "Twin", {}, NOTHING, lambda source: "toy", (), lambda kind: ROWS)
    assert "Toy and Twin" in refused(detect, Source("f.yaml", {"lr": 1}), [READER, twin])[0].message


def test_readers_agree_with_their_names() -> None:
    systems: Sequence[str] = [reader.system for reader in readers()]
    assert "verl" in systems
    assert len(set(systems)) == len(systems)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for name, content in (("absent.yaml", None), ("bytes.yaml", b"\xff\xfe\x00"), ("large.yaml", b"a" * 5_000_000)):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError):
            convert(tmp_path / name)
    with pytest.raises(ConfigError):
        convert(tmp_path)


def test_a_named_system_must_fit() -> None:
    with pytest.raises(ConfigError):
        convert_text("colour: red", "paint.yaml", system="verl")
