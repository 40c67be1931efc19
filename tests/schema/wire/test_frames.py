"""Frames, samples, batches and prepared data: exact round trips, and no input that breaks a reader."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schema.wire.batch import StepTable, decode_batch, encode_batch
from schema.wire.frame import FrameError, decode_frame, encode_frame, pack_bundle, unpack_bundle
from schema.wire.prompts import PromptFile, PromptFileError, write_prompts
from schema.wire.sample import (
    Sample,
    SampleHeader,
    decode_sample,
    encode_sample,
    header_text,
    read_sample_metadata,
    sample_seed,
)


def make_sample(**header: Any) -> Sample:
    fields: dict[str, Any] = {
        "index": 1, "prompt_tokens": 2, "response_tokens": 3, "total_tokens": 5, "oldest_version": 4,
        "newest_version": 6, "finish_reason": "stop", "rewards": {"right": 1.0}, "score": 1.0,
    }  # fmt: skip
    return Sample(
        header=SampleHeader(**{**fields, **header}),
        token_ids=np.arange(5, dtype=np.int32),
        loss_mask=np.array([0, 0, 1, 1, 1], np.uint8),
        logprobs=np.array([0, 0, -0.5, -1.0, -0.0], np.float32),
        version_starts=np.array([0, 2, 4], np.int32),
        version_values=np.array([-1, 4, 6], np.int32),
    )


def test_a_sample_survives_the_wire() -> None:
    data = encode_sample(make_sample())
    assert read_sample_metadata(data)[0] == make_sample().header
    sample = decode_sample(data)
    assert sample.token_versions().tolist() == [-1, -1, 4, 4, 6]
    assert sample.logprobs.tolist() == [0.0, 0.0, -0.5, -1.0, 0.0]
    assert sample.text is None


def test_parts_of_the_score_travel_with_the_tokens_that_earned_them() -> None:
    def parts(positions: list[int], values: list[float]) -> Sample:
        return replace(
            make_sample(), part_positions=np.array(positions, np.int32), part_values=np.array(values, np.float32)
        )

    sample = decode_sample(encode_sample(parts([2, 4], [0.5, -0.25])))
    assert (sample.part_positions.tolist(), sample.part_values.tolist()) == ([2, 4], [0.5, -0.25])
    for positions, values in (
        ([1], [0.5]), ([4, 2], [0.5, 0.5]), ([2, 2], [0.5, 0.5]), ([5], [0.5]), ([-1], [0.5]), ([2], []),
        ([2], [float("nan")]),
    ):  # fmt: skip
        with pytest.raises(FrameError, match="parts of the score"):
            decode_sample(encode_sample(parts(positions, values)))
    tensors, metadata = decode_frame(encode_sample(parts([2], [0.5])))
    del tensors["part_values"]
    with pytest.raises(FrameError, match="part_values must be a vector"):
        decode_sample(encode_frame(tensors, metadata))


def with_sets(counts: list[int], ids: list[int], held: tuple[int, ...] = ()) -> Sample:
    sets = {"kept_counts": counts, "kept_ids": ids, "held_ids": held}
    return replace(make_sample(), **{name: np.array(value, np.int32) for name, value in sets.items()})


def test_kept_sets_travel_with_the_tokens_that_were_drawn_from_them() -> None:
    sample = decode_sample(encode_sample(with_sets([2, 0, 1], [9, 2, 4], (7, 8))))
    assert (sample.kept_counts.tolist(), sample.kept_ids.tolist()) == ([2, 0, 1], [9, 2, 4])
    assert sample.held_ids.tolist() == [7, 8]
    plain, _ = decode_frame(encode_sample(make_sample()))
    assert not {"kept_counts", "kept_ids", "held_ids"} & plain.keys(), "as frames always were"
    assert not len(decode_sample(encode_sample(make_sample())).kept_counts)


@pytest.mark.parametrize(
    ("counts", "ids", "message"),
    [
        ([2, 0, 1], [9, 3, 4], r"generated token 0 is 2, which is not among the 2 ids that it was drawn from"),
        ([1, 1, 1], [2, 4, 3], "generated token 1 is 3, which is not among the 1 ids"),
        ([1, 0], [2], "must say of each generated token"),
        ([1, 0, 1], [2], "must say of each generated token"),
        ([2, 0, -1], [2], "must say of each generated token"),
        ([2**31 - 1, 2**31 - 1, 2], [], "must say of each generated token"),
        ([2, 0, 0], [2, -1], "negative ids"),
    ],
)
def test_kept_sets_that_cannot_be_are_refused(counts: list[int], ids: list[int], message: str) -> None:
    with pytest.raises(FrameError, match=message):
        decode_sample(encode_sample(with_sets(counts, ids)))


def test_negative_ids_cannot_be_held_back() -> None:
    with pytest.raises(FrameError, match="held_ids"):
        decode_sample(encode_sample(with_sets([], [], (-1,))))


def with_experts(shape: list[int], ids: Any, weights: Any = ()) -> Sample:
    found = {"expert_shape": np.array(shape, np.int32), "expert_ids": np.asarray(ids)}
    return replace(make_sample(), **found, expert_weights=np.array(weights, np.float32))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("weights", [(), np.linspace(0, 1, 24)])
def test_the_experts_that_were_chosen_travel_as_narrow_as_they_are(dtype: Any, weights: Any) -> None:
    ids = np.arange(24, dtype=dtype) + np.iinfo(dtype).max - 23
    sample = decode_sample(encode_sample(with_experts([3, 2], ids, weights)))
    assert (sample.expert_shape.tolist(), sample.expert_ids.dtype) == ([3, 2], dtype)
    assert sample.expert_ids.tolist() == ids.tolist()
    assert sample.expert_weights.tolist() == np.array(weights, np.float32).tolist()
    plain, _ = decode_frame(encode_sample(make_sample()))
    assert not {"expert_shape", "expert_ids", "expert_weights"} & plain.keys(), "as frames always were"
    assert not decode_sample(encode_sample(make_sample())).expert_ids.size


def test_experts_are_of_all_tokens_but_the_last_of_each_segment() -> None:
    two = replace(with_experts([2, 1], np.zeros(6, np.uint8)), segment_starts=np.array([0, 2], np.int32))
    two.header = make_sample(segments=2).header
    assert len(decode_sample(encode_sample(two)).expert_ids) == 6
    two.expert_ids = np.zeros(8, np.uint8)
    with pytest.raises(FrameError, match="must have 6 entries"):
        decode_sample(encode_sample(two))


NONE, EIGHT = np.zeros(0, np.uint8), np.zeros(8, np.uint8)
SHAPE, ENTRIES = ("expert_shape must be the number of mixtures", "must have {} entries, for each token but the last")


@pytest.mark.parametrize(
    ("shape", "ids", "weights", "message"),
    [
        ([2], EIGHT, (), SHAPE),
        ([2, 1, 1], EIGHT, (), SHAPE),
        ([0, 2], NONE, (), SHAPE),
        ([2, -1], EIGHT, (), SHAPE),
        ([2**31 - 1, 2**31 - 1], EIGHT, (), SHAPE),
        ([-(2**31), -(2**31)], EIGHT, (), SHAPE),
        ([2**16 + 1, 1], EIGHT, (), SHAPE),
        ([2**16, 2**16], NONE, (), ENTRIES.format(4 * 2**32)),
        ([2, 1], EIGHT[:7], (), ENTRIES.format(8)),
        ([2, 1], NONE, (), ENTRIES.format(8)),
        ([2, 1], EIGHT, [0.5] * 7, ENTRIES.format(8)),
        ([2, 1], EIGHT, [0.5] * 7 + [np.nan], "expert_weights must be finite"),
        ([2, 1], EIGHT, [0.5] * 7 + [np.inf], "expert_weights must be finite"),
    ],
)
def test_experts_that_cannot_be_are_refused(shape: list[int], ids: Any, weights: Any, message: str) -> None:
    with pytest.raises(FrameError, match=message):
        decode_sample(encode_sample(with_experts(shape, ids, weights)))


def test_experts_of_another_type_or_without_their_number_are_refused() -> None:
    def changed(**tensors: Any) -> bytes:
        found, metadata = decode_frame(encode_sample(with_experts([2, 1], EIGHT, [0.5] * 8)))
        merged = {**found, **tensors}
        return encode_frame({name: value for name, value in merged.items() if value is not None}, metadata)

    wrong = EIGHT.astype(np.int32)
    for tensors, message in (
        ({"expert_ids": wrong}, "expert_ids must be a vector of uint16 or uint8"),
        ({"expert_ids": EIGHT.reshape(4, 2)}, "expert_ids must be a vector"),
        ({"expert_ids": None}, "expert_ids must be a vector"),
        ({"expert_shape": None}, "expert_shape must be a vector of int32"),
        ({"expert_shape": None, "expert_ids": None}, SHAPE),
        ({"expert_weights": wrong}, "expert_weights must be a vector of float32"),
    ):
        with pytest.raises(FrameError, match=message):
            decode_sample(changed(**tensors))


def test_arrays_of_wider_types_are_cast_as_they_leave() -> None:
    wide = replace(make_sample(), logprobs=make_sample().logprobs.astype(np.float64))
    assert decode_sample(encode_sample(wide)).logprobs.dtype == np.float32


def test_text_travels_when_asked_for() -> None:
    sample = make_sample()
    sample.text = "drei ≠ 3 \N{SNOWMAN}"
    assert decode_sample(encode_sample(sample)).text == sample.text


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("loss_mask", np.ones(4, np.uint8), "differ in length"),
        ("loss_mask", np.array([0, 0, 1, 1, 2], np.uint8), "other than 0 and 1"),
        ("logprobs", np.array([0, 0, np.nan, 0, 0], np.float32), "finite"),
        ("logprobs", np.array([0, 0, 0.5, 0, 0], np.float32), "not above 0"),
        ("version_values", np.array([-1, -1, 6], np.int32), "no weight version"),
        ("version_values", np.array([-1, 4], np.int32), "differ in length"),
        ("version_starts", np.array([0, 4, 2], np.int32), "must rise"),
        ("version_starts", np.array([1, 2, 4], np.int32), "must rise"),
        ("segment_starts", np.array([0, 5], np.int32), "must rise"),
        ("version_values", np.array([-1, 3, 6], np.int32), "header claims"),
    ],
)
def test_arrays_that_contradict_each_other_are_refused(name: str, value: Any, message: str) -> None:
    sample = make_sample()
    setattr(sample, name, value)
    with pytest.raises(FrameError, match=message):
        decode_sample(encode_sample(sample))


def test_a_header_that_lies_is_refused() -> None:
    with pytest.raises(FrameError, match="header claims"):
        decode_sample(encode_sample(make_sample(response_tokens=2)))
    with pytest.raises(FrameError, match="neither a score nor an error"):
        decode_sample(encode_sample(make_sample(score=None)))


def test_an_empty_sample_is_refused() -> None:
    frame = encode_frame({}, {"sample": make_sample().header.model_dump_json()})
    with pytest.raises(FrameError, match="token_ids"):
        decode_sample(frame)


@given(st.lists(st.binary(max_size=40), max_size=8), st.dictionaries(st.text(), st.text(), max_size=3))
def test_bundles_return_what_was_packed(frames: list[bytes], metadata: dict[str, str]) -> None:
    views, read = unpack_bundle(pack_bundle(frames, metadata))
    assert [bytes(view) for view in views] == frames
    assert read == metadata


def test_a_bundle_is_plain_safetensors() -> None:
    tensors, metadata = decode_frame(pack_bundle([b"abc", b"", b"de"], {"k": "v"}))
    assert {name: array.tobytes() for name, array in tensors.items()} == {"0": b"abc", "1": b"", "2": b"de"}
    assert metadata == {"k": "v"}


def make_table(**columns: Any) -> StepTable:
    fields: dict[str, Any] = {
        "step": 3, "timeline": 0, "policy_epoch": 1, "group_ids": ["e0-p0"], "group": [0, 0], "index": [0, 1],
        "score": [1.0, None], "rewards": {"right": [1.0, None]}, "prompt_tokens": [2, 2],
        "response_tokens": [3, 3], "total_tokens": [5, 5], "oldest_version": [2, 3], "newest_version": [3, 3],
        "finish_reason": ["stop", "length"],
    }  # fmt: skip
    return StepTable(**{**fields, **columns})


def test_a_batch_carries_its_table_and_frames() -> None:
    table, frames = decode_batch(encode_batch(make_table(), [b"one", b"two"]))
    assert table == make_table()
    assert [bytes(frame) for frame in frames] == [b"one", b"two"]


def test_tables_and_samples_of_before_there_were_greedy_ones_are_read() -> None:
    old = make_table().model_dump(exclude={"baseline", "source"})
    table = StepTable.model_validate(old)
    assert table.sampled == [0, 1]
    marked = StepTable.model_validate({**old, "baseline": [False, True]})
    assert marked.sampled == [0]
    assert StepTable.model_validate_json(marked.model_dump_json()) == marked
    assert "baseline" not in header_text(make_sample().header), "what is not greedy travels as before"
    assert decode_sample(encode_sample(make_sample(baseline=True))).header.baseline


def test_tables_with_ragged_columns_or_unknown_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        make_table(score=[1.0])
    with pytest.raises(ValueError, match="differ in length"):
        make_table(baseline=[True])
    with pytest.raises(ValueError, match="differ in length"):
        make_table(source=["gsm8k"])
    with pytest.raises(ValueError, match="not in the table"):
        make_table(group=[0, 1])
    with pytest.raises(FrameError, match="no table"):
        decode_batch(pack_bundle([], {}))


def test_prepared_rows_are_read_at_any_position(tmp_path: Path) -> None:
    path = tmp_path / "data" / "train.safetensors"
    rows = [{"prompt": "a"}, {"prompt": "ü", "answer": 5}, {}]
    write_prompts(path, [[1, 2], [3], [4, 5, 6]], rows, [[0, 1], [1], [0, 0, 1]])
    assert [entry.name for entry in path.parent.iterdir()] == ["train.safetensors"]
    data = PromptFile(path)
    assert len(data) == 3
    assert data.lengths().tolist() == [2, 1, 3]
    assert [data.token_ids(i).tolist() for i in (2, 0, 1)] == [[4, 5, 6], [1, 2], [3]]
    assert [data.row(i) for i in range(3)] == rows
    assert data.loss_mask(2).tolist() == [0, 0, 1]


def test_prepared_data_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    path = tmp_path / "train.safetensors"
    with pytest.raises(PromptFileError, match="cannot be read"):
        PromptFile(path)
    path.write_bytes(encode_frame({"x": np.zeros(1)}, {}))
    with pytest.raises(PromptFileError, match="not prepared data"):
        PromptFile(path)
    write_prompts(path, [[1]], [{}])
    with pytest.raises(PromptFileError, match="no loss mask"):
        PromptFile(path).loss_mask(0)
    with pytest.raises(ValueError, match="without tokens"):
        write_prompts(path, [[]], [{}])
    with pytest.raises(ValueError, match="differ in length"):
        write_prompts(path, [[1]], [{}], [[1, 1]])


def test_seeds_depend_on_what_is_sampled_alone() -> None:
    seeds = {
        sample_seed(job, kind, epoch, position, index)
        for job in (0, 1)
        for kind in ("train", "validation")
        for epoch in (0, 1)
        for position in range(10)
        for index in range(8)
    }
    assert len(seeds) == 2 * 2 * 2 * 10 * 8
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert sample_seed(7, "train", 0, 3, 1) == sample_seed(7, "train", 0, 3, 1)
