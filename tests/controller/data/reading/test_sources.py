"""Datasets from real files: the same rows, whatever they are stored as, and errors that name the file."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from controller.data.errors import DataError
from controller.data.reading.sources import column, open_hub, open_source, require_column
from controller.data.rows import report_of
from schema.config import DatasetConfig
from schema.config.columns import columns_of
from tests.controller.data.conftest import write
from tests.support.memory import peak_bytes

ROWS = [{"prompt": f"question {i}", "answer": str(i), "extra": {"level": i % 3}} for i in range(5)]


def read(name: Path | str, role: str = "train", **keys: object) -> list[dict]:
    source = open_source(DatasetConfig(name=str(name), **keys), role, 0)
    rows = list(source.rows())
    assert len(rows) == len(source)
    assert list(source.rows()) == rows, "a source can be read twice"
    return rows


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
def test_every_format_gives_the_same_rows(tmp_path: Path, suffix: str):
    path = write(tmp_path / f"rows{suffix}", ROWS)
    assert read(path) == ROWS
    assert open_source(DatasetConfig(name=str(path)), "train", 0).columns == ["prompt", "answer", "extra"]


def test_json_lines_in_a_json_file_and_blank_lines_are_read(tmp_path: Path):
    path = tmp_path / "rows.json"
    path.write_text("\n" + "\n\n".join(json.dumps(row) for row in ROWS), encoding="utf-8")
    assert read(path) == ROWS


def test_a_directory_is_read_in_order_of_its_names(tmp_path: Path):
    write(tmp_path / "b.jsonl", ROWS[3:])
    write(tmp_path / "a.jsonl", ROWS[:3])
    assert read(tmp_path) == ROWS


def test_a_directory_with_splits(tmp_path: Path):
    write(tmp_path / "data" / "train-00000-of-00002.parquet", ROWS[:2])
    write(tmp_path / "data" / "train-00001-of-00002.parquet", ROWS[2:3])
    write(tmp_path / "data" / "test-00000-of-00001.parquet", ROWS[3:])
    assert read(tmp_path) == ROWS[:3], "training takes `train` where there is one"
    assert read(tmp_path, "validation") == ROWS[3:], "validation takes the test split"
    assert read(tmp_path, split=["test", "train"]) == ROWS[3:] + ROWS[:3], "splits come in the order named"
    with pytest.raises(DataError, match="no data file of split 'dev'"):
        read(tmp_path, split="dev")


def test_a_single_file_has_no_splits(tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", ROWS)
    assert read(path, split="train") == ROWS
    for role in ("train", "validation"):
        with pytest.raises(DataError, match="has no split 'test'"):
            read(path, role, split="test")


def test_a_hub_dataset_is_loaded_by_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`datasets` treats a directory as it treats a repository of the hub, so this is its real loader."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    write(tmp_path / "repo" / "train.jsonl", ROWS[:3])
    write(tmp_path / "repo" / "test.jsonl", ROWS[3:])
    config = DatasetConfig(name=str(tmp_path / "repo"))
    assert list(open_hub(config, "train").rows()) == ROWS[:3]
    assert list(open_hub(config, "validation").rows()) == ROWS[3:]
    both = open_hub(DatasetConfig(name=config.name, split=["test", "train"]), "train")
    assert list(both.rows()) == ROWS[3:] + ROWS[:3]
    with pytest.raises(DataError, match="no split 'dev'; it has train, test"):
        open_hub(DatasetConfig(name=config.name, split="dev"), "train")


def test_the_synthetic_dataset_by_its_splits():
    options = {"n": 3}
    assert len(read("synthetic:addition", options=options)) == 3
    held_out = read("synthetic:addition", "validation", options=options)
    assert held_out == read("synthetic:addition", split="held_out", options=options)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rows.jsonl", '\n{"a": \n', "rows.jsonl, line 2 is not valid JSON"),
        ("rows.jsonl", "\n3\n", "rows.jsonl, line 2 is not an object of columns but int"),
        (
            "rows.jsonl",
            '{"a": {"c": 0, "b": 1, "b": 2}}',
            "line 1 is not valid JSON: an object has the key 'b' more than once: keep one of them",
        ),
        ("rows.json", "[1]", "rows.json, row 1 is not an object"),
        ("rows.json", "[{", "rows.json is not valid JSON"),
        ("rows.parquet", "text", "rows.parquet is not a readable parquet file"),
        ("rows.txt", "a,b", "only .parquet, .jsonl, .ndjson, .json, .arrow, .csv, .tsv"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, text: str, message: str):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=re.escape(message)):
        read(tmp_path / name)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "nowhere.jsonl"}, "nowhere.jsonl does not exist"),
        ({"name": "./nowhere"}, "nowhere does not exist"),
        ({"name": "synthetic:subtraction"}, "`synthetic:subtraction` is unknown"),
        ({"name": "synthetic:addition", "split": "test"}, "it has train, held_out"),
        ({"name": "synthetic:addition", "revision": "main"}, "neither subset nor revision"),
        ({"name": "some/name", "options": {"n": 1}}, "takes no options"),
        ({"name": "some/name", "files": ["a.jsonl"]}, "dataset files stand alone"),
    ],
)
def test_what_cannot_be_opened_is_named(config: dict, message: str):
    with pytest.raises(DataError, match=re.escape(message)):
        open_source(DatasetConfig(**config), "train", 0)


def test_an_empty_directory_is_named(tmp_path: Path):
    with pytest.raises(DataError, match="holds no data file"):
        read(tmp_path)


def test_a_column_is_one_that_every_file_has(tmp_path: Path):
    write(tmp_path / "a.jsonl", ROWS)
    write(tmp_path / "b.jsonl", [{"prompt": "x", "extra": {}}])
    source = open_source(DatasetConfig(name=str(tmp_path)), "train", 0)
    assert source.columns == ["prompt", "extra"]
    assert list(source.rows())[-1] == {"prompt": "x", "extra": {}, "answer": None}
    require_column(source, "extra.level", "key")
    with pytest.raises(DataError, match=r"key = 'answer': .*b\.jsonl has no such column; it has prompt, extra"):
        require_column(source, "answer", "key")


@pytest.mark.parametrize(("name", "text"), [("b.jsonl", ""), ("b.json", "[]"), ("b.json", " \n"), ("0.jsonl", "\n")])
def test_an_empty_shard_has_no_rows(tmp_path: Path, name: str, text: str):
    write(tmp_path / "a.parquet", ROWS[:2])
    write(tmp_path / "c.jsonl", ROWS[2:])
    (tmp_path / name).write_text(text)
    assert read(tmp_path) == ROWS
    source = open_source(DatasetConfig(name=str(tmp_path)), "train", 0)
    assert source.columns == list(ROWS[0])
    require_column(source, "prompt", "key")
    assert report_of(source).remarks == [f"{tmp_path / name} holds no row"]


@pytest.mark.parametrize("name", ["part-0.parquet", "part-0.jsonl"])
def test_columns_that_folders_hold_are_read(tmp_path: Path, name: str):
    write(tmp_path / "level=1" / "lang=e%20n" / name, ROWS[:2])
    write(tmp_path / "level=__HIVE_DEFAULT_PARTITION__" / "answer=x" / name, ROWS[2:])
    source = open_source(DatasetConfig(name=str(tmp_path)), "train", 0)
    folders = [{"level": "1", "lang": "e n"}] * 2 + [{"level": None, "lang": None}] * 3
    assert list(source.rows()) == [row | folder for row, folder in zip(ROWS, folders, strict=True)]
    named = [text.partition(":")[0] for text in report_of(source).remarks]
    assert named == ["column `level`", "column `lang`"]
    columns = columns_of(tmp_path)
    assert columns is not None
    assert {"level", "lang", "prompt", "answer"} <= columns.fields.keys()


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        ("train-00000-of-00002 train-00001-of-00002", ""),
        ("train-00000-of-00002", "1 of 2 files of a set are read: {}/train-00001-of-00002.jsonl is none of them"),
        ("a-00001-of-00003-x a-00002-of-00003-x", "2 of 3 files of a set are read: {}/a-00000-of-00003-x.jsonl is"),
        ("a-1-of-2 a-2-of-2 b-1-of-2 b-2-of-2", ""),
        ("a-2-of-2", "1 of 2 files of a set are read: {}/a-1-of-2.jsonl is none"),
        ("a-0-of-1 x/a-0-of-2", "1 of 2 files of a set are read: {}/x/a-1-of-2.jsonl is none"),
    ],
)  # fmt: skip
def test_files_that_are_missing_by_their_names_are_remarked(tmp_path: Path, names: str, missing: str):
    for name in names.split():
        write(tmp_path / f"{name}.jsonl", ROWS)
    remarks = "".join(report_of(open_source(DatasetConfig(name=str(tmp_path)), "train", 0)).remarks)
    assert remarks.startswith(missing.format(tmp_path))
    assert bool(remarks) == bool(missing)


def test_files_come_in_the_order_named_and_rows_know_their_file(tmp_path: Path):
    b, a = write(tmp_path / "b.parquet", ROWS[:3]), write(tmp_path / "a.jsonl", ROWS[3:])
    source = open_source(DatasetConfig(files=[str(b), str(a), str(b)]), "train", 0)
    assert list(source.rows()) == ROWS + ROWS[:3]
    assert report_of(source).remarks == [f"{b} is read 2 times, as {b}, {b}"]
    where = [source.where(i) for i in (0, 2, 3, 7)]
    assert where == [f"{b}, row 1", f"{b}, row 3", f"{a}, row 1", f"{b}, row 3"]
    for wrong in (tmp_path, tmp_path / "nope.jsonl"):
        with pytest.raises(DataError, match="does not exist, or is not a file"):
            open_source(DatasetConfig(files=[str(b), str(wrong)]), "train", 0)


def test_dots_reach_into_structs_and_exact_names_win():
    row = {"a": {"b": {"c": 1}}, "a.b": 2, "text": '{"b": 3}'}
    assert column(row, "a.b.c") == 1
    assert column(row, "a.b") == 2
    assert column(row, "text.b") == 3
    for missing in ("z", "a.z", "a.b.c.d"):
        with pytest.raises(KeyError):
            column(row, missing)


def test_a_missing_column_is_answered_with_those_that_exist(tmp_path: Path):
    source = open_source(DatasetConfig(name=str(write(tmp_path / "r.jsonl", ROWS))), "train", 0)
    require_column(source, "prompt", "key")
    require_column(source, "extra.level", "key")
    with pytest.raises(DataError, match=r"key = 'question': .* it has prompt, answer, extra"):
        require_column(source, "question", "key")


def test_one_row_group_of_long_rows_is_read_by_pieces(tmp_path: Path) -> None:
    """600 rows of 400 kB in pages of 20 rows: 240 MB. A page is what cannot be read by pieces."""
    path = tmp_path / "a.parquet"
    texts = [random.Random(n).randbytes(200_000).hex() for n in range(20)]
    pages = [pa.array([f"{page}{text}" for text in texts]) for page in range(30)]
    table = pa.table({"prompt": pa.chunked_array(pages)})
    pq.write_table(table, path, row_group_size=600, use_dictionary=False)
    code = (
        "from pathlib import Path; from controller.data.reading.tables import read_table\n"
        f"assert sum(len(row['prompt']) > 400_000 for row in read_table(Path({str(path)!r}), 'x')) == 600"
    )
    assert peak_bytes(code) - peak_bytes("import pyarrow.parquet, controller.data.reading.tables") < 80e6
