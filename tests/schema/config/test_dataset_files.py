"""Which files of a directory are read for which split: no file for two, and none is left out in silence."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from schema.config.data_files import UnreadableDataError
from schema.config.dataset_files import choose, files_of
from schema.config.paths import DATA_FORMATS
from schema.config.sections.dataset import DatasetConfig


def make(directory: Path, names: str) -> Path:
    """A directory with these files; `a->b` is a link of the name a to b."""
    for name in names.split():
        link, _, target = name.partition("->")
        path = directory / link
        path.parent.mkdir(parents=True, exist_ok=True)
        if target:
            path.symlink_to(os.path.relpath(directory / target, path.parent))
        else:
            path.write_text('{"prompt": "?"}\n' if "state.json" not in name else "{}", encoding="utf-8")
    return directory


def chosen(directory: Path, role: str, splits: list[str] | None = None, apart: frozenset = frozenset()) -> str:
    """The names that are read, or the reason why none is."""
    try:
        found = choose(directory, splits or [], role, apart)  # type: ignore[arg-type]
    except UnreadableDataError as error:
        return f"error: {error}"
    said = [path for paths in found.unread.values() for path in paths]
    assert len({*said, *found.read}) == len(said) + len(found.read), "each file is said once"
    assert bool(found.how) == (not splits), "a choice of ours is said"
    return " ".join(str(path.relative_to(directory)) for path in found.read)


@pytest.mark.parametrize(
    ("names", "train", "validation"),
    [
        ("questions.jsonl test.jsonl", "questions.jsonl", "test.jsonl"),
        ("a.jsonl TEST.JSONL", "a.jsonl", "TEST.JSONL"),
        ("a.jsonl myTestSet.json", "a.jsonl", "myTestSet.json"),
        ("a.jsonl eval.jsonl", "a.jsonl", "eval.jsonl"),
        ("trainval.jsonl devtest.jsonl pretrain.jsonl", "trainval.jsonl", "devtest.jsonl"),
        ("a.jsonl held_out.jsonl", "a.jsonl", "held_out.jsonl"),
        ("a.jsonl tests/b.jsonl", "a.jsonl", "tests/b.jsonl"),
        ("a.jsonl test2.jsonl latest.jsonl contest.jsonl", "a.jsonl contest.jsonl latest.jsonl", "test2.jsonl"),
        ("train/a.parquet test/a.parquet", "train/a.parquet", "test/a.parquet"),
        ("d/train-0-of-2.parquet d/train-1-of-2.parquet d/validation-0-of-1.parquet d/test-0-of-1.parquet",
         "d/train-0-of-2.parquet d/train-1-of-2.parquet", "d/validation-0-of-1.parquet"),
        ("train.jsonl more.jsonl dev.jsonl test.jsonl", "train.jsonl", "dev.jsonl"),
        ("train.jsonl train_test.jsonl test.jsonl", "train.jsonl", "test.jsonl"),
        ("train.jsonl train/test.jsonl", "train.jsonl", "train/test.jsonl"),
        ("a-test/train.jsonl a-test/test.jsonl", "a-test/train.jsonl", "a-test/test.jsonl"),
        ("train_test_split/train.jsonl val.jsonl", "train_test_split/train.jsonl", "val.jsonl"),
        ("development/train.jsonl test.jsonl", "development/train.jsonl", "test.jsonl"),
        ("mathtrain.jsonl mathtest.jsonl", "mathtrain.jsonl", "mathtest.jsonl"),
        ("gsm8k.jsonl gsm8ktest.jsonl", "gsm8k.jsonl", "gsm8ktest.jsonl"),
        ("gsm.jsonl gsm_testmini.jsonl validate.jsonl", "gsm.jsonl", "validate.jsonl"),
        ("train-eval.jsonl val.jsonl", "error: {}: no file of a train split can be read", "val.jsonl"),
        ("train.jsonl.lz4 test.jsonl", "error: {}: no file of a train split can be read", "test.jsonl"),
        ("train.xlsx data.jsonl", "error: {}: no file of a train split can be read", "data.jsonl"),
        ("train.jsonl->gone test.jsonl", "error: {}: no file of a train split can be read", "test.jsonl"),
        ("train.jsonl->all.jsonl all.jsonl", "all.jsonl", "all.jsonl"),
        ("train.jsonl->x/all.jsonl test.jsonl->x/all.jsonl x/all.jsonl y.jsonl",
         "error: {}: no file of a train split", "error: {}: no file of a test split"),
        ("test.jsonl", "test.jsonl", "test.jsonl"),
        ("dev.jsonl test.jsonl", "error: {} has no file of a train split, and the splits dev, test", "dev.jsonl"),
        ("train_test.jsonl", "error: {}: no file of a train split can be", "error: {}: no file of a test split can"),
        ("a.jsonl a.parquet b.json b.jsonl test.json test.arrow", "a.parquet b.jsonl", "test.json"),
        ("a.jsonl test.jsonl.lz4", "a.jsonl", "error: {}: no file of a test split can be read"),
        ("a.jsonl .cache/train.jsonl _tmp/train.jsonl dataset_infos.json", "a.jsonl", "a.jsonl"),
        ("a.xlsx b.jsonl.7z", "error: {} holds no data file", "error: {} holds no data file"),
        ("real/a.jsonl linked->real real/up->real", "linked/a.jsonl", "linked/a.jsonl"),
        ("a/train.jsonl a/x->b b/y->a", "a/train.jsonl", "a/train.jsonl"),
        ("a.jsonl b/c.jsonl test->b", "a.jsonl", "b/c.jsonl"),
        ("a.jsonl state.json", "a.jsonl state.json", "a.jsonl state.json"),
    ],
)  # fmt: skip
def test_files_by_role(tmp_path: Path, names: str, train: str, validation: str) -> None:
    make(tmp_path, names)
    assert chosen(tmp_path, "train").startswith(train.format(tmp_path))
    assert chosen(tmp_path, "validation").startswith(validation.format(tmp_path))


@pytest.mark.parametrize(
    ("names", "splits", "read"),
    [
        ("train.jsonl test.jsonl", ["test", "train"], "test.jsonl train.jsonl"),
        ("train_sft-0.jsonl test_sft-0.jsonl train_gen-0.jsonl", ["train_sft"], "train_sft-0.jsonl"),
        ("train_sft-0.jsonl test_sft-0.jsonl", ["sft"], "error: {} holds no data file of split 'sft'"),
        ("math.jsonl test_math.jsonl", ["math"], "math.jsonl"),
        ("level1.jsonl level10.jsonl", ["level1"], "level1.jsonl"),
        ("train.jsonl train_test.jsonl", ["train"], "train.jsonl"),
        ("eval.jsonl", ["test"], "error: {} holds no data file of split 'test'"),
        ("eval.jsonl", [""], "error: {} holds no data file of split ''"),
        ("a.jsonl trainset.jsonl", ["train"], "trainset.jsonl"),
        ("dev-train.jsonl dev-test.jsonl", ["train"], "dev-train.jsonl"),
        ("train_test_split/train.jsonl train_test_split/test.jsonl", ["test"], "train_test_split/test.jsonl"),
    ],
)
def test_files_of_named_splits(tmp_path: Path, names: str, splits: list[str], read: str) -> None:
    assert chosen(make(tmp_path, names), "train", splits).startswith(read.format(tmp_path))


@pytest.mark.parametrize(
    ("names", "validation", "read"),
    [
        ("a.jsonl b.jsonl", {"name": "b.jsonl"}, "a.jsonl"),
        ("a.jsonl b.jsonl link.jsonl->b.jsonl", {"name": "link.jsonl"}, "a.jsonl"),
        ("a.jsonl b.jsonl", {"files": ["b.jsonl"]}, "a.jsonl"),
        ("a.jsonl apart/b.jsonl", {"name": "apart"}, "a.jsonl"),
        ("a.jsonl test.jsonl", {"name": "."}, "a.jsonl"),
        ("math_hard.jsonl math.jsonl", {"name": ".", "split": "hard"}, "math.jsonl"),
        ("a.jsonl b.jsonl", {"name": "."}, "error: {}: validation reads all of the files"),
        ("train.jsonl", {"name": ".", "split": "train"}, "error: {}: validation reads all of the files"),
    ],
)
def test_training_leaves_out_what_validation_reads(
    tmp_path: Path, names: str, validation: dict, read: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make(tmp_path, names))
    apart = files_of(DatasetConfig(**validation), "validation")
    assert apart
    assert chosen(tmp_path, "train", apart=apart).startswith(read.format(tmp_path))


@pytest.mark.parametrize(
    ("train", "read"),
    [
        ({"name": "a.jsonl"}, "b.jsonl"),
        ({"files": ["a.jsonl"]}, "b.jsonl"),
        ({"name": "."}, "a.jsonl b.jsonl"),
        ({"files": ["a.jsonl", "b.jsonl"]}, "error: {}: training reads all of the files"),
    ],
)
def test_validation_leaves_out_files_that_training_names(
    tmp_path: Path, train: dict, read: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make(tmp_path, "a.jsonl b.jsonl"))
    apart = files_of(DatasetConfig(**train), "train")
    assert chosen(tmp_path, "validation", apart=apart).startswith(read.format(tmp_path))


def test_why_a_file_is_not_read(tmp_path: Path) -> None:
    names = "train.jsonl a.jsonl test.jsonl train_dev.jsonl b.txt c.jsonl.lz4 .d.jsonl e.jsonl.bak f.jsonl~ part-0 "
    make(
        tmp_path,
        names + "dataset_info.json cache-1.arrow gone.jsonl->nowhere same_train.jsonl->train.jsonl README.md",
    )
    found = choose(tmp_path, [], "train")
    assert {path.name: reason for reason, paths in found.unread.items() for path in paths} == {
        "a.jsonl": "it names no split, and others do",
        "test.jsonl": "of the split test",
        "train_dev.jsonl": "its name or names tell splits of two kinds, train, validation",
        **dict.fromkeys(("b.txt", "e.jsonl.bak", "f.jsonl~", "part-0"), f"only {DATA_FORMATS} can be read"),
        "c.jsonl.lz4": "compressed: unpack it",
        ".d.jsonl": "hidden: a part of its path begins with . or _",
        "dataset_info.json": "it describes a dataset",
        "cache-1.arrow": "a cache of `datasets`",
        "gone.jsonl": "a link to nothing",
        "train.jsonl": "the same file as same_train.jsonl",
    }


def test_folders_that_datasets_saved(tmp_path: Path) -> None:
    for folder, split in (("a", "train"), ("b", "test")):
        make(tmp_path / folder, "data-0.arrow data-1.arrow cache-9.arrow dataset_info.json notes.jsonl")
        files = [{"filename": "data-0.arrow"}]
        (tmp_path / folder / "state.json").write_text(json.dumps({"_data_files": files, "_split": split}))
    assert chosen(tmp_path, "train") == "a/data-0.arrow"
    assert chosen(tmp_path, "validation") == "b/data-0.arrow"
    (tmp_path / "a" / "data-0.arrow").unlink()
    assert "lists data-0.arrow, which is not there" in chosen(tmp_path, "train")


@pytest.mark.parametrize(
    ("splits", "named", "train", "validation"),
    [
        (["train", "test"], [], "train/data-0.arrow", "test/data-0.arrow"),
        (["math"], [], "math/data-0.arrow", "math/data-0.arrow"),
        (["math", "code"], [], "error: dataset `{}` has the splits math, code", "error: dataset"),
        (["math", "math-hard"], ["math"], "math/data-0.arrow", "math/data-0.arrow"),
        (["math", "code"], ["train"], "error: {} holds no data file of split 'train'", "error: {} holds"),
    ],
)
def test_splits_that_datasets_saved(
    tmp_path: Path, splits: list[str], named: list[str], train: str, validation: str
) -> None:
    for split in splits:
        make(tmp_path, f"{split}/data-0.arrow")
        (tmp_path / split / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-0.arrow"}]}))
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": splits}))
    assert chosen(tmp_path, "train", named).startswith(train.format(tmp_path))
    assert chosen(tmp_path, "validation", named).startswith(validation.format(tmp_path))


CARD = "---\nlicense: mit\nconfigs:\n{}\n---\n# Data\n"
BROKEN = "its YAML is broken, so names tell the splits"
ONE = "- config_name: {}\n  data_files: {}\n"


@pytest.mark.parametrize(
    ("names", "configs", "train", "validation"),
    [
        ("good.jsonl raw.jsonl old.jsonl",
         ONE.format("x", "[{split: train, path: good.jsonl}, {split: test, path: raw.jsonl}]"),
         "good.jsonl", "raw.jsonl"),
        ("d/train-0.parquet d/train-1.parquet d/sub/train-2.parquet d/test-0.parquet",
         ONE.format("x", "[{split: train, path: d/train-*}, {split: test, path: ['./d/test-0.parquet']}]"),
         "d/train-0.parquet d/train-1.parquet", "d/test-0.parquet"),
        ("a/test.jsonl a/b/c.jsonl", ONE.format("x", "'**/*.jsonl'"),
         "a/b/c.jsonl a/test.jsonl", "a/b/c.jsonl a/test.jsonl"),
        ("a.jsonl a/b.jsonl a/c/d.jsonl", ONE.format("x", "['a/**']"),
         "a/b.jsonl a/c/d.jsonl", "a/b.jsonl a/c/d.jsonl"),
        ("a.jsonl a.parquet test.jsonl", ONE.format("x", "[{split: train, path: a.jsonl}]"), "a.jsonl", "a.jsonl"),
        ("main/train.jsonl more/train.jsonl", ONE.format("main", "main/*") + ONE.format("more", "more/*"),
         "error: {}/README.md declares several configurations (main, more)", "error: {}/README.md declares several"),
        ("a.jsonl b.jsonl", ONE.format("b", "b.jsonl") + ONE.format("default", "a.jsonl"), "a.jsonl", "a.jsonl"),
        ("a.jsonl b.jsonl", ONE.format("a", "a.jsonl") + ONE.format("b", "b.jsonl") + "  default: true\n",
         "b.jsonl", "b.jsonl"),
        ("d/a.jsonl a.jsonl", ONE.format("x", "a.jsonl") + "  data_dir: d\n", "d/a.jsonl", "d/a.jsonl"),
        ("a.xlsx test.jsonl", ONE.format("x", "[{split: train, path: a.xlsx}, {split: test, path: test.jsonl}]"),
         "error: {}: no file of the split train can be read", "test.jsonl"),
        ("train.jsonl b.jsonl", "- config_name: x", "train.jsonl", "b.jsonl"),
        ("train.jsonl b.jsonl", "- [", "train.jsonl", "b.jsonl"),
    ],
)  # fmt: skip
def test_splits_that_a_card_declares(tmp_path: Path, names: str, configs: str, train: str, validation: str) -> None:
    (make(tmp_path, names) / "README.md").write_text(CARD.format(configs.rstrip()), encoding="utf-8")
    assert chosen(tmp_path, "train").startswith(train.format(tmp_path))
    assert chosen(tmp_path, "validation").startswith(validation.format(tmp_path))
    if configs == "- [":
        assert choose(tmp_path, [], "train").unread[BROKEN] == [tmp_path / "README.md"]
