from __future__ import annotations

import numpy as np
import pytest
import torch

from policy_worker.errors import BadBatchError, SettingsError
from policy_worker.model.attention import Block, Blocks
from policy_worker.model.micro_batch import BatchLayout, MicroBatch, Segment, TrainSample, collate
from schema.wire.sample import Sample
from tests.policy_worker.material import make_sample, tiny_model
from tests.support.devices import DEVICE, rounding


def sample_of(*segments: tuple[list[int], list[int]]) -> TrainSample:
    return TrainSample(
        [
            Segment(np.array(ids, np.int32), np.array(mask, np.uint8), -np.arange(len(ids), dtype=np.float32))
            for ids, mask in segments
        ]
    )


LONG = sample_of(([11, 12, 13, 14], [0, 0, 1, 1]))
SHORT = sample_of(([21, 22], [0, 1]))
TWO = sample_of(([31, 32, 33], [0, 1, 0]), ([41, 42, 43], [0, 0, 1]))


def test_padded_rows():
    batch = collate([LONG, SHORT], [7, 3], BatchLayout(False, 61))
    assert batch.input_ids.tolist() == [[11, 12, 13], [21, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert batch.index.tolist() == [1, 2, 3]  # positions 1 and 2 of the first row, 0 of the second
    assert batch.labels.tolist() == [13, 14, 22]
    assert batch.old_logprobs.tolist() == [-2.0, -3.0, -1.0]
    assert batch.sample.tolist() == [0, 0, 1]
    assert batch.rows == [7, 3]


def test_packed_row_with_several_segments():
    batch = collate([LONG, TWO], [0, 1], BatchLayout(True, 61))
    assert batch.input_ids.tolist() == [[11, 12, 13, 31, 32, 41, 42]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1]]
    assert batch.index.tolist() == [1, 2, 3, 6]
    assert batch.labels.tolist() == [13, 14, 32, 43]
    assert batch.sample.tolist() == [0, 0, 1, 1]


def test_a_prompt_is_there_once():
    samples = [
        sample_of(([11, 12, 13, 14], [0, 0, 1, 1])),
        sample_of(([21, 22], [0, 1])),
        sample_of(([11, 12, 15, 16, 17, 18], [0, 0, 1, 0, 1, 1])),
        sample_of(([11, 12, 19], [0, 0, 1])),
    ]
    batch = collate(samples, [0, 1, 2, 3], BatchLayout(False, 61, least_spared=0.05))
    assert batch.input_ids.tolist() == [[11, 12, 15, 16, 17, 13, 21]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 2, 0]]
    assert batch.labels.tolist() == [13, 14, 22, 15, 17, 18, 19]
    assert batch.index.tolist() == [1, 5, 6, 1, 3, 4, 1], "the last token of the prompt predicts three"
    assert batch.sample.tolist() == [0, 0, 1, 2, 2, 2, 3]
    shared, alone = batch.blocks
    assert (shared, alone) == (Block(0, 2, (3, 1, 0)), Block(6, 0, (1,)))
    own, back = Blocks(batch.blocks).padded(shared, torch.device("cpu"))
    assert own.reshape(3, 3).tolist() == [[2, 3, 4], [5, 0, 0], [0, 0, 0]]
    assert back.tolist() == [0, 1, 2, 3]
    assert batch.starts.tolist() == [[0, 2, 5, 6, 7], [0, 2, 7, 10, 11]], "prompt, its samples, the one alone"
    plain = collate(samples[:2], [0, 1], BatchLayout(False, 61, least_spared=0.05))
    assert plain.input_ids.shape == (2, 3), "nothing is shared, so nothing is gained by one row"


def test_an_empty_micro_batch_predicts_nothing():
    for packed, shares in ((False, False), (True, False), (True, True)):
        batch = collate([], [], BatchLayout(packed, 61, least_spared=0.05 if shares else None))
        assert batch.input_ids.shape == batch.position_ids.shape == (1, 1)
        assert batch.index.shape == batch.labels.shape == (0,)
        assert batch.n_samples == 0


def test_several_segments_need_packing():
    with pytest.raises(SettingsError, match="sequence_packing"):
        collate([TWO], [0], BatchLayout(False, 61))


@pytest.mark.parametrize("bad", [61, -1])
def test_token_ids_that_the_model_does_not_know(bad: int):
    with pytest.raises(SettingsError, match=r"embeddings for 0 to 60.*tokenizer of another model"):
        collate([sample_of(([3, bad], [0, 1]))], [0], BatchLayout(False, 61))


def test_a_generated_token_needs_a_predecessor():
    sample = make_sample(0, [5], [6, 7], [-1.0, -1.0], 1.0)
    assert TrainSample.of_wire(sample).learned_tokens == 2
    sample.loss_mask[0] = 1
    with pytest.raises(BadBatchError, match="begins with a generated token"):
        TrainSample.of_wire(sample)


def test_a_sample_is_cut_at_its_segments():
    sample = make_sample(0, [5, 6], [7, 8, 9], [-0.5, -0.25, -0.125], 1.0)
    two = Sample(
        sample.header, sample.token_ids, np.array([0, 0, 1, 0, 1], np.uint8), sample.logprobs,
        sample.version_starts, sample.version_values, np.array([0, 3], np.int32),
    )  # fmt: skip
    cut = TrainSample.of_wire(two)
    assert [segment.token_ids.tolist() for segment in cut.segments] == [[5, 6, 7], [8, 9]]
    assert [segment.loss_mask.tolist() for segment in cut.segments] == [[0, 0, 1], [0, 1]]
    assert cut.segments[1].logprobs.tolist() == [-0.25, -0.125]
    assert cut.earned is None


def test_what_a_token_earned_is_taken_from_the_last_one():
    sample = make_sample(0, [5, 6], [7, 8, 9], [-0.5, -0.25, -0.125], 1.0)
    sample.loss_mask[3] = 0  # of a tool
    sample.part_positions, sample.part_values = np.array([2], np.int32), np.array([0.75], np.float32)
    earned = TrainSample.of_wire(sample).earned
    assert earned is not None
    assert earned.tolist() == [0.75, -0.75]


def test_learned_tokens_are_counted_by_the_version_that_made_them():
    """Tokens of tools lie inside a run and are not learned; runs of one version may lie apart, across segments."""
    sample = make_sample(0, [5, 6], [7, 8, 9, 10, 11, 12], [-1.0] * 6, 1.0)
    mixed = Sample(
        sample.header, sample.token_ids, np.array([0, 0, 1, 0, 1, 0, 1, 1], np.uint8), sample.logprobs,
        np.array([0, 2, 4, 7], np.int32), np.array([-1, 4, 6, 4], np.int32), np.array([0, 5], np.int32),
    )  # fmt: skip
    cut = TrainSample.of_wire(mixed)
    assert cut.tokens_by_version == {4: 2, 6: 2}
    assert sum(cut.tokens_by_version.values()) == cut.learned_tokens


@pytest.mark.parametrize(("packed", "shares"), [(False, False), (True, False), (False, True), (True, True)])
def test_tokens_see_only_their_own_sequence(packed: bool, shares: bool):
    """Log-probs of a sample are the same alone and in company, up to rounding."""
    model, layout = (tiny_model(packed=packed).to(DEVICE), BatchLayout(packed, 61, DEVICE, 0.05 if shares else None))
    rng = np.random.default_rng(0)
    prompt = [5, 6, 7, 8]
    samples = [
        sample_of(([*prompt[: 4 - n % 2], *rng.integers(3, 60, n).tolist()], [0] * (4 - n % 2) + [1] * n))
        for n in (8, 4, 1, 17, 5, 2)
    ]

    def logprobs(batch: MicroBatch) -> torch.Tensor:
        with torch.no_grad():
            return model(batch).logprobs

    batch = collate(samples, range(6), layout)
    assert max((block.shared for block in batch.blocks), default=0) == (4 if shares else 0)
    together = logprobs(batch)
    alone = torch.cat([logprobs(collate([sample], [0], layout)) for sample in samples])
    torch.testing.assert_close(together, alone, rtol=0, atol=rounding(5e-6))


@pytest.mark.parametrize("pieces", [2, 3, 8])
@pytest.mark.parametrize("layout", [(False, None), (True, None), (False, 0.05)], ids=["padded", "packed", "shared"])
def test_each_piece_of_the_rows_predicts_its_tokens(layout: tuple[bool, float | None], pieces: int):
    samples = [
        sample_of(([11, 12, 13, 14], [0, 0, 1, 1])),
        sample_of(([21, 22], [0, 1])),
        sample_of(([11, 12, 15, 16, 17, 18], [0, 0, 1, 0, 1, 1])),
    ]
    packed, spared = layout
    whole = collate(samples, [0, 1, 2], BatchLayout(packed, 61, least_spared=spared))
    of_whole = whole.input_ids.reshape(-1)[whole.index].tolist()
    seen: list[int] = []
    for piece in range(pieces):
        batch = collate(samples, [0, 1, 2], BatchLayout(packed, 61, least_spared=spared, pieces=pieces, piece=piece))
        length = batch.input_ids.shape[1]
        assert length % pieces == 0
        assert length - whole.input_ids.shape[1] in range(pieces), "no longer than need be"
        assert torch.equal(batch.input_ids[:, : whole.input_ids.shape[1]], whole.input_ids)
        own = batch.input_ids.chunk(pieces, 1)[piece].reshape(-1)
        tokens = batch.of_piece(torch.arange(len(batch.labels)))
        assert own[batch.of_piece(batch.index)].tolist() == [of_whole[token] for token in tokens]
        assert batch.labels.tolist() == whole.labels.tolist()
        seen += tokens.tolist()
    assert sorted(seen) == list(range(len(of_whole))), "each token is of one piece"


def test_a_row_that_is_shorter_than_its_pieces_are_many():
    batch = collate([SHORT], [0], BatchLayout(True, 61, pieces=4, piece=2))
    assert batch.input_ids.tolist() == [[21, 0, 0, 0]]
    assert [len(piece) for piece in batch.pieces] == [1, 0, 0, 0]
    assert batch.of_piece(batch.labels).tolist() == []
