"""CSV, TSV and compressed files: every text comes out as it went in, and every bad row has a name."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from controller.data.errors import DataError
from controller.data.reading.sources import column, open_source
from controller.data.reading.tables import Unreadable
from schema.config import DatasetConfig
from schema.config.columns import columns_of
from schema.config.text_files import csv_rows
from tests.support.memory import peak_bytes

PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}
LINES = b"".join(b'{"prompt": "p%d", "extra": {"answer": %d}}\n' % (n, n) for n in range(3000))


def rows_of(path: Path) -> list[dict[str, object]]:
    return list(open_source(DatasetConfig(name=str(path)), "train", 1).rows())


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


CHARACTERS = st.characters(exclude_categories=["Cs"]) | st.sampled_from('",\t\r\n')
TEXTS = st.text(CHARACTERS, max_size=8) | st.sampled_from(["007", "\ufeff", "null"])


@given(st.integers(1, 3).flatmap(lambda n: st.lists(st.lists(TEXTS, min_size=n, max_size=n), max_size=5)))
def test_what_csv_writes_is_what_is_read(rows: list[list[str]]) -> None:
    for delimiter in ",\t":
        text = io.StringIO()
        csv.writer(text, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerows(rows)
        read = list(csv_rows(io.BytesIO(b"\xef\xbb\xbf" + text.getvalue().encode()), delimiter))
        assert [cells for _, cells, _ in read] == rows
        assert not any(fault for _, _, fault in read)


def test_cells_are_texts_and_columns_reach_into_json(tmp_path: Path) -> None:
    text = '\ufeffprompt,reward.x,extra\r\n"a ""b""\nc",007,"{""answer"": 3}"\r\n\r\nx,,null\r\n'
    for name, content in (("a.csv", text), ("A.TSV", text.replace(",", "\t").replace(":\t", ": "))):
        path = written(tmp_path / name, content)
        first, second = rows_of(path)
        assert first == {"prompt": 'a "b"\nc', "reward.x": "007", "extra": '{"answer": 3}'}
        assert second == {"prompt": "x", "reward.x": "", "extra": "null"}
        assert (column(first, "extra.answer"), column(first, "reward.x")) == (3, "007")
        columns = columns_of(path)
        assert columns is not None
        assert columns.has("extra.answer")
        assert not columns.has("prompt.x")


def test_a_bad_row_of_csv_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    content = b'p,a\n1,2\n"x\ny",3\nonly\n1,2,3\n"q"z,1\n\xff,1\na\rb,1\n5,6\n"open,1\n7,8\n'
    path = written(tmp_path / "a.csv", content)
    rows = rows_of(path)
    assert [row for row in rows if not isinstance(row, Unreadable)] == [
        {"p": "1", "a": "2"}, {"p": "x\ny", "a": "3"}, {"p": "5", "a": "6"},
    ]  # fmt: skip
    faults = [row.fault.removeprefix(str(path)) for row in rows if isinstance(row, Unreadable)]
    expected = [
        "5: 1 cells",
        "6: 3 cells",
        "7: ',' expected",
        "8: not valid UTF-8",
        "9: a carriage",
        "11: a cell begins",
    ]
    assert [fault.startswith(f", line {start}") for fault, start in zip(faults, expected, strict=True)] == [True] * 6


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("p,a,p\n", "names 'p' twice"),
        (",p\n1,2\n", r"column 1 has no name in the header, line 1; .*index=False"),
        ("p,a".encode("utf-16"), "looks like UTF-16; write UTF-8"),
        ('"p', "never closed"),
    ],
)
def test_a_header_that_cannot_be_used(tmp_path: Path, text: str | bytes, fault: str) -> None:
    with pytest.raises(DataError, match=fault):
        rows_of(written(tmp_path / "a.csv", text))


def test_a_long_cell_is_read(tmp_path: Path) -> None:
    cell = "word " * 400_000
    assert rows_of(written(tmp_path / "a.csv", f'p\n"{cell}"\n'))[0] == {"p": cell}


@pytest.mark.parametrize("ending", PACK)
def test_a_compressed_file_is_the_same_rows(tmp_path: Path, ending: str) -> None:
    pack = PACK[ending]
    several = written(tmp_path / f"a.jsonl{ending}", pack(LINES[:5000]) + pack(LINES[5000:]))
    assert rows_of(several) == [json.loads(line) for line in LINES.splitlines()]
    columns = columns_of(several)
    assert columns is not None
    assert columns.has("extra.answer")
    array = json.dumps([{"p": 1}, {"p": 2}]).encode()
    for name, content in (("b.json", array), ("c.csv", b"p\n1\n2\n"), ("d.ndjson", b'\n{"p": 1}\n{"p": 2}')):
        assert [int(str(row["p"])) for row in rows_of(written(tmp_path / f"{name}{ending}", pack(content)))] == [1, 2]


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_damaged_stream_says_so(tmp_path: Path, ending: str, damage: str) -> None:
    content = PACK[ending](LINES)[:-20] if damage == "cut" else LINES
    path = written(tmp_path / f"a.jsonl{ending}", content)
    with pytest.raises(DataError, match=f"a.jsonl{ending} is damaged, or is not a whole {ending} file: .*; fetch or"):
        rows_of(path)


def test_a_compressed_file_is_never_in_memory_whole(tmp_path: Path) -> None:
    line = json.dumps({"prompt": "x" * 1000}).encode() + b"\n"
    for ending, pack in PACK.items():
        written(tmp_path / f"a.jsonl{ending}", pack(line * 60_000))
    code = (
        "from pathlib import Path; from controller.data.reading.texts import read_text\n"
        f"for path in sorted(Path({str(tmp_path)!r}).iterdir()):\n"
        "    assert sum(1 for _ in read_text(path, 'x')) == 60_000"
    )
    assert peak_bytes(code) < 160e6  # 60 MB of text each, and pyarrow's libraries


def test_splits_and_formats_of_a_directory(tmp_path: Path) -> None:
    for name in ("train.csv", "train.jsonl.gz", "test.csv.zst", "train.jsonl.bz2"):
        ending = name[name.rindex(".") :]
        content = b'{"p": "%s"}\n' % name.encode() if "json" in name else f"p\n{name}\n".encode()
        written(tmp_path / name, PACK[ending](content) if ending in PACK else content)
    source = open_source(DatasetConfig(name=str(tmp_path)), "train", 1)
    assert list(source.rows()) == [{"p": "train.jsonl.bz2"}]
    assert [row["p"] for row in open_source(DatasetConfig(name=str(tmp_path)), "validation", 1).rows()] == [
        "test.csv.zst"
    ]
