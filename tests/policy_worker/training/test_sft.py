from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from policy_worker.checkpoints.save import Checkpointer
from policy_worker.errors import SettingsError
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.process import ShutdownRequest
from policy_worker.replicas.base import Registration
from policy_worker.trained.lr_schedule import Schedule
from policy_worker.trained.trainer import Trainer
from policy_worker.training.batches.source import DataEnded
from policy_worker.training.sft import HeldOut, RowOrder, Sft, SftBatch
from schema.wire.messages import RegisterReply
from schema.wire.mixture import Mixture, Source
from schema.wire.prompts import PromptWriter, write_prompts
from tests.policy_worker.material import sft_config, tiny_model, train_step


def write_rows(path: Path, n: int = 10, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(n):
        ids = rng.integers(3, 60, rng.integers(4, 12)).tolist()
        rows.append((ids, [0, 0, *rng.integers(0, 2, len(ids) - 3).tolist(), 1]))
    write_prompts(path, [ids for ids, _ in rows], [{}] * n, [mask for _, mask in rows])
    return rows


def make_sft(group: RankGroup, path: Path, sft: dict[str, Any] | None = None, **train: Any) -> Sft:
    config = sft_config(sft, train)
    model = tiny_model(packed=config.train.sequence_packing)
    return Sft(config, Trainer(model, config, group, Schedule(100)), path)


def naive_loss(rows: Sequence[tuple[list[int], list[int]]]) -> tuple[float, float]:
    """(mean of −log π, share of tokens that are the likeliest) over the tokens to learn, one row at a time."""
    model = tiny_model()
    losses, hits = [], []
    for ids, mask in rows:
        with torch.no_grad():
            log_p = torch.log_softmax(model.lm(input_ids=torch.tensor([ids])).logits[0], dim=-1)
        for position in range(1, len(ids)):
            if mask[position]:
                losses.append(-log_p[position - 1, ids[position]].item())
                hits.append(float(log_p[position - 1].argmax() == ids[position]))
    return float(np.mean(losses)), float(np.mean(hits))


@pytest.mark.parametrize(
    ("sft", "train"),
    [
        ({"mini_batch": 8}, {}),
        ({"mini_batch": 3}, {}),
        ({"max_token_len_per_mini_batch": 30}, {}),
        ({"max_token_len_per_mini_batch": 20}, {"sequence_packing": True}),
    ],
    ids=str,
)
def test_loss_is_the_mean_over_tokens_to_learn(tmp_path: Path, group: RankGroup, sft: Any, train: Any):
    rows = write_rows(tmp_path / "d")
    algorithm = make_sft(group, tmp_path / "d", {"dataloader_shuffle": False, **sft}, **train)
    metrics = train_step(algorithm, 0)
    loss, accuracy = naive_loss(rows[:8])
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["accuracy"] == pytest.approx(accuracy)
    assert metrics["samples"] == 8.0
    assert metrics["tokens"] == float(sum(len(ids) for ids, _ in rows[:8]))
    assert metrics["grad_norm"] > 0


def test_the_last_batch_is_short_and_then_the_data_ends(tmp_path: Path, group: RankGroup):
    write_rows(tmp_path / "d", 10)
    algorithm = make_sft(group, tmp_path / "d", train_batch_per_replica=8)
    assert [train_step(algorithm, step)["samples"] for step in range(2)] == [8.0, 2.0]
    with pytest.raises(DataEnded):
        algorithm.poll(2, 0.0)


def test_rows_without_a_token_to_learn_are_no_update(tmp_path: Path, group: RankGroup):
    write_prompts(tmp_path / "d", [[5, 6, 7]] * 4, [{}] * 4, [[1, 0, 0]] * 4)  # the first is never predicted
    algorithm = make_sft(group, tmp_path / "d")
    metrics = train_step(algorithm, 0)
    assert "loss" not in metrics
    assert metrics["samples"] == 4.0


def test_data_for_prompts_is_refused(tmp_path: Path, group: RankGroup):
    write_prompts(tmp_path / "d", [[5, 6]], [{}])
    with pytest.raises(SettingsError, match="no loss mask"):
        make_sft(group, tmp_path / "d")
    with pytest.raises(SettingsError, match="cannot be read"):
        make_sft(group, tmp_path / "missing")


def _order(rows: int, passes: int, seed: int, *, shuffle: bool = True) -> RowOrder:
    return RowOrder(Mixture([Source("", rows)], passes), [range(rows)], seed, shuffle)


def test_shares_of_sources_hold_at_each_moment_and_each_has_passes_of_its_own():
    sources = [Source("a", 4, 0.75), Source("b", 20, 0.25)]
    order = RowOrder(Mixture(sources, 1), [range(4), range(4, 24)], 3, True)
    rows = order.rows(0, 24)
    assert [sum(row < 4 for row in rows[:n]) for n in (4, 8, 12, 24)] == [3, 6, 9, 18]
    small = [row for row in rows if row < 4]
    assert [sorted(small[start : start + 4]) for start in (0, 4, 8)] == [[0, 1, 2, 3]] * 3
    assert order.rows(10, 20) == rows[10:20]
    stopped = RowOrder(Mixture(sources, 1, "stop"), [range(4), range(4, 24)], 3, False)
    assert stopped.rows(0, 24) == [0, 1, 4, 2, 3]


def test_a_column_orders_each_epoch_and_shares_change_with_the_step():
    numbers = np.array([5, 1, 1, 1, 0, 9], np.float64)
    order = RowOrder(Mixture([Source("", 6)], 2), [range(6)], 3, True, numbers=numbers)
    epochs = [order.rows(0, 6), order.rows(6, 12)]
    assert [numbers[rows].tolist() for rows in epochs] == [sorted(numbers)] * 2
    sources = [Source("a", 40, 0.5, (0.0,)), Source("b", 40, 0.5, (1.0,))]
    staged = RowOrder(Mixture(sources, 1, stages=[10]), [range(40), range(40, 80)], 3, True).rows(0, 30)
    assert [sum(row < 40 for row in part) for part in (staged[:10], staged[10:])] == [5, 0]


def test_each_epoch_has_every_row_once_in_an_order_of_its_own():
    order = _order(7, 3, seed=5)
    epochs = [order.rows(7 * epoch, 7 * (epoch + 1)) for epoch in range(3)]
    assert [sorted(rows) for rows in epochs] == [list(range(7))] * 3
    assert len({tuple(rows) for rows in epochs}) == 3
    assert order.rows(19, 30) == epochs[2][5:]


def test_the_order_depends_on_seed_and_position_alone():
    order = _order(50, 2, seed=1)
    whole = order.rows(0, 100)
    assert [row for start in range(0, 100, 8) for row in _order(50, 2, 1).rows(start, start + 8)] == whole
    assert _order(50, 2, seed=2).rows(0, 100) != whole
    assert _order(3, 2, seed=1, shuffle=False).rows(0, 6) == [0, 1, 2, 0, 1, 2]


def test_rows_that_come_later_leave_the_others_where_they_are():
    before, grown = _order(7, 1, seed=5), RowOrder(Mixture([Source("", 12)], 1), [range(12)], 5, True, grown=[7])
    assert grown.rows(0, 7) == before.rows(0, 7)
    assert sorted(grown.rows(7, 12)) == list(range(7, 12))


def write_early(path: Path, n: int, early: int, *, unfinished: bool = False) -> None:
    neighbour = path.with_name("neighbour")
    with PromptWriter(neighbour, masks=True) as writer:
        notes: dict[str, str] = {}
        for row in range(n):
            writer.add(np.array([row + 3, 4], np.int32), b"{}", np.array([0, 1], np.uint8))
            notes = writer.early({"train": early}) if row + 1 == early else notes
            if unfinished and notes:
                break
        writer.finish(notes | ({"unfinished": "true"} if unfinished else {}))
    neighbour.replace(path)


def rows_of(batch: SftBatch | None) -> list[int]:
    assert batch is not None
    return [int(sample.segments[0].token_ids[0]) - 3 for sample in batch.samples.values()]


def test_rows_that_are_being_prepared_are_waited_for(tmp_path: Path, group: RankGroup):
    path = tmp_path / "d"
    write_early(path, 40, 12)
    whole = make_sft(group, path, train_batch_per_replica=8, max_num_steps=8, epoch=2)
    expected = [rows_of(whole.poll(step, 0.0)) for step in range(8)]
    stream = [row for batch in expected for row in batch]
    assert sorted(stream[:12]) == list(range(12)), "those that are there come first"
    assert sorted(stream[:40]) == list(range(40))
    assert sorted(stream[40:52]) != list(range(12)), "in the first pass alone"
    write_early(path, 40, 12, unfinished=True)
    begun = make_sft(group, path, train_batch_per_replica=8, max_num_steps=8, epoch=2)
    assert rows_of(begun.poll(0, 0.0)) == expected[0]
    assert begun.poll(1, 0.0) is None, "half of its rows are missing"
    preparation = threading.Timer(0.2, write_early, (path, 40, 12))
    preparation.start()
    assert rows_of(begun.poll(1, 100.0)) == expected[1]
    preparation.join()
    assert [rows_of(begun.poll(step, 0.0)) for step in range(2, 8)] == expected[2:]


def test_a_file_that_cannot_be_read_for_long_ends_the_wait(
    tmp_path: Path, group: RankGroup, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "d"
    write_early(path, 40, 12, unfinished=True)
    monkeypatch.setattr("policy_worker.training.sft.LOOK_S", 0.01)
    algorithm = make_sft(group, path, train_batch_per_replica=8, max_num_steps=8)
    path.write_bytes(b"damaged")
    assert algorithm.poll(1, 0.1) is None, "for a moment"
    monkeypatch.setattr("policy_worker.training.sft.FOLLOWS_S", 0.1)
    with pytest.raises(SettingsError, match="cannot read its data"):
        algorithm.poll(1, 60.0)
    write_early(path, 40, 12, unfinished=True)
    algorithm = make_sft(group, path, train_batch_per_replica=8, max_num_steps=8)
    write_early(path, 40, 10)
    with pytest.raises(SettingsError, match="has other rows than those that the job began with"):
        algorithm.poll(1, 60.0)


def test_epochs_are_counted_by_the_rows_that_there_are(tmp_path: Path, group: RankGroup):
    path = tmp_path / "d"
    write_early(path, 40, 16, unfinished=True)
    saves = {"enable_checkpoint": True, "save_freq": 1000, "save_freq_in_epoch": 1, "export_safetensors": False}
    train = {"ckpt": saves, "train_batch_per_replica": 8, "epoch": 2, "max_num_steps": 10}
    config = sft_config(None, train, launcher={"export_final": False})
    reply = RegisterReply.model_construct(
        mode="sft", data_file=str(path), run_dir=str(tmp_path), timeline=0, committed_steps=0
    )
    trainer = Trainer(tiny_model(), config, group, Schedule(10))
    checkpointer = Checkpointer(Registration(config, reply, trainer, None, ShutdownRequest()))
    assert not [step for step in (1, 2) if checkpointer.due(step, last=False)], "16 of the 16 rows that there are"
    write_early(path, 40, 16)
    assert [step for step in range(3, 11) if checkpointer.due(step, last=False)] == [5, 10]


def validating(group: RankGroup, path: Path, validation: dict[str, Any], total: int = 100, **train: Any) -> Sft:
    config = sft_config({"mini_batch": 3}, train, validation={"enable": True, **validation})
    trainer = Trainer(tiny_model(packed=config.train.sequence_packing), config, group, Schedule(100))
    return Sft(config, trainer, path / "d", HeldOut(config, trainer, path / "held", total))


@pytest.mark.parametrize("train", [{}, {"sequence_packing": True}], ids=str)
@pytest.mark.parametrize("validation", [{}, {"batch_size": 4}], ids=str)
def test_validation_is_the_mean_over_held_out_tokens(tmp_path: Path, group: RankGroup, validation: Any, train: Any):
    write_rows(tmp_path / "d", seed=1)
    rows = write_rows(tmp_path / "held", 7, seed=2)
    algorithm = validating(group, tmp_path, {"freq": 2, **validation}, total=3, epoch=3, **train)
    train_step(algorithm, 0)
    (record,) = algorithm.validations
    loss, accuracy = naive_loss(rows)
    assert (record.version, record.samples) == (0, 7), "before the first step, with the initial weights"
    assert record.loss == pytest.approx(loss, rel=1e-5)
    assert record.accuracy == pytest.approx(accuracy)
    assert record.response_tokens_mean == pytest.approx(sum(sum(mask[1:]) for _, mask in rows) / 7)
    found = []
    for step in (1, 2):
        train_step(algorithm, step)
        found += [(record.version, record.loss) for record in algorithm.validations]
    assert [version for version, _ in found] == [2, 3], "every second one, and the last"
    assert found[0][1] != record.loss


def test_validation_changes_nothing_and_comes_out_the_same_again(tmp_path: Path, group: RankGroup):
    write_rows(tmp_path / "d", seed=1)
    write_rows(tmp_path / "held", seed=2)
    plain = make_sft(group, tmp_path / "d", {"mini_batch": 3})
    twice = [validating(group, tmp_path, {"freq": 1, "before": False}) for _ in range(2)]
    expected = train_step(plain, 0)
    records = []
    for algorithm in twice:
        assert train_step(algorithm, 0) == expected
        records += [record.model_copy(update={"at": 0.0}) for record in algorithm.validations]
    assert [record.version for record in records] == [1, 1]
    assert records[0] == records[1]


def test_held_out_rows_without_a_token_to_learn_are_refused(tmp_path: Path, group: RankGroup):
    write_rows(tmp_path / "d")
    write_prompts(tmp_path / "held", [[5, 6, 7]] * 2, [{}] * 2, [[1, 0, 0]] * 2)
    with pytest.raises(SettingsError, match=r"validation: no conversation in .* has a token to learn"):
        validating(group, tmp_path, {})
