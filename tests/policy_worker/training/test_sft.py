from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from policy_worker.errors import SettingsError
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.trained.lr_schedule import Schedule
from policy_worker.trained.trainer import Trainer
from policy_worker.training.batches.source import DataEnded
from policy_worker.training.sft import HeldOut, RowOrder, Sft
from schema.wire.prompts import write_prompts
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


def test_each_epoch_has_every_row_once_in_an_order_of_its_own():
    order = RowOrder(7, data_passes=3, seed=5, shuffle=True)
    epochs = [order.rows(7 * epoch, 7 * (epoch + 1)) for epoch in range(3)]
    assert [sorted(rows) for rows in epochs] == [list(range(7))] * 3
    assert len({tuple(rows) for rows in epochs}) == 3
    assert order.rows(19, 30) == epochs[2][5:]


def test_the_order_depends_on_seed_and_position_alone():
    order = RowOrder(50, 2, seed=1, shuffle=True)
    whole = order.rows(0, 100)
    assert [row for start in range(0, 100, 8) for row in RowOrder(50, 2, 1, True).rows(start, start + 8)] == whole
    assert RowOrder(50, 2, seed=2, shuffle=True).rows(0, 100) != whole
    assert RowOrder(3, 2, seed=1, shuffle=False).rows(0, 6) == [0, 1, 2, 0, 1, 2]


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
