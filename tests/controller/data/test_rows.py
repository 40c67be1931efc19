"""The same rows in every format: what the model and the rewards get of nulls, tools, types and names of columns."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets.features.features import Array2DExtensionType
from transformers import PreTrainedTokenizerFast

from controller.data.errors import DataError
from controller.data.prepare import prepare
from controller.data.reading.tables import read_table
from controller.data.values import jsonable
from schema.config import Config
from schema.config.columns import columns_of
from schema.wire import data_report
from schema.wire.prompts import PromptFile
from tests.controller.data.conftest import save_tokenizer, write
from tests.controller.data.test_prepare import config

TOOLS_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] }}"
    "{% if m['tool_calls'] %}{{ m['tool_calls'] | tojson }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tools_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose chat template renders tools and tool calls as JSON."""
    return save_tokenizer(tmp_path_factory.mktemp("tools"), TOOLS_TEMPLATE)


def prepared(
    model_dir: Path, path: Path, policy: dict[str, Any] | None = None
) -> tuple[PromptFile, data_report.FileReport]:
    settings = config(model_dir, path, policy or {}).to_dict()
    settings["policy"]["model_max_length"] = 4000
    prepare(Config.model_validate(settings), path.parent)
    report = data_report.read(path.parent)
    assert report is not None
    return PromptFile(path.parent / "data" / "train.safetensors"), report.files["train"]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def call(**arguments: Any) -> list[dict[str, Any]]:
    return [{"function": {"name": "f", "arguments": arguments}}]


USER = {"role": "user", "content": "?"}
TALKS: list[dict[str, Any]] = [
    {
        "prompt": [USER, {"role": "assistant", "tool_calls": call(city="Rom")}, {"role": "tool", "content": "3"}],
        "tools": [tool("f", city={"type": "string"})],
    },
    {
        "prompt": [USER, {"role": "assistant", "tool_calls": call(n=2, units=["C"])}, {"role": "tool", "id": "4"}],
        "tools": [tool("g", n={"type": "integer", "minimum": 1}, deep={"items": [{"a": 1}]}), tool("h", x={"b": 2})],
    },
    {"prompt": [USER], "tools": []},
]


def with_nulls(value: Any) -> Any:
    """As Parquet would give it: a field more in each struct."""
    if isinstance(value, dict):
        return {**{name: with_nulls(inner) for name, inner in value.items()}, "nothing": None}
    return [with_nulls(item) for item in value] if isinstance(value, list) else value


def save(path: Path, rows: list[dict[str, Any]]) -> Path:
    """As `datasets` saves them, the prompts as structs or, where the name says so, as JSON texts."""
    import datasets

    kind = pa.list_(pa.json_(pa.string()))
    prompts = [[json.dumps(turn) for turn in row["prompt"]] for row in rows]
    texts = pa.array(prompts, pa.list_(pa.string())).cast(kind)
    table = pa.Table.from_pylist(rows)
    if "json" in path.name:
        table = table.set_column(0, "prompt", texts)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        datasets.DatasetDict(train=datasets.Dataset(table)).save_to_disk(path)
    return path


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("rows.parquet", lambda row: row),
        ("rows.json", lambda row: row),
        ("rows.jsonl", with_nulls),
        ("rows.jsonl", lambda row: {**row, "tools": json.dumps(row["tools"])}),
        ("rows.jsonl", lambda row: {**row, "tools": [json.dumps(tool) for tool in row["tools"]]}),
        ("rows.jsonl", lambda row: {**row, "prompt": json.dumps(row["prompt"])}),
        ("saved", lambda row: row),
        ("saved_json", lambda row: row),
        ("saved_json.parquet", lambda row: row),
    ],
)
def test_prompts_are_those_of_the_template(tools_dir: Path, tmp_path: Path, name: str, change: Any) -> None:
    rows = [change(row) for row in TALKS]
    path = save(tmp_path / name, rows) if "saved" in name else write(tmp_path / name, rows)
    file, report = prepared(tools_dir, path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tools_dir)
    for i, row in enumerate(TALKS):
        turns = [{"content": "", **turn} for turn in row["prompt"]]
        ids = tokenizer.apply_chat_template(turns, tools=row["tools"] or None, add_generation_prompt=True)
        assert file.token_ids(i).tolist() == ids["input_ids"]
    counted = {how: rows.count for how, rows in report.noted.items() if "which the chat template gets" in how}
    assert list(counted.values()) == [2, 1]


def test_tools_of_conversations_and_of_templates_without_them(
    tools_dir: Path, model_dir: Path, tmp_path: Path
) -> None:
    answer = {"role": "assistant", "content": "3"}
    first = TALKS[0]["tools"]
    alike = [dict(reversed(first[0].items()))]  # equal in Python, and another text
    rows = [
        {"conversations": [USER, answer], "tools": tools}
        for tools in (first, alike, *(r["tools"] for r in TALKS[1:]))
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    file, _ = prepared(tools_dir, path, {"type": "sft"})
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tools_dir)
    for i, row in enumerate(rows):
        text = tokenizer.decode(file.token_ids(i))
        rendered = tokenizer.apply_chat_template(row["conversations"], tools=row["tools"] or None, tokenize=False)
        assert rendered.startswith(text)
        assert text.startswith("<|im_start|>system\n[") == bool(row["tools"])
        assert tokenizer.decode(file.token_ids(i)[file.loss_mask(i) == 1]) == "3<|im_end|>"
    _, report = prepared(model_dir, path, {"type": "sft"})
    assert [rows.count for how, rows in report.noted.items() if "does not show" in how] == [3]


BESIDE: list[tuple[dict[str, Any], str]] = [
    ({"system": "Be brief."}, "have a column `system`, which is not put into the prompt; put it before the prompt's"),
    ({"history": [["Two?", "Yes."]]}, "`history`, which is not put into the prompt; write it into the prompt's"),
    ({"functions": "[{}]"}, "`functions`, which is not put into the prompt; call the column `tools`"),
    ({"documents": [{"text": "a", "title": None}]}, "`documents`, which is not put into the prompt; write"),
    (
        {"chat_template_kwargs": {"enable_thinking": False}},
        "`chat_template_kwargs`, which is not put into the prompt",
    ),
    ({"system": " ", "history": [], "documents": None, "chat_template_kwargs": {"enable_thinking": None}}, ""),
]


@pytest.mark.parametrize(("columns", "note"), BESIDE)
def test_columns_that_do_not_reach_the_prompt_are_noted(
    model_dir: Path, tmp_path: Path, columns: dict[str, Any], note: str
) -> None:
    talk = [USER, {"role": "assistant", "content": "2"}]
    path = write(tmp_path / "rows.jsonl", [{"prompt": "?", "conversations": talk, **columns}])
    for policy in ({}, {"type": "sft"}):
        _, report = prepared(model_dir, path, policy)
        notes = list(report.noted)
        assert (len(notes), note in "".join(notes)) == (bool(note), True)
    pair = {"type": "sft", "prompt_column_name": "q", "response_column_name": "a"}
    path = write(
        tmp_path / "rows.jsonl", [{"q": "Add.", "a": "2", "input": "1 1"}, {"q": "?", "a": "2", "input": ""}]
    )
    for named, count in ({}, [1]), ({"query_column_name": "input"}, []):
        _, report = prepared(model_dir, path, pair | named)
        assert [rows.count for how, rows in report.noted.items() if "column `input`" in how] == count
    _, report = prepared(model_dir, write(path, [{"system": "?"}]), {"prompt_column_name": "system"})
    assert not report.noted, "the prompt itself"


@pytest.mark.parametrize("tools", ["calculator", 3, [3], ["x"], {"a": 1}])
def test_tools_that_are_none_are_named(tools_dir: Path, tmp_path: Path, tools: Any) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": "?", "tools": tools}])
    with pytest.raises(DataError, match=r"row 1|line 1.*`tools`.*rename it"):
        prepared(tools_dir, path)


NAMES = {"prompt": 1, "answer": 2, "key": 3, "question": "?", "solution": "4", "full_prompt": 5, "level": None}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.json"])
@pytest.mark.parametrize(
    ("row", "policy", "expected"),
    [
        (NAMES, {"prompt_column_name": "question", "response_column_name": "solution"},
         {"prompt": "?", "answer": "4", "question": "?", "solution": "4", "full_prompt": 5, "level": None,
          "columns": {"prompt": 1, "answer": 2, "key": 3}}),
        ({"prompt": "?", "answer": "4"}, {"response_column_name": "answer"}, {"prompt": "?", "answer": "4"}),
        ({"prompt": "?", "answer": "4"}, {}, {"prompt": "?", "columns": {"answer": "4"}}),
        ({"prompt": "?", "columns": 1}, {}, {"prompt": "?", "columns": 1}),
        ({"prompt": "?", "columns": 1, "key": 2}, {}, {"prompt": "?", "columns": {"key": 2, "columns": 1}}),
        ({"prompt": "?", "m": {"a": "4", "b": None}}, {"response_column_name": "m.a"},
         {"prompt": "?", "answer": "4", "m": {"a": "4", "b": None}}),
        ({"prompt": "?", "data_source": "a", "s": "b"}, {"data_source_column_name": "s"},
         {"prompt": "?", "data_source": "b", "s": "b", "columns": {"data_source": "a"}}),
    ],
)  # fmt: skip
def test_rewards_get_every_column(
    model_dir: Path, tmp_path: Path, name: str, row: dict, policy: dict, expected: dict
) -> None:
    file, report = prepared(model_dir, write(tmp_path / name, [row]), policy)
    assert file.row(0) == {"key": "train/0", **expected}
    moved = expected.get("columns", {}) if isinstance(expected.get("columns"), dict) else {}
    assert len([text for text in report.remarks if 'row["columns"]' in text]) == len(moved)


def test_rows_that_lack_a_column_have_null_there(model_dir: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "?"}, {"prompt": "?", "level": 3}]
    for name in ("rows.jsonl", "rows.parquet", "rows.json"):
        file, _ = prepared(model_dir, write(tmp_path / name, rows[::-1]))
        assert [file.row(i)["level"] for i in range(2)] == [3, None]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Decimal("12.50"), "12.50"),
        (Decimal("1E+3"), "1000"),
        (dt.date(2020, 1, 2), "2020-01-02"),
        (dt.datetime(2020, 1, 2, 3, 4, 5, 6, dt.UTC), "2020-01-02T03:04:05.000006+00:00"),
        (dt.time(3, 4), "03:04:00"),
        (dt.timedelta(days=1, milliseconds=5), 86400.005),
        (b"\x00\xff", "AP8="),
        (float("nan"), "NaN"),
        (float("-inf"), "-Infinity"),
        (2**70, 2**70),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (np.float32(1.5), 1.5),
        (np.datetime64("2020-01-02T03"), "2020-01-02T03"),
        (np.array([[1, 2]]), [[1, 2]]),
        ({3: (True, None)}, {"3": [True, None]}),
    ],
)
def test_what_json_lacks_becomes(value: Any, expected: Any) -> None:
    assert jsonable(value) == expected
    assert jsonable([{"a": value}]) == [{"a": expected}]


def maps(*items: Any, key: pa.DataType | None = None) -> pa.Array:
    return pa.array(items, pa.map_(key or pa.string(), pa.int64()))


def json_texts(*texts: str) -> pa.Array:
    return pa.array(texts).cast(pa.json_(pa.string()))


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.ListArray.from_arrays([0, 1, 1], maps([("k", 1)])), [[{"k": 1}], []]),
        (pa.ListViewArray.from_arrays([0, 1], [1, 0], maps([("k", 1)])), [[{"k": 1}], []]),
        (pa.FixedSizeListArray.from_arrays(maps([("k", 1)], None), 1), [[{"k": 1}], [None]]),
        (pa.RunEndEncodedArray.from_arrays([2], maps([("k", 1)])), [{"k": 1}, {"k": 1}]),
        (pa.StructArray.from_arrays([json_texts('{"a": null}', "3")], ["j"]), [{"j": {"a": None}}, {"j": 3}]),
        (pa.DictionaryArray.from_arrays([1, 0], pa.array(["x", None])), [None, "x"]),
        (maps([(True, 1)], [(False, None)], key=pa.bool_()), [{"true": 1}, {"false": None}]),
        (maps([(b"\xff", 1)], [], key=pa.binary()), [{"/w==": 1}, {}]),
        (maps([(dt.date(2020, 1, 2), 1)], None, key=pa.date32()), [{"2020-01-02": 1}, None]),
        (pa.array([2**64 - 1, None], pa.uint64()), [2**64 - 1, None]),
        (Array2DExtensionType((1, 2), "int32").wrap_array(pa.array([[[1, 2]], None], pa.list_(pa.list_(pa.int32())))),
         [[[1, 2]], None]),
    ],
)  # fmt: skip
def test_types_of_arrow_become(tmp_path: Path, column: pa.Array, expected: list[Any]) -> None:
    table = pa.table({"prompt": ["a", "b"], "c": column})
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    assert [jsonable(row["c"]) for row in read_table(tmp_path / "x.arrow", "x")] == expected
    columns = columns_of(tmp_path / "x.arrow")
    assert columns is not None
    assert list(columns.fields) == ["prompt", "c"]


@pytest.mark.parametrize("value", [{1}, object(), 1j])
def test_what_has_no_form_is_named(value: Any) -> None:
    with pytest.raises(DataError, match=f"type {type(value).__name__} has no form in JSON"):
        jsonable({"a": [value]})


def test_rows_that_are_nested_too_deeply_are_bad_rows(model_dir: Path, tmp_path: Path) -> None:
    deep = ("[" * n + "]" * n for n in (100, 900))
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "?", "x": {value}}}\n' for value in deep))
    with pytest.raises(DataError, match=r"rows\.jsonl, row 2, column `x`: .* nested too deeply"):
        prepared(model_dir, tmp_path / "rows.jsonl")


def test_types_of_parquet_are_said(model_dir: Path, tmp_path: Path) -> None:
    row = {
        "prompt": "?",
        "price": Decimal("1.5"),
        "when": dt.date(2020, 1, 2),
        "of": {"raw": b"a"},
        "nan": float("nan"),
    }
    path = tmp_path / "rows.parquet"
    table = pa.Table.from_pylist([row]).append_column("map", pa.array([{"k": 1}], pa.map_(pa.string(), pa.int64())))
    pq.write_table(table, path)
    file, report = prepared(model_dir, path)
    columns = {"price": "1.5", "when": "2020-01-02", "of": {"raw": "YQ=="}, "nan": "NaN", "map": {"k": 1}}
    assert file.row(0) == {"key": "train/0", "prompt": "?", **columns}
    assert {text.split("`")[1] for text in report.remarks} == {"price", "when", "of", "nan"}


@pytest.mark.parametrize("answer", [b"4", float("nan"), None])
def test_references_that_say_nothing_are_named(model_dir: Path, tmp_path: Path, answer: Any) -> None:
    rows = [{"prompt": "?", "answer": answer}] * 2
    with pytest.raises(DataError, match=r"2 rows cannot be used.*`answer` (is empty|holds bytes)"):
        prepared(model_dir, write(tmp_path / "rows.parquet", rows), {"response_column_name": "answer"})


def test_rows_of_parquet_that_cannot_be_read_are_bad_rows(model_dir: Path, tmp_path: Path) -> None:
    texts = pa.array([b"a", b"\xff", b"c"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"prompt": texts}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet, row 2 cannot be read: .*utf-8"):
        prepared(model_dir, tmp_path / "rows.parquet")
    pq.write_table(pa.Table.from_arrays([pa.array(["a"])] * 2, ["prompt", "prompt"]), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="more than one column prompt"):
        prepared(model_dir, tmp_path / "rows.parquet")


def test_the_report_says_what_is_read_and_what_overlaps(model_dir: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}?"} for i in range(4)]
    for name, part in (("questions.jsonl", rows), ("test.jsonl", rows[3:]), ("more.txt", [])):
        write(tmp_path / name, part)
    named = {"enable": True, "dataset": {"name": str(tmp_path / "test.jsonl")}}
    cfg = config(model_dir, tmp_path, {}, validation=named)
    assert prepare(cfg, tmp_path / "run") == {"train": 4, "validation": 1}
    report = data_report.read(tmp_path / "run")
    assert report is not None
    said = "\n".join(data_report.lines(report))
    assert f"train: read: {tmp_path / 'questions.jsonl'}\n" in said
    assert f"train: not read, of the split test: {tmp_path / 'test.jsonl'}\n" in said
    assert f"can be read: {tmp_path / 'more.txt'}" in said
    assert "validation: 1 prompts that are trained on too" in said
