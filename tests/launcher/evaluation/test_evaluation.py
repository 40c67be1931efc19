"""Which models an evaluation finds, how it draws answers, what its table shows, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.errors import LaunchError
from launcher.evaluation.models import EvaluatedModel, _identity, find_models, is_exported
from launcher.evaluation.report import ALL, _line, table
from launcher.evaluation.settings import Sampling, Settings
from schema.scores.summary import ScoredPrompt, summarise
from schema.wire.messages import SampleRecord
from tests.launcher.cli import cosmos

POLICY = '[policy]\nmodel_name_or_path = "owner/name"\n'
DATA = '[train.train_policy.dataset]\nname = "owner/data"\n'


def make_run(path: Path, *steps: int, outcome: str = "stopped", trained: bool = False) -> Path:
    (path / "logs").mkdir(parents=True)
    for file in ("config.json", "config.toml"):
        (path / file).write_text("{}" if file.endswith("json") else "")
    for step in steps:
        (path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    (path / "summary.json").write_text(json.dumps({"outcome": outcome}))
    if trained:
        (path / "final").mkdir()
        (path / "final" / "config.json").write_text("{}")
    return path


def test_models_are_found_as_they_are_named(tmp_path: Path) -> None:
    going, done = make_run(tmp_path / "a", 20, 40), make_run(tmp_path / "b", 60, outcome="finished", trained=True)
    checkpoint = going / "checkpoints" / "step-00000020"
    found = find_models([str(going), str(done), str(checkpoint), "Qwen/Qwen3-0.6B", str(done / "final")], tmp_path)
    exported = str(tmp_path / "models" / "a-step-00000040")
    assert [(model.label, model.path, model.checkpoint) for model in found] == [
        ("a-step-00000040", exported, str(going / "checkpoints" / "step-00000040")),
        ("b-final", str(done / "final"), ""),
        ("a-step-00000020", str(tmp_path / "models" / "a-step-00000020"), str(checkpoint)),
        ("Qwen-Qwen3-0.6B", "Qwen/Qwen3-0.6B", ""),
        ("b-final-2", str(done / "final"), ""),
    ]


@pytest.mark.parametrize(
    ("name", "words"), [("nowhere", "neither a directory of that name"), ("empty", "neither a checkpoint")]
)
def test_what_is_no_model_is_refused(tmp_path: Path, name: str, words: str) -> None:
    make_run(tmp_path / "empty")
    with pytest.raises(LaunchError, match=words):
        find_models([str(tmp_path / name)], tmp_path)


def test_a_name_below_a_directory_that_is_here_is_not_one_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "outputs" / "a", 20)
    with pytest.raises(LaunchError, match="outputs/b is not a model"):
        find_models(["outputs/b"], tmp_path)
    assert find_models(["owner/b"], tmp_path)[0].path == "owner/b"


def test_an_export_is_of_one_checkpoint(tmp_path: Path) -> None:
    first, other = (make_run(tmp_path / name / "run", 4) / "checkpoints" / "step-00000004" for name in "ab")
    (model,), (another,) = (find_models([str(path)], tmp_path / "out") for path in (first, other))
    assert model.path == another.path
    Path(model.path).mkdir(parents=True)
    (Path(model.path) / "config.json").write_text("{}")
    assert not is_exported(model), "of which one is not known"
    (Path(model.path) / "exported_from.json").write_text(json.dumps(_identity(model)))
    assert (is_exported(model), is_exported(another)) == (True, False)


def test_a_temperature_ends_greedy_decoding() -> None:
    drawn = Sampling(n_generation=8, temperature=0.6)
    assert drawn.changes({"top_k": 1}) == {"n_generation": 8, "temperature": 0.6, "top_k": -1}
    assert drawn.changes({"top_k": 20}) == {"n_generation": 8, "temperature": 0.6}
    assert Sampling(temperature=0.0).changes({"top_k": -1}) == {"temperature": 0.0, "top_k": 1}


def test_the_command_line_counts_for_sets_that_are_greedy_by_themselves(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        f'{POLICY}[train.train_policy]\nreward_function = "gsm8k"\n{DATA}[validation]\ntop_k = 20\n'
        '[[validation.dataset.part]]\nname = "owner/a"\ntemperature = 0.0\ntop_k = 1\n'
        '[[validation.dataset.part]]\nname = "owner/b"\ntop_k = 5\n'
    )
    model = EvaluatedModel("m", "owner/name", "owner/name")
    settings = Settings([tmp_path / "run.toml"], [], Sampling(n_generation=8, temperature=0.8))
    validation = settings.of_model(model, tmp_path, {})["validation"]
    assert (validation["temperature"], validation["top_k"]) == (0.8, 20)
    assert [(part["temperature"], part["top_k"]) for part in validation["dataset"]["part"]] == [(None, -1), (None, 5)]


def test_a_line_has_the_reference_of_the_row_and_what_was_generated() -> None:
    record = SampleRecord.model_validate(
        {"prompt": "?", "answer": "four", "group": "v1-p0", "index": 0, "kind": "validation", "step": 0}
        | dict.fromkeys(("at", "prompt_tokens", "response_tokens", "oldest_version", "newest_version"), 1)
        | {"timeline": 0, "finish_reason": "stop", "ending": "finished", "score": 1.0}
    )
    late = record.model_copy(update={"finish_reason": "abort", "answer": "", "score": None, "error": "SampleTimeout"})
    row = {"key": "validation/3", "prompt": "raw?", "answer": ["4", "four"], "level": 2}
    line = _line([record, late], row)
    assert (line["answer"], line["responses"], line["errors"]) == (["4", "four"], ["four"], [None])
    assert (line["prompt"], line["level"], "key" in line) == ("raw?", 2, False)
    assert line["unanswered"] == 1
    assert _line([late], {}) == {}


def test_the_table_has_a_column_for_each_model() -> None:
    one = summarise([ScoredPrompt("a", [1.0, 0.0], ["1", "2"]), ScoredPrompt("b", [1.0], ["1"], errors=1)], 1.0)
    two = summarise([ScoredPrompt("a", [1.0, 1.0], [None, None])], 1.0)
    columns = {label: {ALL: s.whole, **s.sources} for label, s in {"x": one, "long-name": two}.items()}
    lines = table(columns | {"failed": {}}).splitlines()
    assert lines[0].split() == ["source", "prompts", "x", "long-name", "failed"]
    assert lines[1].split() == ["a", "1", "mean@2", "0.5000", "1.0000", "–"]
    assert [line.split()[:3] for line in lines if line.startswith("all")] == [["all", "2", "mean@2"]]
    assert "0.7500 [0.5000, 1.0000]" in lines[11]
    assert lines[-4:] == [
        "[…]: 95 % intervals, by resampling prompts",
        "x: 1 of 4 samples have no score, and are in no number",
        "long-name: no maj@2, for the rewards extract no answers (docs/metrics.md, Estimates)",
        "failed: no scores",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no configuration is named"),
        (["--resume", "nowhere"], "holds no evaluation"),
        (["--resume", "nowhere", "-n", "2"], "as it was begun"),
        (["--answers", "a.jsonl", "-n", "2"], "nothing is generated"),
        (["--answers", "a.jsonl", "--config", "sft.toml"], "a.jsonl is not a file"),
        (["--config", "sft.toml"], "trains on conversations: it has no rewards"),
        (["--config", "answers.toml"], "trains on conversations: its prompts are parts of conversations"),
        (["--answers", "rl.toml", "--config", "sets.toml"], "the validation set 'b' has one of its own"),
        (["--answers", "rl.toml", "--config", "passes.toml"], "pass with one score, and the validation set 'b' has"),
        (["--config", "rl.toml"], "names no prompts to evaluate on"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(tmp_path: Path, arguments: list[str], words: str) -> None:
    policy, data = POLICY, DATA
    (tmp_path / "sft.toml").write_text(f'{policy}[train.train_policy]\ntype = "sft"\n{data}')
    (tmp_path / "rl.toml").write_text(f'{policy}[train.train_policy]\nreward_function = "gsm8k"\n{data}')
    generates = '[validation]\nenable = true\ngenerate = true\nreward_function = "gsm8k"\n'
    (tmp_path / "answers.toml").write_text((tmp_path / "sft.toml").read_text() + "test_size = 4\n" + generates)
    sets = '[[validation.dataset.part]]\nsource = "b"\nname = "owner/b"\nreward_function = "format"\n'
    (tmp_path / "sets.toml").write_text(f'{policy}[train.train_policy]\nreward_function = "gsm8k"\n{data}{sets}')
    (tmp_path / "passes.toml").write_text(
        (tmp_path / "sets.toml").read_text().replace('reward_function = "format"', "pass_score = 0.5")
    )
    cosmos("eval", *arguments, cwd=tmp_path).complains(2, words)
