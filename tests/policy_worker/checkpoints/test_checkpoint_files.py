"""What is written and read: state, random states, directories, and what is wrong with them."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from policy_worker.background import Background
from policy_worker.checkpoints import directory
from policy_worker.checkpoints.find import newest_snapshot
from policy_worker.checkpoints.layout import BEST, faults, hash_of_file, look, rng_file, state_files, write_manifest
from policy_worker.checkpoints.retention import Housekeeper
from policy_worker.checkpoints.state import (
    apply_rng,
    capture_rng,
    load_model_state,
    restore_rng,
    state_to_save,
    write_rng,
)
from policy_worker.checkpoints.storage import Staging, StateFiles, pieces_of, write_pieces
from policy_worker.checkpoints.uploads import Uploader
from policy_worker.errors import CheckpointError, DamagedCheckpointError
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.trained.lr_schedule import Schedule
from policy_worker.trained.trainer import Trainer
from schema.config.sections.train import CheckpointConfig
from schema.wire.messages import LedgerSnapshot
from tests.policy_worker.checkpoint_material import load_state, make_checkpoint, save_state
from tests.policy_worker.load_program import memory
from tests.policy_worker.material import make_config, tiny_model
from tests.support.waiting import PATIENCE


def trainer_of(group: RankGroup, seed: int = 0, **train: Any) -> Trainer:
    return Trainer(tiny_model(seed), make_config(None, train), group, Schedule(10))


# ---- state ----------------------------------------------------------------------------------------------------


def test_a_checkpoint_holds_no_pickle_and_every_file_is_in_its_manifest(tmp_path: Path, group: RankGroup):
    found = save_state(trainer_of(group), tmp_path, 3)
    assert found is not None
    files = {path.name for path in found.path.iterdir()}
    assert files == {
        "model-00000.safetensors", "optimizer-00000.safetensors", "rng-00000.safetensors", "ledger.json",
        "manifest.json",
    }  # fmt: skip
    assert look(found.path) == found
    assert set(found.manifest.files) == files - {"manifest.json"}
    assert faults(found.path, found.manifest.files) == []
    for path in found.path.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:  # any reader of the format can
            assert len(list(file.keys())) > 0
    assert (tmp_path / "latest").read_text() == "step-00000003"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000003"]


def test_a_tied_tensor_is_kept_once(tmp_path: Path, group: RankGroup):
    found = save_state(trainer_of(group), tmp_path)
    assert found is not None
    with StateFiles(state_files(found.path, "model")) as files:
        assert "model.lm.model.embed_tokens.weight" in files.tensors
        assert "model.lm.lm_head.weight" not in files.tensors


def test_staged_pieces_are_copies_whose_memory_is_kept(group: RankGroup):
    trainer, staging = trainer_of(group), Staging(group.device)
    pieces = pieces_of(state_to_save(trainer, ["model"])["model"])
    first = staging.copy(pieces)
    assert all(torch.equal(a.data.cpu(), b.data) for a, b in zip(pieces, first, strict=True))
    before = first[0].data.clone()
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(1.0)
    assert torch.equal(first[0].data, before)
    again = staging.copy(pieces_of(state_to_save(trainer, ["model"])["model"]))
    assert [piece.data.data_ptr() for piece in again] == [piece.data.data_ptr() for piece in first]
    assert torch.equal(again[0].data, before + 1.0)


def test_a_missing_piece_is_noticed(tmp_path: Path, group: RankGroup):
    found = save_state(trainer_of(group), tmp_path)
    assert found is not None
    path = found.path / "model-00000.safetensors"
    size = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + size])
    chunks = json.loads(header["__metadata__"]["chunks"])
    name = next(name for name in chunks if "embed_tokens" in name)
    chunks[name][2] = [chunks[name][2][0] * 2, chunks[name][2][1]]
    header["__metadata__"]["chunks"] = json.dumps(chunks)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + path.read_bytes()[8 + size :])
    with pytest.raises(DamagedCheckpointError, match=r"embed_tokens\.weight is not whole"):
        StateFiles([path])
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DamagedCheckpointError, match=str(path)):
        StateFiles([path])


def test_what_is_read_takes_a_block_of_memory(tmp_path: Path):
    """Of 64 MB and 32; the largest resident memory counts pages of files."""
    saved = {"matrix": torch.arange(16 << 20, dtype=torch.float32).view(-1, 1024), "number": torch.tensor(3.0)}
    saved["halves"] = torch.full((16 << 20,), 0.5, dtype=torch.bfloat16)
    write_pieces(tmp_path / "model-00000.safetensors", pieces_of(saved))
    read = {key: torch.zeros_like(tensor) for key, tensor in saved.items()}
    with StateFiles([tmp_path / "model-00000.safetensors"]) as files:
        Path("/proc/self/clear_refs").write_text("5")
        before = memory()["VmRSS"]
        files.load(read)
        assert memory()["VmHWM"] - before < 24 << 20
    assert all(torch.equal(tensor, saved[key]) for key, tensor in read.items())


def test_another_optimizer_is_named(tmp_path: Path, group: RankGroup):
    save_state(trainer_of(group), tmp_path)
    config = make_config(train={"optm_name": "Muon"})
    trainer = Trainer(tiny_model(), config, group, Schedule(10))
    with pytest.raises(CheckpointError, match=r"its optimizer is another one.*momentum_buffer.*train\.optm_name"):
        load_state(trainer, tmp_path / "step-00000000", config)


def test_an_average_that_was_not_saved_begins_with_the_weights_that_were(
    tmp_path: Path, group: RankGroup, caplog: pytest.LogCaptureFixture
):
    config = make_config(train={"ema_decay": 0.5})
    save_state(trainer_of(group, seed=1), tmp_path / "without")
    trainer = Trainer(tiny_model(), config, group, Schedule(10))
    with caplog.at_level("WARNING"):
        load_state(trainer, tmp_path / "without" / "step-00000000", config)
    assert "train.ema_decay begins with its weights" in caplog.text
    assert trainer.ema is not None
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(trainer.ema.average[name], parameter)
        trainer.ema.average[name].fill_(7.0)
    save_state(trainer, tmp_path / "with")
    again = Trainer(tiny_model(), config, group, Schedule(10))
    load_state(again, tmp_path / "with" / "step-00000000", config)
    assert again.ema is not None
    assert all((average == 7.0).all() for average in again.ema.average.values())
    load_state(trainer_of(group), tmp_path / "with" / "step-00000000", make_config())  # and without one


def test_another_architecture_is_named(tmp_path: Path, group: RankGroup):
    trainer = trainer_of(group)
    found = save_state(trainer, tmp_path)
    assert found is not None
    text = (found.path / "manifest.json").read_text()
    assert '"architecture": "Qwen3ForCausalLM"' in text
    write_manifest(found.path, found.manifest.model_copy(update={"architecture": "LlamaForCausalLM"}))
    with pytest.raises(CheckpointError, match=r"it is of a LlamaForCausalLM, .* is a Qwen3"):
        load_state(trainer, found.path, make_config())


def test_other_shapes_are_named(tmp_path: Path, group: RankGroup):
    save_state(trainer_of(group), tmp_path)
    trainer = trainer_of(group)
    trainer.model.lm.model.norm.weight = torch.nn.Parameter(torch.zeros(16))
    with pytest.raises(CheckpointError, match=r"model.lm.model.norm.weight is \(32,\) there and \(16,\) here"):
        load_model_state(trainer.model, tmp_path / "step-00000000")


# ---- random states --------------------------------------------------------------------------------------------


def draw() -> tuple[float, float, float, float]:
    return random.gauss(0, 1), float(np.random.normal()), float(torch.rand(1)), random.random()


@pytest.fixture
def _states_stay() -> Any:
    before = capture_rng(torch.device("cpu"))
    yield
    apply_rng(before, torch.device("cpu"))


@pytest.mark.usefixtures("_states_stay")
def test_random_states_of_all_generators_go_on(tmp_path: Path):
    draw()  # leaves a second Gauss number cached
    write_rng(tmp_path, 0, capture_rng(torch.device("cpu")))
    expected = [draw() for _ in range(3)]
    draw()
    restore_rng(tmp_path, rank=0, saved_world=1, seed=1, step=2, device=torch.device("cpu"))
    assert [draw() for _ in range(3)] == expected


@pytest.mark.usefixtures("_states_stay")
def test_ranks_without_saved_states_are_seeded_by_seed_steps_and_rank(tmp_path: Path):
    seen = set()
    for seed, step, rank in ((1, 2, 2), (1, 2, 3), (1, 3, 2), (2, 2, 2), (1, 2, 2)):
        restore_rng(tmp_path, rank=rank, saved_world=2, seed=seed, step=step, device=torch.device("cpu"))
        seen.add(draw())
    assert len(seen) == 4
    (tmp_path / rng_file(1)).write_bytes(b"no states")
    with pytest.raises(DamagedCheckpointError, match="holds no random states"):
        restore_rng(tmp_path, rank=1, saved_world=2, seed=1, step=2, device=torch.device("cpu"))


# ---- directories ----------------------------------------------------------------------------------------------

HOLDER = """
import sys
from pathlib import Path
from policy_worker.checkpoints import directory
beside = directory.begin(Path(sys.argv[1]), 7)
stream = directory.hold(beside)
(beside / "half").write_text("x")
print(beside, flush=True)
sys.stdin.read()
"""


def test_only_what_the_dead_left_is_removed(tmp_path: Path):
    whole = make_checkpoint(tmp_path, 5, latest=True)
    (tmp_path / ".trash-0011").mkdir()
    (tmp_path / ".latest.0011").write_text("half")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        beside = Path(holder.stdout.readline().strip())
        assert beside.parent == tmp_path
        directory.clean(tmp_path)
        assert (beside / "half").exists()
        assert sorted(os.listdir(tmp_path)) == sorted([beside.name, "latest", "step-00000005"])
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    directory.clean(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000005"]
    assert faults(whole, look(whole).manifest.files) == []


def test_one_of_the_same_step_is_replaced_whole(tmp_path: Path, group: RankGroup):
    old = make_checkpoint(tmp_path, 4, latest=True)
    found = save_state(trainer_of(group), tmp_path, 4)
    assert found is not None
    assert found.path == old
    assert (old / "model-00000.safetensors").exists()
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000004"]


class Holding:
    """An uploader that reads one checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def holds(self, path: Path) -> bool:
        return path == self.path


def test_housekeeping_notes_the_best_and_remembers_it(tmp_path: Path):
    paths = {step: make_checkpoint(tmp_path, step) for step in (1, 2, 3, 4)}
    keeper = Housekeeper(tmp_path, CheckpointConfig(max_keep=2), Uploader((), tmp_path))
    keeper.tidy(look(paths[4]), {1: 0.9, 3: 0.2})
    assert sorted(os.listdir(tmp_path)) == ["best.json", "step-00000001", "step-00000004"]
    assert json.loads((tmp_path / BEST).read_text()) == {"name": "step-00000001", "timeline": 0, "score": 0.9}
    paths[5] = make_checkpoint(tmp_path, 5)
    keeper.tidy(look(paths[5]), {4: 0.5})  # a controller that has lost its records
    assert sorted(os.listdir(tmp_path)) == ["best.json", "step-00000001", "step-00000005"]
    paths[6] = make_checkpoint(tmp_path, 6)
    keeper.tidy(look(paths[6]), {5: 0.95})
    assert sorted(os.listdir(tmp_path)) == ["best.json", "step-00000005", "step-00000006"]
    shutil.rmtree(paths[5])  # another one takes the name of the best: its score is not this one's
    make_checkpoint(tmp_path, 5, timeline=1, lineage=[(0, 0), (1, 4)])
    paths[7] = make_checkpoint(tmp_path, 7, timeline=1, lineage=[(0, 0), (1, 4)])
    keeper.tidy(look(paths[7]), {7: 0.1})
    assert json.loads((tmp_path / BEST).read_text())["name"] == "step-00000007"


def test_a_copy_that_somebody_keeps_beside_them_is_not_ours(tmp_path: Path):
    paths = {step: make_checkpoint(tmp_path, step) for step in (1, 2)}
    shutil.copytree(paths[1], tmp_path / "step-00000001.keep")
    Housekeeper(tmp_path, CheckpointConfig(max_keep=1), Uploader((), tmp_path)).tidy(look(paths[2]), {})
    assert sorted(os.listdir(tmp_path)) == ["step-00000001.keep", "step-00000002"]


def test_what_is_being_uploaded_stays(tmp_path: Path):
    paths = {step: make_checkpoint(tmp_path, step) for step in (1, 2, 3)}
    holding: Any = Holding(paths[1])
    Housekeeper(tmp_path, CheckpointConfig(max_keep=1), holding).tidy(look(paths[3]), {})
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000003"]


def test_the_one_resumed_from_goes_when_the_next_is_complete(tmp_path: Path):
    old = make_checkpoint(tmp_path / "old", 3)
    new = make_checkpoint(tmp_path / "new", 4)
    for wanted in (False, True):
        keeper = Housekeeper(tmp_path / "new", CheckpointConfig(delete_after_load=wanted), Uploader((), tmp_path))
        keeper.resumed_from(old)
        assert old.exists()
        keeper.tidy(look(new), {})
        assert old.exists() is not wanted


def test_a_ledger_is_believed_byte_for_byte(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A controller that lost everything takes it for what was trained."""
    root = tmp_path / "checkpoints"
    file = make_checkpoint(root, 5, latest=True) / "ledger.json"
    written = look(file.parent).manifest
    ledger = LedgerSnapshot(committed_steps=5, timeline=0, frontier=8, untrained=[]).model_dump_json()
    file.write_text(ledger)
    write_manifest(file.parent, written.model_copy(update={"files": {file.name: hash_of_file(file)}}))
    found = newest_snapshot(tmp_path, None)
    assert found is not None
    assert found.committed_steps == 5
    file.write_text(ledger.replace("5", "6"))
    assert newest_snapshot(tmp_path, None) is None
    assert f"{file} was altered" in caplog.text


# ---- beside the training --------------------------------------------------------------------------------------


def test_an_error_beside_the_training_is_kept_until_it_is_asked_for():
    background = Background()
    assert background.wait()
    background.start(lambda: None)
    assert background.busy
    background.wait()
    assert not background.busy

    def fail() -> None:
        raise OSError("full")

    background.start(fail)
    background._work.exception(PATIENCE)  # type: ignore[union-attr]
    assert background.failed
    with pytest.raises(OSError, match="full"):
        background.wait()
    assert not background.busy
    assert not background.failed
