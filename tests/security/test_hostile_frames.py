"""What `tests.security.fuzz_frames` tries for hours, for some seconds; and what it once found, by name."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schema.wire.batch import decode_batch
from schema.wire.frame import FrameError, decode_frame, encode_frame, read_header, unpack_bundle
from schema.wire.prompts import PromptFile, PromptFileError
from schema.wire.sample import decode_sample, read_sample_metadata
from schema.wire.weights import Publication
from tests.security import fuzz_frames
from tests.support.effort import examples
from tests.support.fetched import Weights, fetch
from weight_sync import DirectoryStore, WeightError, publish
from weight_sync.layout import digest


def frame(header: str | bytes, body: bytes = b"") -> bytes:
    text = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(text)) + text + body


def entry(start: Any, end: Any, shape: Any = (0,), dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "less than a length": b"\x00" * 7,
    "a length and nothing more": struct.pack("<Q", 100),
    "a length beyond everything": struct.pack("<Q", 2**64 - 1) + b"{}",
    "a header of 16 MiB and one": frame(b" " * (16 * 1024 * 1024 + 1)),
    "no JSON": frame("hello"),
    "no object": frame("[]"),
    "no UTF-8": frame(b'{"\xff": 1}'),
    "nested without end": frame("[" * 100_000),
    "an object nested without end": frame('{"a":' * 100_000),
    "an entry that is a number": frame('{"a": 1}'),
    "an entry that is a list": frame('{"a": ["U8", [1], [0, 1]]}', b"x"),
    "an entry without a shape": frame('{"a": {"dtype": "U8", "data_offsets": [0, 1]}}', b"x"),
    "a range of three": frame(json.dumps({"a": {**entry(0, 1), "data_offsets": [0, 1, 1]}}), b"x"),
    "a negative start": frame(json.dumps({"a": entry(-1, 1)}), b"x"),
    "an end before its start": frame(json.dumps({"a": entry(1, 0)}), b"x"),
    "an end beyond the frame": frame(json.dumps({"a": entry(0, 2)}), b"x"),
    "an end beyond all frames": frame(json.dumps({"a": entry(0, 2**70)}), b"x"),
    "booleans for integers": frame(json.dumps({"a": entry(False, True)}), b"x"),
    "floats for integers": frame(json.dumps({"a": entry(0.0, 1.0)}), b"x"),
    "an infinite end": frame('{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1e400]}}', b"x"),
    "a shape of NaN": frame('{"a": {"dtype": "U8", "shape": [NaN], "data_offsets": [0, 1]}}', b"x"),
    "a negative shape": frame(json.dumps({"a": entry(0, 1, (-1,))}), b"x"),
    "a dtype that is a number": frame(json.dumps({"a": entry(0, 1, (1,), 7)}), b"x"),
    "overlapping ranges": frame(json.dumps({"a": entry(0, 2), "b": entry(1, 3)}), b"xyz"),
    "one range twice": frame(json.dumps({"a": entry(0, 2), "b": entry(0, 2)}), b"xy"),
    "a start after nothing": frame(json.dumps({"a": entry(1, 2, (1,))}), b"xy"),
    "a shape of booleans": frame(json.dumps({"a": entry(0, 1, (True,))}), b"x"),
    "a gap": frame(json.dumps({"a": entry(0, 1), "b": entry(2, 3)}), b"xyz"),
    "bytes that nobody names": frame(json.dumps({"a": entry(0, 1)}), b"xyz"),
    "metadata that is a list": frame('{"__metadata__": []}'),
    "metadata of numbers": frame('{"__metadata__": {"a": 1}}'),
    "metadata of objects": frame('{"__metadata__": {"a": {}}}'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused(name: str) -> None:
    for read in (read_header, decode_frame, unpack_bundle, decode_sample, read_sample_metadata, decode_batch):
        with pytest.raises(FrameError):
            read(HOSTILE[name])


def test_of_a_key_that_comes_twice_all_readers_see_the_same() -> None:
    twice = [f'"0": {json.dumps(entry(0, n, (n,)))}' for n in (9, 1)]
    text = "{" + ", ".join(twice) + "}"
    (found,), _ = unpack_bundle(frame(text, b"x"))
    assert bytes(found) == b"x"


def test_a_bundle_of_very_many_frames_takes_no_more_than_its_bytes() -> None:
    header = {str(i): entry(0, 0) for i in range(5_000)}
    frames, _ = unpack_bundle(frame(json.dumps(header)))
    assert len(frames) == 5_000
    assert not any(frames)


@pytest.mark.parametrize("name", ["version_starts", "segment_starts"])
def test_starts_that_wrap_around_are_refused(name: str) -> None:
    """Differences of int32 wrap: 2147483647 to -2147483648 looks like a step of one, and the last is below T."""
    from safetensors.numpy import load

    data = fuzz_frames.sample()
    header = json.loads(read_header(data).metadata["sample"])
    tensors = dict(load(data))
    tensors[name] = np.array([0, 2**31 - 1, -(2**31)], np.int32)
    header["segments"] = len(tensors["segment_starts"])
    with pytest.raises(FrameError, match=f"{name} must rise"):
        decode_sample(encode_frame(tensors, {"sample": json.dumps(header)}))


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("index", "-1"), ("index", "true"), ("index", "1e400"), ("total_tokens", "1.5"), ("score", "NaN"),
        ("score", "1e400"), ("score", "Infinity"), ("rewards", '{"a": -Infinity}'), ("oldest_version", "-2"),
        ("finish_reason", '"bored"'), ("error", json.dumps("e" * 8193)), ("unknown", "1"), ("rewards", "[" * 5000),
        ("index", str(2**53)), ("total_tokens", "9" * 400), ("newest_version", str(2**60)),
    ],
)  # fmt: skip
def test_a_hostile_sample_header_is_refused(field: str, text: str) -> None:
    header = json.loads(read_header(fuzz_frames.sample()).metadata["sample"])
    header.pop(field, None)
    body = json.dumps(header)[:-1] + f', "{field}": {text}}}'
    with pytest.raises(FrameError):
        read_sample_metadata(frame(json.dumps({"__metadata__": {"sample": body}})))


@pytest.mark.scaled
def test_spoiled_inputs_are_refused_by_name() -> None:
    tried = examples(120)
    seen = fuzz_frames.run(tried, number=1)
    assert seen["refused"] > tried * 0.6


# ---- prompt files ---------------------------------------------------------------------------------------------


def _prompts(path: Path, **changes: Any) -> Path:
    tensors: dict[str, Any] = {
        "token_ids": np.array([1, 2, 3], np.int32), "offsets": np.array([0, 2, 3]),
        "rows": np.frombuffer(b'{"a":1}{"a":2}', np.uint8), "row_ends": np.array([7, 14]),
        "loss_mask": np.array([0, 1, 1], np.uint8), **changes,
    }  # fmt: skip
    path.write_bytes(encode_frame(tensors, {"format": "cosmos-prompts-1"}))
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {"offsets": np.array([0, 2, 4])}, {"offsets": np.array([0, 2, 2])}, {"offsets": np.array([0, 3, 2])},
        {"offsets": np.array([-1, 2, 3])}, {"offsets": np.array([0, 3])}, {"offsets": np.zeros(0, np.int64)},
        {"offsets": np.array([0, 2, 3], np.float64)}, {"offsets": np.array([[0, 2, 3]])},
        {"row_ends": np.array([7, 13])}, {"row_ends": np.array([14, 7])}, {"row_ends": np.array([-1, 14])},
        {"row_ends": np.array([7, 2**40])}, {"token_ids": np.array([1, 2, 3], np.int64)},
        {"rows": np.zeros(14, np.float32)}, {"loss_mask": np.array([1], np.uint8)},
        {"loss_mask": np.zeros((3, 1), np.uint8)}, {"row_ends": np.zeros(0, np.int64)},
    ],
)  # fmt: skip
def test_a_damaged_prompt_file_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert len(PromptFile(_prompts(tmp_path / "sound"))) == 2
    with pytest.raises(PromptFileError):
        PromptFile(_prompts(tmp_path / "damaged", **changes))


@pytest.mark.parametrize("text", [b'{"a":1}[1,2,3]', b'{"a":1}\xff\xff\xff\xff\xff\xff\xff', b'{"a":1}nothing'])
def test_a_damaged_row_is_refused(tmp_path: Path, text: bytes) -> None:
    found = PromptFile(_prompts(tmp_path / "p", rows=np.frombuffer(text, np.uint8)))
    assert found.row(0) == {"a": 1}
    with pytest.raises(PromptFileError, match="row 1"):
        found.row(1)


# ---- weights --------------------------------------------------------------------------------------------------


def published(root: Path, tensors: list[tuple[str, torch.Tensor]]) -> tuple[Path, Callable[[], Weights]]:
    """The manifest of a version; and what fetches it, by the hash of whatever the manifest holds then."""
    store = DirectoryStore(root / "weights")
    made = publish(store, version=1, timeline=0, tensors=tensors, name="job")
    manifest = root / "weights" / made.uri
    manifest.chmod(0o644)

    def fetched() -> Weights:
        publication = Publication(
            id=1, version=1, timeline=0, uri=made.uri, n_bytes=made.n_bytes,
            manifest_hash=digest(manifest.read_bytes()).hex(), content_hash=made.content_hash,
        )  # fmt: skip
        return fetch(store, publication, patience=0.0)

    return manifest, fetched


@pytest.mark.scaled
def test_a_hostile_manifest_is_refused_even_if_its_hash_is_right(tmp_path: Path) -> None:
    manifest, fetched = published(tmp_path, [("a", torch.arange(6.0).reshape(2, 3)), ("b", torch.ones(1))])
    text = manifest.read_text()
    assert len(fetched()) == 2
    taken = 0

    @settings(
        max_examples=examples(30), database=None, deadline=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(data=fuzz_frames.spoiled_json(text) | st.just(text.encode()))
    def spoil(data: bytes) -> None:
        nonlocal taken
        manifest.write_bytes(data)
        try:
            fetched()
            taken += 1
        except WeightError:
            pass

    spoil()
    assert taken


@pytest.mark.parametrize("shape", [[2**31, 2**31, 2**31], [-2, -3], [0, -1], [2**63], [1] * 10_000, [6, 2**64 // 4]])
def test_an_absurd_shape_is_refused(tmp_path: Path, shape: list[int]) -> None:
    manifest, fetched = published(tmp_path, [("a", torch.ones(2, 3))])
    data = json.loads(manifest.read_text())
    data["tensors"]["a"]["shape"] = shape
    manifest.write_text(json.dumps(data))
    with pytest.raises(WeightError):
        fetched()
