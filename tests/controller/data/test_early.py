"""Rows that are prepared before the others: which they are, and how a job begins with them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controller.data import parts as of_parts
from controller.data import prepare as preparation
from controller.data.errors import DataError
from controller.data.prepare import prepare
from schema.config import Config
from schema.wire import data_report
from schema.wire.data_report import has_all_rows
from schema.wire.prompts import PromptFile, PromptFileError, write_prompts
from tests.controller.data.conftest import write

ROWS = [{"prompt": f"{i}?", "id": i} for i in range(40)]
EARLY = 6
PARTS = [{"source": name, "name": "rows.jsonl", "share": 0.5} for name in "ab"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rows are much."""
    monkeypatch.setattr(of_parts, "EARLY", EARLY)
    monkeypatch.setattr(of_parts, "LONG", 20)


def config(model: Path, data: Path, train: dict[str, Any] | None = None, **policy: Any) -> Config:
    return Config.model_validate(
        {
            "policy": {"model_name_or_path": str(model), "model_max_length": 60},
            "rollout": {"max_response_length": 20, "n_generation": 2},
            "train": {
                "max_num_steps": 4,
                "train_batch_per_replica": 8,
                **(train or {}),
                "train_policy": {"type": "grpo", "dataset": {"name": str(data)}, **policy},
            },
        }
    )


def read(run_dir: Path) -> tuple[PromptFile, list[int]]:
    """A prepared file, and the numbers of its rows."""
    file = PromptFile(run_dir / "data" / "train.safetensors")
    return file, [file.row(i)["id"] for i in range(len(file))]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write(tmp_path / "rows.jsonl", ROWS)


@pytest.fixture
def at_the_end(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Do something when all rows have been read, and none of the rest is written."""

    def register(work: Callable[[], object]) -> None:
        finish = preparation._Files.finish

        def finish_after(files: preparation._Files) -> None:
            work()
            finish(files)

        monkeypatch.setattr(preparation._Files, "finish", finish_after)

    return register


def test_a_job_can_begin_with_the_first_rows_of_the_file_to_come(
    model_dir: Path, rows: Path, tmp_path: Path, at_the_end: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run, seen = tmp_path / "run", []

    def look() -> None:
        report = data_report.read(run)
        assert report is not None
        seen.append((*read(run), report.unfinished, report.files["train"].kept, data_report.brief(report)))

    at_the_end(look)
    with caplog.at_level(logging.INFO):
        prepare(config(model_dir, rows), run, early=True)
    ((begun, first, *report),) = seen
    file, order = read(run)
    assert (begun.unfinished, begun.early, len(begun), report[:2]) == (True, EARLY, EARLY, [True, EARLY])
    assert report[2].endswith("the job began with these rows for training, and no others were prepared by its end")
    assert "6 rows are prepared, and the job begins with them while the others are" in caplog.text
    assert (file.unfinished, file.early, file.early_read) == (False, EARLY, {"train": EARLY})
    assert order[:EARLY] == first == sorted(first), "read in the order of the data"
    assert first != list(range(EARLY)), "drawn from all"
    assert order[EARLY:] == [i for i in range(40) if i not in first]
    whole = data_report.read(run)
    assert whole is not None
    assert (whole.unfinished, whole.files["train"].kept) == (False, 40)


def test_rows_are_the_same_whether_or_not_a_job_begins_early(model_dir: Path, rows: Path, tmp_path: Path) -> None:
    texts = []
    for name, early, changes in (
        ("early", True, {}),
        ("late", False, {}),
        ("endless", True, {"max_num_steps": None}),
        ("workers", True, {"train_policy": {"dataloader_num_workers": 2}}),
    ):
        policy = changes.pop("train_policy", {})
        prepare(config(model_dir, rows, changes, **policy), tmp_path / name, early=early)
        texts.append((tmp_path / name / "data" / "train.safetensors").read_bytes())
    assert len(set(texts)) == 1
    prepare(config(model_dir, rows, {"seed": 5}), tmp_path / "seed", early=True)
    assert read(tmp_path / "seed")[1][:EARLY] != read(tmp_path / "early")[1][:EARLY]
    prepare(config(model_dir, rows, dataloader_shuffle=False), tmp_path / "plain", early=True)
    assert read(tmp_path / "plain")[1] == list(range(40))


@pytest.mark.parametrize(
    ("train", "policy"),
    [
        ({"max_num_steps": None}, {}),
        ({"max_num_steps": 6}, {}),  # 24 rows of 40: some may be left out
        ({"max_num_steps": 11, "epoch": 2}, {}),
        ({"max_num_steps": 1}, {"dataset": {"part": PARTS}, "domain_exhausted": "stop"}),
    ],
    ids=str,
)
def test_a_job_whose_steps_may_depend_on_all_rows_waits_for_them(
    model_dir: Path,
    rows: Path,
    tmp_path: Path,
    at_the_end: Any,
    monkeypatch: pytest.MonkeyPatch,
    train: dict[str, Any],
    policy: dict[str, Any],
) -> None:
    at_the_end(lambda: read_none(tmp_path))
    monkeypatch.chdir(tmp_path)
    prepare(config(model_dir, rows, train, **policy), tmp_path, early=True)
    assert read(tmp_path)[0].early >= EARLY


@pytest.mark.parametrize("shuffle", [False, True])
def test_parts_without_shares_are_trained_one_after_the_other(
    model_dir: Path, rows: Path, tmp_path: Path, shuffle: bool
) -> None:
    few = write(tmp_path / "few.jsonl", [{"prompt": "a?", "id": 100 + i} for i in range(3)])
    parts = [{"source": str(i), "name": str(path)} for i, path in enumerate((few, rows, few, rows))]
    prepare(
        config(model_dir, rows, dataloader_shuffle=shuffle, dataset={"part": parts}), tmp_path / "run", early=True
    )
    file, order = read(tmp_path / "run")
    one_by_one = [*range(100, 103), *range(40)] * 2
    assert (order == one_by_one) != shuffle
    assert (file.early, sorted(order)) == (EARLY, sorted(one_by_one))


def test_early_rows_of_parts_without_shares_are_drawn_from_all_of_them(
    model_dir: Path, rows: Path, tmp_path: Path
) -> None:
    few = write(tmp_path / "few.jsonl", [{"prompt": "a?", "id": 100 + i} for i in range(4)])
    parts = [{"source": str(i), "name": str(path)} for i, path in enumerate((few, rows, rows))]
    counts = []
    for seed in range(8):
        job = config(model_dir, rows, {"seed": seed}, dataset={"part": parts})
        prepare(job, tmp_path / str(seed), early=True)
        file, order = read(tmp_path / str(seed))
        counts.append(sum(number >= 100 for number in order[: file.early]))
        prepare(job, tmp_path / str(seed))
        assert read(tmp_path / str(seed))[1] == order, "drawn again where it is prepared again"
    assert sum(counts) < 8, "4 rows of 84 have their share of the early ones"


def read_none(run: Path) -> None:
    assert not (run / "data" / "train.safetensors").exists()


def test_short_data_and_data_in_the_order_of_a_column_have_no_early_rows(
    model_dir: Path, rows: Path, tmp_path: Path, at_the_end: Any
) -> None:
    short, by_column = tmp_path / "short", tmp_path / "column"
    data = write(tmp_path / "short.jsonl", ROWS[:19])
    prepare(config(model_dir, data, {"max_num_steps": 1}), short, early=True)
    assert (read(short)[1], read(short)[0].early) == (list(range(19)), 0)
    at_the_end(lambda: read_none(by_column))
    prepare(config(model_dir, rows, curriculum={"column_name": "id"}), by_column, early=True)
    assert (read(by_column)[1], read(by_column)[0].early) == (list(range(40)), 0)


def test_a_column_orders_all_rows_of_a_job_that_goes_on_from_one_with_early_rows(
    model_dir: Path, rows: Path, tmp_path: Path
) -> None:
    prepare(config(model_dir, rows), tmp_path / "before")
    job = config(model_dir, rows, {"resume": str(tmp_path / "before")}, curriculum={"column_name": "id"})
    prepare(job, tmp_path / "after")
    assert [read(tmp_path / name)[0].early for name in ("before", "after")] == [EARLY, 0]


def test_each_part_has_early_rows_and_a_short_one_all(model_dir: Path, rows: Path, tmp_path: Path) -> None:
    few = write(tmp_path / "few.jsonl", [{"prompt": "a?", "id": 100 + i} for i in range(3)])
    parts = [
        {"source": "many", "name": str(rows), "share": 0.5, "max_samples": 30},
        {"source": "few", "name": str(few), "share": 0.5},
    ]
    run = tmp_path / "run"
    prepare(config(model_dir, rows, dataset={"part": parts}), run, early=True)
    file, order = read(run)
    assert file.early_read == {"train/many": EARLY, "train/few": 3}
    assert (order[EARLY : EARLY + 3], file.early, len(file)) == ([100, 101, 102], EARLY + 3, 33)
    sources = {source.name: source for source in file.sources({"many": 0.5, "few": 0.5})}
    assert [(source.early, source.rows) for source in sources.values()] == [(EARLY, 30), (3, 3)]
    report = data_report.read(run)
    assert report is not None
    assert [len(part.samples) for part in report.files.values()] == [3, 3]
    assert "a?" in report.files["train/few"].samples[2], "its own rows, though those of another lie between"


def test_a_domain_without_an_early_row_is_waited_for(model_dir: Path, tmp_path: Path, at_the_end: Any) -> None:
    data = write(tmp_path / "rows.jsonl", [{**row, "of": "rare" if row["id"] == 39 else "often"} for row in ROWS])
    at_the_end(lambda: read_none(tmp_path))
    shares = {"domain_column_name": "of", "domain_shares": {"often": 0.5, "rare": 0.5}, "dataloader_shuffle": False}
    prepare(config(model_dir, data, **shares), tmp_path, early=True)
    assert read(tmp_path)[0].early == EARLY


@pytest.mark.parametrize("place", [0, 39])
def test_a_bad_row_is_an_error_before_or_after_the_beginning(model_dir: Path, tmp_path: Path, place: int) -> None:
    data = [dict(row) for row in ROWS]
    data[place]["prompt"] = None
    job = config(model_dir, write(tmp_path / "rows.jsonl", data), dataloader_shuffle=False)
    with pytest.raises(DataError, match=rf"row {place + 1}: `prompt` is empty|line {place + 1}"):
        prepare(job, tmp_path, early=True)
    path = tmp_path / "data" / "train.safetensors"
    assert (path.exists(), has_all_rows(path)) == (place == 39, False)
    report = data_report.read(tmp_path)
    assert report is not None
    assert "`prompt` is empty" in report.error


def test_too_few_rows_for_a_job_that_has_begun_are_an_error(model_dir: Path, tmp_path: Path) -> None:
    data = [{**row, "prompt": "x" * (100 if row["id"] >= EARLY else 1)} for row in ROWS]
    job = config(model_dir, write(tmp_path / "rows.jsonl", data), dataloader_shuffle=False)
    words = r"train\.max_num_steps = 4 takes 16 rows, and train\.epoch = 1 times 6 are there"
    with pytest.raises(DataError, match=words):
        prepare(job, tmp_path, early=True)
    prepare(job, tmp_path / "late")
    assert len(read(tmp_path / "late")[0]) == EARLY, "a job that waits goes through what is left"


@pytest.mark.parametrize("unfinished", [False, True])
def test_a_run_keeps_the_early_rows_that_it_had(
    model_dir: Path, rows: Path, tmp_path: Path, unfinished: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = config(model_dir, rows)
    run = tmp_path / "run"
    if unfinished:
        with monkeypatch.context() as context:
            context.setattr(preparation._Files, "finish", killed)
            with pytest.raises(OSError, match="killed"):
                prepare(job, run, early=True)
    else:
        prepare(job, run)
    before = read(run)[1]
    assert len(before) == (EARLY if unfinished else 40)
    monkeypatch.setattr(of_parts, "LONG", 1000)  # so that a new run would have none
    monkeypatch.setattr(preparation._Files, "let_begin", None)
    prepare(job, run, early=unfinished)
    assert read(run)[1][: len(before)] == before
    other = config(model_dir, rows, {"resume": str(run / "checkpoints" / "step-2")})
    prepare(other, tmp_path / "other", early=True)
    assert read(tmp_path / "other")[1] == read(run)[1], "a run that goes on from its checkpoint"


def test_rows_that_are_others_in_the_same_places_leave_the_order(model_dir: Path, rows: Path, tmp_path: Path) -> None:
    files = []
    for number, text in enumerate(("", "B")):
        job = config(model_dir, rows, system_prompt=text)
        prepare(job, tmp_path / str(number))
        files.append(PromptFile(tmp_path / str(number) / "data" / "train.safetensors"))
    assert files[0].early == files[1].early > 0
    assert files[0].early_digest != files[1].early_digest
    assert files[0].early_places == files[1].early_places


def test_a_preparation_that_was_killed_at_its_end_is_not_repeated(
    model_dir: Path, rows: Path, tmp_path: Path, at_the_end: Any
) -> None:
    counts = prepare(config(model_dir, rows), tmp_path, early=True)
    at_the_end(lambda: pytest.fail("the rows are prepared again, and a controller may look for them"))
    assert prepare(config(model_dir, rows), tmp_path, early=True) == counts == {"train": 40}


def test_a_run_that_has_begun_does_not_go_on_with_other_rows(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [dict(row) for row in ROWS]
    data[39]["prompt"] = None
    job = config(model_dir, write(tmp_path / "rows.jsonl", data), dataloader_shuffle=False)
    with pytest.raises(DataError, match="`prompt` is empty"):
        prepare(job, tmp_path, early=True)
    begun = read(tmp_path)[0].early_digest
    write(tmp_path / "rows.jsonl", data[1:-1])
    with pytest.raises(DataError, match="the run has begun with other rows than those that come first now"):
        prepare(job, tmp_path)
    write(tmp_path / "rows.jsonl", ROWS)
    prepare(job, tmp_path)
    assert (read(tmp_path)[0].early_digest, len(read(tmp_path)[0])) == (begun, 40)


def test_a_preparation_after_a_beginning_knows_of_it(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [{**row, "prompt": "x" * (100 if row["id"] >= EARLY else 1)} for row in ROWS]
    job = config(model_dir, write(tmp_path / "rows.jsonl", data), dataloader_shuffle=False)
    for _ in range(2):
        with pytest.raises(DataError, match=r"train\.max_num_steps = 4 takes 16 rows"):
            prepare(job, tmp_path, early=True)
        assert not has_all_rows(tmp_path / "data" / "train.safetensors")
    prepare(job, tmp_path)
    assert len(read(tmp_path)[0]) == EARLY, "a run that goes on waits, and goes through what is left"


def test_a_run_that_goes_on_validates_what_its_configuration_names(
    model_dir: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job(name: str) -> Config:
        held_out = write(tmp_path / f"{name}.jsonl", [{"prompt": f"{name}?", "id": i} for i in range(3)])
        data = config(model_dir, rows).model_dump()
        data["validation"] |= {"enable": True, "dataset": {"name": str(held_out)}}
        return Config.model_validate(data)

    with monkeypatch.context() as context:
        context.setattr(preparation._Files, "finish", killed)
        with pytest.raises(OSError, match="killed"):
            prepare(job("before"), tmp_path, early=True)
    prepare(job("now"), tmp_path)
    assert PromptFile(tmp_path / "data" / "validation.safetensors").row(0)["prompt"] == "now?"


def test_a_run_goes_on_from_a_checkpoint_of_another_that_ended_before_its_rows_were_prepared(
    model_dir: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        context.setattr(preparation._Files, "finish", killed)
        with pytest.raises(OSError, match="killed"):
            prepare(config(model_dir, rows), tmp_path / "before", early=True)
    other = write(tmp_path / "other.jsonl", [{**row, "prompt": f"{row['id']}!"} for row in ROWS])
    prepare(config(model_dir, other, {"resume": str(tmp_path / "before")}), tmp_path / "after")
    assert len(read(tmp_path / "after")[0]) == 40


def test_a_run_whose_data_are_lost_is_taken_for_one_without_early_rows(
    model_dir: Path, rows: Path, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    prepare(config(model_dir, rows), tmp_path)
    assert read(tmp_path)[0].early == 0


def test_a_job_that_goes_on_from_unknown_rows_is_taken_for_one_without_early_ones(
    model_dir: Path, rows: Path, tmp_path: Path
) -> None:
    job = config(model_dir, rows, {"resume": True})
    prepare(job, tmp_path / "alone" / "run", early=True)
    assert read(tmp_path / "alone" / "run")[0].early == 0
    (tmp_path / "before" / "checkpoints").mkdir(parents=True)
    prepare(config(model_dir, rows), tmp_path / "before")
    prepare(job, tmp_path / "run", early=True)
    assert read(tmp_path / "run")[1] == read(tmp_path / "before")[1]


def killed(_: object) -> None:
    raise OSError("killed")


def test_a_cache_keeps_the_early_rows(model_dir: Path, rows: Path, tmp_path: Path, at_the_end: Any) -> None:
    job = config(model_dir, rows, enable_dataset_cache=True, dataset_cache_dir=str(tmp_path / "cache"))
    prepare(job, tmp_path / "first", early=True)
    at_the_end(lambda: pytest.fail("the rows are prepared again"))
    prepare(job, tmp_path / "second", early=True)
    first, second = (read(tmp_path / name) for name in ("first", "second"))
    assert (second[1], second[0].metadata) == (first[1], first[0].metadata)


@pytest.mark.parametrize(
    "notes",
    [
        {"early": '{"rows": 4, "read": {}, "digest": "", "places": ""}'},
        {"early": '{"rows": 1, "read": {}}'},
        {"early": "6"},
        {"early": "{"},
        {"unfinished": "true"},
        {"unfinished": "true", "early": '{"rows": 2, "read": {}, "digest": "", "places": ""}'},
    ],
    ids=str,
)
def test_a_file_with_other_early_rows_than_it_can_have_is_damaged(tmp_path: Path, notes: dict[str, str]) -> None:
    write_prompts(tmp_path / "file", [[1], [2], [3]], [{}, {}, {}], metadata=notes)
    with pytest.raises(PromptFileError, match="it does not say which rows were prepared first"):
        PromptFile(tmp_path / "file")


def test_a_file_has_all_rows_unless_it_says_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert not has_all_rows(path)
    for header, whole in (
        ({"__metadata__": {"unfinished": "true"}}, False),
        ({"__metadata__": {}}, True),
        ({}, True),
    ):
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        assert has_all_rows(path) == whole
    path.write_bytes(b"\xff" * 20)
    assert has_all_rows(path), "who reads it says that it is damaged"
