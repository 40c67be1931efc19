"""Data in several parts, of domains, and with keys that name columns of a row's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controller.data import first_rows
from controller.data.errors import DataError
from controller.data.prepare import prepare
from schema.config import Config
from schema.wire import data_report
from schema.wire.prompts import PromptFile
from tests.controller.data.conftest import write

MakeConfig = Callable[..., Config]


@pytest.fixture
def make_config(model_dir: Path) -> MakeConfig:
    def make(dataset: dict[str, Any], policy: dict[str, Any] | None = None, **sections: Any) -> Config:
        return Config.model_validate(
            {
                "policy": {"model_name_or_path": str(model_dir), "model_max_length": 128},
                "rollout": {"max_response_length": 40},
                "train": {"train_policy": {"type": "grpo", **(policy or {}), "dataset": dataset}},
                **sections,
            }
        )

    return make


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    return str(write(path, rows))


def kinds(n: int) -> list[dict[str, Any]]:
    return [{"prompt": f"q{i}", "kind": ["x", "y", "z"][i % 3], "meta": {"level": i % 2}} for i in range(n)]


def trained(tmp_path: Path) -> PromptFile:
    return PromptFile(tmp_path / "data" / "train.safetensors")


def test_each_part_has_its_keys_its_rows_and_its_source(tmp_path: Path, make_config: MakeConfig) -> None:
    a = jsonl(tmp_path / "a.jsonl", [{"prompt": f"a{i}", "data_source": "gsm8k"} for i in range(10)])
    b = jsonl(tmp_path / "b.jsonl", [{"prompt": "b" * (i + 1)} for i in range(10)])
    first = {"source": "one", "files": [a], "share": 0.25, "test_size": 2, "max_samples": 5}
    second = {"source": "two", "files": [b], "share": 0.75, "max_prompt_length": 40}
    config = make_config(dataset={"part": [first, second]}, validation={"enable": True})
    assert prepare(config, tmp_path) == {"train/one": 5, "train/two": 10, "validation/one": 2}
    file = trained(tmp_path)
    assert {name: len(rows) for name, rows in file.rows_by_source().items()} == {"one": 5, "two": 10}
    rows = [file.row(i) for i in range(15)]
    assert {row["data_source"] for row in rows[:5]} == {"gsm8k"}, "the row's own comes first"
    assert {row["data_source"] for row in rows[5:]} == {"two"}
    assert [row["key"] for row in rows[5:7]] == ["train/two/0", "train/two/1"]
    held = PromptFile(tmp_path / "data" / "validation.safetensors")
    assert not {held.row(i)["prompt"] for i in range(2)} & {row["prompt"] for row in rows}
    again = tmp_path / "again"
    prepare(config, again)
    assert [trained(again).row(i) for i in range(15)] == rows, "the draw is of the seed"


def test_domains_without_a_share_are_left_out_and_counted(tmp_path: Path, make_config: MakeConfig) -> None:
    policy = {"domain_column_name": "kind", "domain_shares": {"x": 0.5, "y": 0.5}}
    name = jsonl(tmp_path / "a.jsonl", kinds(9))
    prepare(make_config(dataset={"name": name}, policy=policy), tmp_path)
    assert {n: len(rows) for n, rows in trained(tmp_path).rows_by_source().items()} == {"x": 3, "y": 3}
    report = data_report.read(tmp_path)
    assert report is not None
    assert report.files["train"].left_out["a domain that has no share"].count == 3
    of_struct = {"domain_column_name": "meta.level", "domain_shares": {"0": 0.5, "1": 0.5}}
    prepare(make_config(dataset={"name": name}, policy=of_struct), tmp_path)
    assert {n: len(rows) for n, rows in trained(tmp_path).rows_by_source().items()} == {"0": 5, "1": 4}


def test_a_share_of_a_domain_without_rows_is_refused(tmp_path: Path, make_config: MakeConfig) -> None:
    policy = {"domain_column_name": "kind", "domain_shares": {"x": 0.5, "w": 0.5}}
    config = make_config(dataset={"name": jsonl(tmp_path / "a.jsonl", kinds(3))}, policy=policy)
    with pytest.raises(DataError, match=r"domain_shares\.w: no row of this domain is left; .* rows of x, in the"):
        prepare(config, tmp_path)


def test_a_row_without_its_domain_is_a_bad_row(tmp_path: Path, make_config: MakeConfig) -> None:
    policy = {"domain_column_name": "kind", "domain_shares": {"x": 1.0}}
    rows = [*kinds(2), {"prompt": "?", "kind": None}]
    config = make_config(dataset={"name": jsonl(tmp_path / "a.jsonl", rows)}, policy=policy)
    with pytest.raises(DataError, match="row 3: `kind` is empty"):
        prepare(config, tmp_path)


def test_the_middle_of_a_long_prompt_is_cut(tmp_path: Path, make_config: MakeConfig) -> None:
    name = jsonl(tmp_path / "a.jsonl", [{"prompt": "".join(map(chr, range(48, 108)))}])
    prepare(make_config(dataset={"name": name}), tmp_path)
    whole = trained(tmp_path).token_ids(0).tolist()
    cut = {"name": name, "overlong_prompts": "middle", "max_prompt_length": 31}
    prepare(make_config(dataset=cut), tmp_path)
    assert trained(tmp_path).token_ids(0).tolist() == [*whole[:15], *whole[-16:]]


def test_a_rows_own_system_prompt_and_tools_reach_the_template(tmp_path: Path, make_config: MakeConfig) -> None:
    rows = [{"prompt": "q", "sys": "Own."}, {"prompt": "q", "sys": ""}, {"prompt": "q", "sys": None}]
    policy = {"system_prompt_column_name": "sys", "system_prompt": "Shared."}
    prepare(make_config(dataset={"name": jsonl(tmp_path / "a.jsonl", rows)}, policy=policy), tmp_path)
    alike = [trained(tmp_path).token_ids(i).tolist() for i in range(3)]
    assert alike[0] != alike[1] == alike[2]
    for row, system in zip(alike, ("Own.", "Shared.", "Shared."), strict=True):
        name = jsonl(tmp_path / "b.jsonl", [{"prompt": "q"}])
        prepare(make_config(dataset={"name": name}, policy={"system_prompt": system}), tmp_path)
        assert trained(tmp_path).token_ids(0).tolist() == row
    misspelt = {"system_prompt_column_name": "syss"}
    with pytest.raises(DataError, match=r"system_prompt_column_name = 'syss': .* has no such column"):
        prepare(make_config(dataset={"name": name}, policy=misspelt), tmp_path)
    rows[0]["sys"] = 7
    with pytest.raises(DataError, match="row 1: `sys` must be a text, not int"):
        prepare(make_config(dataset={"name": jsonl(tmp_path / "a.jsonl", rows)}, policy=policy), tmp_path)


def test_first_rows_are_dealt_among_parts_and_made_up_for(tmp_path: Path, make_config: MakeConfig) -> None:
    parts = [
        {"source": name, "files": [jsonl(tmp_path / f"{name}.jsonl", [{"prompt": f"{name}{i}"} for i in range(n)])]}
        for name, n in (("short", 2), ("long", 100))
    ]
    (tmp_path / "data").mkdir()
    first_rows.prepare(make_config(dataset={"part": parts}), tmp_path, 9)
    rows = [json.loads(line) for line in (tmp_path / "data" / "rows.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["short0", "short1", *(f"long{i}" for i in range(7))]
