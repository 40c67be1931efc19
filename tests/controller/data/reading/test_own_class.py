"""Dataset classes of the user's: what they are called with, what their rows become, and their faults."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from controller.data.errors import DataError
from controller.data.prepare import prepare
from controller.data.reading.own_class import most_rows, run_class
from schema.config import Config
from schema.wire.prompts import PromptFile
from tests.support.waiting import until

CODE = """
import pathlib

class Rows:
    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1, level=0):
        self.facts = {
            "files": data_files, "ids": tokenizer("ab")["input_ids"], "prompt_key": config.prompt_key,
            "longest": config["max_prompt_length"], "own": config.get("nothing", 5), "level": level,
        }

    def __len__(self):
        return 20

    def __getitem__(self, i):
        with pathlib.Path(__file__).with_name("asked").open("a") as asked:
            asked.write(f"{i}\\n")
        return {"raw_prompt": [{"role": "user", "content": str(i)}], "i": i, **self.facts}

class Plain:
    def __len__(self):
        return 20

    def __getitem__(self, i):
        return {"prompt": str(i)}

class Raises(Plain):
    def __getitem__(self, i):
        return {"prompt": str(1 / (16 - i))}

class Hangs(Plain):
    def __getitem__(self, i):
        import subprocess, time
        print("row", i)
        if i == 16:
            child = subprocess.Popen(["sleep", "1000"])  # keeps the pipe of its errors open
            pathlib.Path(__file__).with_name("child").write_text(str(child.pid))
            time.sleep(100)
        return {"prompt": str(i)}

class Grows(Plain):
    n = 3
    def __len__(self):
        self.n += 1
        return self.n

class Empty(Plain):
    def __len__(self):
        return 0

class OfVerl(Plain):
    def __init__(self, missing):
        pass

class Texts(Plain):
    def __getitem__(self, i):
        return str(i)

class Endless:
    def __iter__(self):
        i = 0
        while True:
            yield {"prompt": str(i)}
            i += 1

class Drifts:
    def __iter__(self):
        i = len(list(pathlib.Path(__file__).parent.glob("asked")))
        while True:
            yield {"prompt": str(i)}
            i += 1

class Gaps(Plain):
    def __getitem__(self, i):
        nan = float("nan")
        return {"prompt": [{"role": "user", "content": "?", "name": nan}], "answer": nan, "x": [1.5]}

class Bytes(Plain):
    def __getitem__(self, i):
        return {"prompt": [{"role": "user", "content": b"?"}]}

class Threads:
    def __iter__(self):
        import threading, time
        threading.Thread(target=time.sleep, args=(100,)).start()
        yield from ({"prompt": str(i)} for i in range(100))

class Ends:
    def __iter__(self):
        yield from ({"prompt": str(i)} for i in range(5))

Neither = dict
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    return path


def of(code: Path, model_dir: Path, name: str, steps: int | None = None, **keys: Any) -> Config:
    dataset = {"files": ["some.bin"], "custom_class": f"{code}:{name}", **keys}
    train = {"train_policy": {"type": "grpo", "dataset": dataset}, "max_num_steps": steps}
    policy = {"model_name_or_path": str(model_dir), "model_max_length": 128}
    return Config.model_validate({"policy": policy, "train": train, "custom": {"level": 3}})


def rows_of(config: Config, run_dir: Path) -> list[dict[str, Any]]:
    section = "train.train_policy.dataset"
    path = run_class(config, section, config.train.train_policy.dataset, run_dir)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_class_gets_what_it_has_parameters_for_and_is_asked_for_each_row_once(
    code: Path, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = of(code, model_dir, "Rows")
    rows = rows_of(config, tmp_path)
    facts = {"files": ["some.bin"], "prompt_key": "prompt", "own": 5, "level": 3}
    assert [{**row, **facts} for row in rows] == rows
    assert rows[7]["prompt"] == rows[7]["raw_prompt"] == [{"role": "user", "content": "7"}]
    assert rows_of(config, tmp_path) == rows
    assert (tmp_path / "asked").read_text().split() == [str(i) for i in range(20)]
    (target,) = (tmp_path / "data" / "own").glob("*.jsonl")
    target.with_suffix(".done").unlink()
    target.write_bytes(target.read_bytes()[:-5])  # as a process that was killed leaves it
    assert rows_of(config, tmp_path) == rows
    assert (tmp_path / "asked").read_text().split() == [str(i) for i in (*range(20), 19)], "only the row that is lost"
    (tmp_path / "some.bin").write_text("now there are data")
    monkeypatch.chdir(tmp_path)
    rows_of(config, tmp_path)
    assert len((tmp_path / "asked").read_text().split()) == 41, "other data"
    code.write_text(CODE.replace("str(i)", "str(-i)"))
    assert rows_of(config, tmp_path)[7]["prompt"][0]["content"] == "-7", "another class"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Raises", r"Raises': row 17 of 20: ZeroDivisionError: division by zero \(mine.py:\d+ in __getitem__\)"),
        ("Grows", "its length was 4 and is 5 after all rows"),
        ("Empty", "it has no rows"),
        ("OfVerl", "it has the parameter 'missing', of which nothing is known"),
        ("Texts", "row 1 is str, not a dict of columns"),
        ("Nothing", "has no function 'Nothing'"),
        ("Bytes", "row 1, `prompt`: bytes, not text; decode them"),
    ],
)
def test_a_class_at_fault_is_named_with_the_row(
    code: Path, model_dir: Path, tmp_path: Path, name: str, words: str
) -> None:
    with pytest.raises(DataError, match=words):
        rows_of(of(code, model_dir, name), tmp_path)


def test_what_has_no_value_is_null_and_a_thread_holds_nothing_up(code: Path, model_dir: Path, tmp_path: Path) -> None:
    row = rows_of(of(code, model_dir, "Gaps"), tmp_path)[0]
    assert row == {"prompt": [{"role": "user", "content": "?", "name": None}], "answer": None, "x": [1.5]}
    assert len(rows_of(of(code, model_dir, "Threads", steps=1, custom_class_timeout=30), tmp_path)) < 100


def test_training_and_validation_read_as_far_as_each_needs(code: Path, model_dir: Path, tmp_path: Path) -> None:
    config = of(code, model_dir, "Threads", steps=1)
    dataset = config.train.train_policy.dataset
    first = run_class(config, "train.train_policy.dataset", dataset, tmp_path)
    rows = first.read_text()
    validated = run_class(config.model_copy(update={"validation": config.validation.model_copy(
        update={"dataset": dataset})}), "validation.dataset", dataset, tmp_path)  # fmt: skip
    assert len(validated.read_text().splitlines()) == 100
    assert first.read_text() == rows


def test_a_class_that_hangs_is_given_up(code: Path, model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no row came for 10 s, after 16 rows; .* raise custom_class_timeout"):
        rows_of(of(code, model_dir, "Hangs", custom_class_timeout=10), tmp_path)
    child = Path("/proc", (tmp_path / "child").read_text(), "stat")
    until(lambda: has_ended(child), "the end of what the class has started")


def has_ended(stat: Path) -> bool:
    try:
        return stat.read_text().split()[2] == "Z"
    except OSError:
        return True


def test_a_class_of_verl_says_that_verl_is_missing(code: Path, model_dir: Path, tmp_path: Path) -> None:
    code.write_text("from verl.utils.dataset.rl_dataset import RLHFDataset\n" + CODE)
    with pytest.raises(DataError, match="its file needs the module 'verl'"):
        rows_of(of(code, model_dir, "Rows"), tmp_path)


def test_an_iterable_ends_where_it_ends_and_an_endless_one_where_the_job_does(
    code: Path, model_dir: Path, tmp_path: Path
) -> None:
    assert len(rows_of(of(code, model_dir, "Ends"), tmp_path)) == 5
    config = of(code, model_dir, "Endless", steps=3)
    wanted = (3 + config.staleness_bound + 1) * config.groups_per_step
    assert [row["prompt"] for row in rows_of(config, tmp_path)] == [str(i) for i in range(wanted)]
    more = 2 * config.groups_per_step + wanted
    longer = [row["prompt"] for row in rows_of(of(code, model_dir, "Endless", steps=5), tmp_path)]
    assert longer == [str(i) for i in range(more)], "a run that goes on has more"
    assert len(rows_of(of(code, model_dir, "Endless", steps=2), tmp_path)) == more
    rows_of(of(code, model_dir, "Drifts", steps=1), tmp_path)
    code.with_name("asked").touch()
    with pytest.raises(DataError, match="row 1 is another than it was before"):
        rows_of(of(code, model_dir, "Drifts", steps=2), tmp_path)


def test_what_is_left_out_of_an_endless_class_is_made_up_for(
    code: Path, model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code.write_text(CODE.replace('yield {"prompt": str(i)}', 'yield {"prompt": str(i) * (1 if i % 4 == 0 else 300)}'))
    config = of(code, model_dir, "Endless", steps=3)
    least = most_rows(config, "train.train_policy.dataset", config.train.train_policy.dataset)
    assert least is not None
    with caplog.at_level(logging.INFO):
        counts = prepare(config, tmp_path)
    assert least <= counts["train"] < 4 * least
    assert "too few rows are kept: the class is asked for further ones" in caplog.text
    prompts = [PromptFile(tmp_path / "data" / "train.safetensors").row(i)["prompt"] for i in range(least)]
    assert prompts == [str(4 * i) for i in range(least)]
    few = of(code, model_dir, "Endless", steps=3, max_samples=8)
    assert prepare(few, tmp_path / "few")["train"] <= 8
    code.write_text(CODE.replace('yield {"prompt": str(i)}', 'yield {"prompt": str(i) * (300 if i else 1)}'))
    with pytest.raises(
        DataError, match=r"so few rows are kept of a class that all steps cannot have theirs \(.*: 1 of"
    ):
        prepare(config, tmp_path / "none")


def test_an_iterable_is_read_to_its_end_but_for_training(code: Path, model_dir: Path, tmp_path: Path) -> None:
    code.write_text(CODE.replace("range(5)", "range(70)"))
    config = of(code, model_dir, "Endless", steps=1)
    dataset = {"name": "own", "custom_class": f"{code}:Ends"}
    data = config.model_dump()
    data["validation"] |= {"enable": True, "dataset": dataset}
    counts = prepare(Config.model_validate(data), tmp_path)
    assert counts["validation"] == 70
    assert counts["train"] < 70
    data["validation"]["dataset"] = {**dataset, "custom_class": f"{code}:Endless", "max_samples": 9}
    assert prepare(Config.model_validate(data), tmp_path / "endless")["validation"] == 9


@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_a_class_may_pass_what_it_gets_on_to_one_of_verl(
    code: Path, model_dir: Path, tmp_path: Path, kind: str
) -> None:
    code.write_text(OF_VERL)
    dataset = {"files": ["some.bin"], "custom_class": f"{code}:{'Reinforced' if kind == 'grpo' else 'Supervised'}"}
    job = {
        "policy": {"model_name_or_path": str(model_dir), "model_max_length": 128},
        "train": {"train_policy": {"type": kind, "dataset": dataset}},
        "custom": {"level": {"of": {"it": 3}}},
    }
    (row,) = rows_of(Config.model_validate(job), tmp_path)
    column = "prompt" if kind == "grpo" else "conversations"
    assert row[column] == [{"role": "user", "content": "some.bin 3"}]
    assert row["deep"] == {"numbers": [[1, 2]]}


OF_VERL = """
import numpy as np

class Base:
    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        self.files, self.config = data_files, config

    def __len__(self):
        return 1

    def __getitem__(self, i):
        text = f"{self.files[0]} {self.config.level.of.it}"
        return {"messages": [{"role": "user", "content": text}], "deep": {"numbers": [np.array([1, 2])]}}

class Reinforced(Base):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)

class Supervised(Base):
    def __init__(self, parquet_files, tokenizer, config, max_samples=-1):
        super().__init__(parquet_files, tokenizer, config)
"""


def test_a_run_with_more_steps_goes_on_behind_its_rows(code: Path, model_dir: Path, tmp_path: Path) -> None:
    files = []
    for steps in (3, 4, 4, 6):
        prepare(of(code, model_dir, "Endless", steps=steps), tmp_path)
        files.append(PromptFile(tmp_path / "data" / "train.safetensors"))
    counts = [len(file) for file in files]
    assert [file.grown for file in files] == [[], counts[:1], counts[:1], [counts[0], counts[1]]]
    config = of(code, model_dir, "Endless", steps=7)
    train = config.train.model_copy(update={"resume": str(tmp_path / "checkpoints" / "step_00000003")})
    prepare(config.model_copy(update={"train": train}), tmp_path / "another")
    another = PromptFile(tmp_path / "another" / "data" / "train.safetensors")
    assert another.grown == [*files[-1].grown, counts[-1]], "rows of the run that it goes on from"
    prepare(of(code, model_dir, "Ends"), tmp_path)
    assert PromptFile(tmp_path / "data" / "train.safetensors").grown == [], "other rows"
    assert {path.suffix for path in (tmp_path / "data").iterdir()} == {"", ".json", ".safetensors"}


def test_the_class_ends_with_its_parent(code: Path, model_dir: Path, tmp_path: Path) -> None:
    config = of(code, model_dir, "Hangs")
    (tmp_path / "config.json").write_text(config.model_dump_json())
    command = [sys.executable, "-m", "controller.data.prepare", "--run-dir", str(tmp_path)]
    with subprocess.Popen(command) as preparation:
        while not list((tmp_path / "data").glob("own/*.jsonl")):
            time.sleep(0.1)
        (child,) = (
            (Path("/proc") / str(preparation.pid) / "task" / str(preparation.pid) / "children").read_text().split()
        )
        preparation.kill()
    deadline = time.monotonic() + 20
    while (Path("/proc") / child).exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not (Path("/proc") / child).exists()
