"""Which checkpoint a run resumes from, on real directories."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from policy_worker.checkpoints.find import before_step, candidates, choose, found_at, newest_in
from policy_worker.checkpoints.layout import look
from policy_worker.errors import CheckpointError, DamagedCheckpointError
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.training.replay import ReplayStart
from schema.config import Config
from schema.wire.batch_file import Facts
from tests.policy_worker.checkpoint_material import make_checkpoint
from tests.policy_worker.material import make_config


def config_with(resume: Any) -> Config:
    return make_config(train={"resume": resume})


def damage(path: Path, file: str = "ledger.json") -> Path:
    with (path / file).open("r+") as stream:
        stream.truncate(3)
    return path / file


def test_the_pointer_says_which_is_newest(tmp_path: Path):
    make_checkpoint(tmp_path, 20)
    make_checkpoint(tmp_path, 10, latest=True)  # after a rewind, fewer steps are newer
    found = newest_in(tmp_path)
    assert found is not None
    assert (found.path.name, found.step) == ("step-00000010", 10)


def test_without_a_pointer_the_last_timeline_wins(tmp_path: Path):
    make_checkpoint(tmp_path, 5)
    make_checkpoint(tmp_path, 25)
    make_checkpoint(tmp_path, 15, timeline=1, lineage=[(0, 0), (1, 5)])
    (tmp_path / ".step-00000030.abc").mkdir()
    found = newest_in(tmp_path)
    assert found is not None
    assert found.step == 15
    assert newest_in(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("", DamagedCheckpointError, "cannot be read"),
        ("{", DamagedCheckpointError, "cannot be read"),
        ("[]", DamagedCheckpointError, "not a manifest"),
        ('{"manifest": {"format": 2}, "hash": ""}', DamagedCheckpointError, "altered"),
        ('{"manifest": {"format": 99}}', CheckpointError, "of format 99, this build reads format 2"),
        (None, CheckpointError, "no manifest.json"),
    ],
)
def test_a_manifest_that_cannot_be_used_is_named(tmp_path: Path, text: str | None, error: Any, words: str):
    path = make_checkpoint(tmp_path, 3)
    if text is None:
        (path / "manifest.json").unlink()
    else:
        (path / "manifest.json").write_text(text)
    with pytest.raises(error, match=words) as raised:
        look(path)
    assert str(path) in str(raised.value)


def test_a_manifest_with_another_step_is_no_more_believed(tmp_path: Path):
    path = make_checkpoint(tmp_path, 3) / "manifest.json"
    written = json.loads(path.read_text())
    written["manifest"]["step"] = 4
    path.write_text(json.dumps(written))
    with pytest.raises(DamagedCheckpointError, match="altered"):
        look(path.parent)


def test_a_run_continues_itself_whatever_it_began_from(tmp_path: Path):
    make_checkpoint(tmp_path / "b" / "checkpoints", 50, latest=True)
    own = make_checkpoint(tmp_path / "a" / "checkpoints", 4, latest=True)
    for resume in (False, True, str(tmp_path / "b" / "checkpoints" / "step-00000050")):
        found = candidates(config_with(resume), tmp_path / "a")
        assert (found.found[0].path, found.own, found.strict) == (own, True, False)


def test_resume_true_takes_the_newest_of_the_neighbours(tmp_path: Path, group: RankGroup):
    for number, name in enumerate(("x", "y", "z")):
        make_checkpoint(tmp_path / name / "checkpoints", 10 - number, latest=True, written_at=1000 + number % 2)
    (tmp_path / "a").mkdir()
    found = choose(group, config_with(True), tmp_path / "a")
    assert found is not None
    assert (found.path.parts[-3], found.step, found.own) == ("y", 9, False)
    assert choose(group, config_with(False), tmp_path / "a") is None


def test_resume_from_a_path(tmp_path: Path):
    path = make_checkpoint(tmp_path / "b" / "checkpoints", 7, latest=True)
    make_checkpoint(tmp_path / "b" / "checkpoints", 9)
    for written in (path, path.parent, path.parent.parent):
        found = candidates(config_with(str(written)), tmp_path / "a")
        assert ([one.path for one in found.found], found.strict) == ([path], True)
    with pytest.raises(
        CheckpointError, match=r"train\.resume = .*no complete checkpoint: .*nothing .*does not exist"
    ):
        candidates(config_with(str(tmp_path / "nothing")), tmp_path / "a")


def test_damage_beside_the_newest_does_not_keep_it_from_being_taken(tmp_path: Path):
    root = tmp_path / "b" / "checkpoints"
    damage(make_checkpoint(root, 5), "manifest.json")
    newest = make_checkpoint(root, 7, latest=True)
    assert found_at(root).path == found_at(root.parent).path == newest
    (root / "latest").unlink()  # now the damaged one might have been the newest
    with pytest.raises(DamagedCheckpointError, match=rf"manifest\.json cannot be read.*{newest} is whole"):
        found_at(root)


def test_a_run_that_was_killed_before_its_first_pointer_can_be_named(tmp_path: Path):
    path = make_checkpoint(tmp_path / "b" / "checkpoints", 7)
    assert found_at(tmp_path / "b").path == path


def test_nothing_to_resume_from_starts_afresh(tmp_path: Path, group: RankGroup):
    (tmp_path / "a").mkdir()
    assert choose(group, config_with(True), tmp_path / "a") is None


def test_weights_alone_begin_at_step_0(tmp_path: Path, group: RankGroup):
    path = make_checkpoint(tmp_path / "b" / "checkpoints", 7, latest=True)
    ckpt = {"load_contents": ["model"], "load_schedule": False}
    config = make_config(train={"resume": str(path), "ckpt": ckpt})
    resumption = choose(group, config, tmp_path / "a")
    assert resumption is not None
    assert (resumption.step, resumption.found.step) == (0, 7)
    # A run that continues itself reads all.
    own = make_checkpoint(tmp_path / "a" / "checkpoints", 3, latest=True)
    resumption = choose(group, config, tmp_path / "a")
    assert resumption is not None
    assert (resumption.path, resumption.step) == (own, 3)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("how", ["short", "altered", "gone", "manifest"])
def test_damage_is_passed_over_aloud(
    tmp_path: Path, group: RankGroup, resume: bool, how: str, caplog: pytest.LogCaptureFixture
):
    own = tmp_path / "a" / "checkpoints"
    older = make_checkpoint(own, 5)
    newest = make_checkpoint(own, 10, latest=True)
    file = newest / "ledger.json"
    if how == "short":
        damage(newest)
    elif how == "altered":
        file.write_text(file.read_text().replace("10", "11"))
    elif how == "gone":
        file.unlink()
    else:
        file = damage(newest, "manifest.json")
    with caplog.at_level(logging.ERROR):
        resumption = choose(group, config_with(resume), tmp_path / "a")
    assert resumption is not None
    assert resumption.path == older
    assert f"falling back to the older checkpoint {older}" in caplog.text
    assert str(file) in caplog.text
    assert newest.exists()


def test_damage_at_an_explicit_path_is_an_error(tmp_path: Path, group: RankGroup):
    root = tmp_path / "b" / "checkpoints"
    make_checkpoint(root, 5)
    newest = make_checkpoint(root, 10, latest=True)
    file = damage(newest)
    for written in (newest, root, root.parent):
        with pytest.raises(DamagedCheckpointError, match=f"{file} has 3 bytes"):
            choose(group, config_with(str(written)), tmp_path / "a")
    damage(newest, "manifest.json")
    for written in (newest, root, root.parent):
        with pytest.raises(DamagedCheckpointError, match=r"manifest\.json"):
            choose(group, config_with(str(written)), tmp_path / "a")
    assert sorted(os.listdir(root)) == ["latest", "step-00000005", "step-00000010"]


def test_no_whole_one_is_an_error_and_no_fresh_start(tmp_path: Path, group: RankGroup):
    path = make_checkpoint(tmp_path / "a" / "checkpoints", 10, latest=True)
    damage(path)
    with pytest.raises(DamagedCheckpointError, match=r"no checkpoint to resume from is whole.*begin a new run"):
        choose(group, config_with(True), tmp_path / "a")
    assert path.exists()


def weights_before(
    group: RankGroup, run: Path, step: int, timeline: int = 0, began_from: Any = "", config: Config | None = None
) -> tuple[str, int] | None:
    """Name and steps of what a replay of this step begins with."""
    found = before_step(group, config or make_config(), run, step, timeline, str(began_from))
    return None if found is None else (found.path.name, found.step)


def test_a_replay_begins_at_the_nearest_checkpoint_before_its_step(
    tmp_path: Path, group: RankGroup, caplog: pytest.LogCaptureFixture
):
    root = tmp_path / "checkpoints"
    make_checkpoint(root, 5)
    middle = make_checkpoint(root, 10)
    make_checkpoint(root, 12, timeline=1, lineage=[(0, 0), (1, 10)], latest=True)
    assert weights_before(group, tmp_path, 10) == ("step-00000010", 10)
    assert weights_before(group, tmp_path, 11) == ("step-00000010", 10)
    assert weights_before(group, tmp_path, 12, timeline=1) == ("step-00000012", 12)
    assert weights_before(group, tmp_path, 12) == ("step-00000010", 10), "that of step 12 led elsewhere"
    assert weights_before(group, tmp_path, 4) is None
    damage(middle)
    assert weights_before(group, tmp_path, 11) == ("step-00000005", 5)
    assert "falling back" in caplog.text


def test_a_replay_names_the_damaged_checkpoints_that_it_passes_over(
    tmp_path: Path, group: RankGroup, caplog: pytest.LogCaptureFixture
):
    root = tmp_path / "checkpoints"
    for step in (5, 10, 20):
        damage(make_checkpoint(root, step), "manifest.json")
    middle = make_checkpoint(root, 15, latest=True)
    assert weights_before(group, tmp_path, 16) == ("step-00000015", 15)
    assert not caplog.records, "those damaged ones would not have been taken"
    assert weights_before(group, tmp_path, 12) is None
    (record,) = caplog.records
    assert all(f"{root}/step-000000{step}/manifest.json" in record.getMessage() for step in ("05", "10"))
    assert "step-00000020" not in record.getMessage()
    caplog.clear()
    file = damage(middle)
    assert weights_before(group, tmp_path, 16) is None
    assert str(file) in caplog.text, "the only one that had a manifest"


def test_a_replay_does_not_take_the_model_for_what_the_run_began_from():
    facts = Facts(job_id="job", total_steps=10, ranks=1, settings="", began_from="")
    restarted = facts.model_copy(update={"began_from": "RUN/checkpoints/step-00000005"})
    assert ReplayStart([7], facts, None, False).weights == "the model as it was at step 0"
    assert "no checkpoint that led to step 7 is left" in ReplayStart([7], restarted, None, False).weights


def test_a_replay_of_the_first_steps_begins_where_the_run_began(
    tmp_path: Path, group: RankGroup, caplog: pytest.LogCaptureFixture
):
    run, other = tmp_path / "run", make_checkpoint(tmp_path / "other" / "checkpoints", 3)
    make_checkpoint(run / "checkpoints", 9)
    assert weights_before(group, run, 5, began_from=other) == ("step-00000003", 3)
    assert weights_before(group, run, 2, began_from=other) is None, "it has been trained on that already"
    of_weights = make_config(train={"resume": str(other), "ckpt": {"load_contents": ["model"]}})
    assert weights_before(group, run, 2, began_from=other, config=of_weights) == ("step-00000003", 0)
    assert weights_before(group, run, 9, began_from=other) == ("step-00000009", 9)
    assert weights_before(group, run, 2, began_from=run / "checkpoints" / "step-00000001") is None
    assert not caplog.records
    assert weights_before(group, run, 2, began_from=tmp_path / "gone") is None
    assert "that the run began from cannot be read" in caplog.text
