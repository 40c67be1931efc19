"""Frames, bundles, samples, batches, prompt files and weight manifests, spoiled in every way that is cheap to try.

    python -m tests.security.fuzz_frames                            100,000 spoiled inputs, progress on stderr
    python -m tests.security.fuzz_frames --examples 2000 --seed 7

Each input begins as a valid one; its JSON header, its length or its bytes are changed (truncated, absurd lengths and
ranges, duplicate keys, NaN and 1e400, booleans for integers, nesting without end, types and shapes that do not fit,
text that is not UTF-8, entries by the thousand) and every reader gets it. A reader answers, or refuses with its own
error; never with another one, and never by taking memory for what is not there. Exit code 1 with the input otherwise.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from schema.wire.batch import StepTable, decode_batch, encode_batch
from schema.wire.frame import FrameError, decode_frame, pack_bundle, read_header, unpack_bundle
from schema.wire.prompts import PromptFile, PromptFileError, write_prompts
from schema.wire.sample import Sample, SampleHeader, decode_sample, encode_sample, read_sample_metadata
from schema.wire.weights import WeightManifest

MOST_MEMORY = 400 * 1024 * 1024
"""Bytes by which the process may grow: inputs have some kilobytes, no header is above 16 MiB."""
REPORT_EVERY_S = 10.0


# ---- valid material -------------------------------------------------------------------------------------------


@cache
def sample(index: int = 0) -> bytes:
    """One sample of five tokens."""
    header = SampleHeader(
        index=index, prompt_tokens=2, response_tokens=3, total_tokens=5, oldest_version=1, newest_version=2,
        finish_reason="stop", rewards={"a": 0.5}, score=0.5,
    )  # fmt: skip
    return encode_sample(
        Sample(
            header=header,
            token_ids=np.arange(5, dtype=np.int32),
            loss_mask=np.array([0, 0, 1, 1, 1], np.uint8),
            logprobs=np.array([0, 0, -1, -2, -0.5], np.float32),
            version_starts=np.array([0, 2, 4], np.int32),
            version_values=np.array([-1, 1, 2], np.int32),
            text="three words here",
        )
    )


@cache
def batch() -> bytes:
    """Two groups of one sample each."""
    names = "index prompt_tokens response_tokens total_tokens oldest_version newest_version"
    columns: dict[str, Any] = {name: [0, 0] for name in names.split()}
    table = StepTable(
        step=1, timeline=0, policy_epoch=1, group_ids=["a", "b"], group=[0, 1], score=[0.5, None],
        rewards={"r": [0.5, None]}, finish_reason=["stop", "stop"], **columns,
    )  # fmt: skip
    return encode_batch(table, [sample(), sample(1)])


@cache
def bundle() -> bytes:
    """Two samples with their list of pushes."""
    pushes = {"replica_id": "r", "pushes": [{"group_id": "g", "lease_id": "l", "index": i} for i in range(2)]}
    return pack_bundle([sample(), sample(1)], {"pushes": json.dumps(pushes)})


@cache
def prompts() -> bytes:
    """A prompt file of three rows with loss masks."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "p.safetensors"
        write_prompts(path, [[1, 2], [3], [4, 5, 6]], [{"a": i} for i in range(3)], [[1, 1], [0], [0, 1, 1]])
        return path.read_bytes()


@cache
def manifest() -> bytes:
    """A weight manifest of two tensors in one file."""
    tensor = {"dtype": "F32", "shape": [2, 3], "file": "00000.safetensors", "hash": "0" * 32}
    files = [{"name": "00000.safetensors", "n_bytes": 48, "hash": "1" * 32}]
    tensors = {"a": tensor, "b": {**tensor, "shape": []}}
    data = {"version": 1, "timeline": 0, "files": files, "tensors": tensors, "content_hash": "2" * 32}
    return json.dumps(data).encode()


# ---- readers --------------------------------------------------------------------------------------------------


def _read_prompts(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(data)
        file.flush()
        found = PromptFile(Path(file.name))
        assert len(found.lengths()) == len(found)
        for i in range(min(len(found), 8)):
            found.token_ids(i)
            found.row(i)
            if found._loss_mask is not None:
                found.loss_mask(i)


def _read_bundle(data: bytes) -> None:
    frames, metadata = unpack_bundle(data)
    assert sum(map(len, frames)) <= len(data)
    assert all(isinstance(text, str) for text in metadata.values())


def _read_sample(data: bytes) -> None:
    found = decode_sample(data)
    assert found.header.total_tokens == len(found.token_ids) == len(found.token_versions())


def _read_header(data: bytes) -> None:
    header = read_header(data)
    assert all(0 <= e.start <= e.end <= len(data) - header.body for e in header.entries.values())


@dataclass(frozen=True)
class Reader:
    """One reader, a valid input of its, and how it refuses."""

    valid: Callable[[], bytes]
    read: Callable[[bytes], object]
    refuses: type[Exception]


READERS = {
    "header": Reader(sample, _read_header, FrameError),
    "frame": Reader(sample, decode_frame, FrameError),
    "sample": Reader(sample, _read_sample, FrameError),
    "sample header": Reader(sample, read_sample_metadata, FrameError),
    "bundle": Reader(bundle, _read_bundle, FrameError),
    "batch": Reader(batch, decode_batch, FrameError),
    "prompts": Reader(prompts, _read_prompts, PromptFileError),
    "manifest": Reader(manifest, WeightManifest.model_validate_json, ValidationError),
}

# ---- how inputs are spoiled -----------------------------------------------------------------------------------

ODD = [
    "null", "true", "false", "NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1.5", "-1", "0", "-0", "1e3",
    "9" * 40, "9" * 5000, "2147483648", "9007199254740993", "18446744073709551616", '""', '"x"', '"\\ud800"',
    '"\\u0000"', "[]", "{}", "[[[]]]", "[0]", "[-1]", "[0,0]", "[1,0]", "[true,true]", "[0.0,1.0]", "[0,1e400]",
    "[0,18446744073709551616]", "[4294967296,4294967296]", "[0,9223372036854775807]", '"F64"', '"BF16"', '"BOOL"',
    '"F8_E4M3"', '"I8"', '"U64"', '"U8"', '"I32"', '"F32"', '"\\u202e../../x"', "[" * 300 + "]" * 300, "[" * 100_000,
    '{"a":' * 300 + "1" + "}" * 300,
]  # fmt: skip
LENGTHS = [0, 1, 7, 8, 2**16, 2**24, 2**24 + 1, 2**31, 2**32, 2**63, 2**64 - 1]


class _Raw(str):
    """JSON text that stands as it is."""


def _dump(value: Any) -> str:
    """JSON in which `_Raw` stands as it is, and a list of pairs is an object: keys may come twice."""
    if isinstance(value, _Raw):
        return str(value)
    if isinstance(value, tuple):
        return "{" + ",".join(f"{json.dumps(key)}:{_dump(item)}" for key, item in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_dump, value)) + "]"
    return json.dumps(value)


def _places(value: Any, path: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    if not isinstance(value, list | tuple):
        return [path]
    items = [item[1] if isinstance(value, tuple) else item for item in value]
    return [path, *(place for i, item in enumerate(items) for place in _places(item, (*path, i)))]


def _changed(value: Any, path: tuple[int, ...], change: Callable[[Any], Any]) -> Any:
    if not path:
        return change(value)
    i, rest = path[0], path[1:]
    items = list(value)
    items[i] = (
        (items[i][0], _changed(items[i][1], rest, change))
        if isinstance(value, tuple)
        else _changed(items[i], rest, change)
    )
    return tuple(items) if isinstance(value, tuple) else items


@st.composite
def spoiled_json(draw: st.DrawFn, text: str) -> bytes:
    """A JSON text with some of its values, keys or members changed; values that are JSON texts themselves, too."""
    try:
        data = json.loads(text, object_pairs_hook=tuple)
    except (ValueError, RecursionError):  # it was spoiled before
        return draw(spoiled_bytes(text.encode("utf-8", "surrogatepass")))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(_places(data)))
        kind = draw(st.integers(0, 5))

        def change(value: Any, kind: int = kind) -> Any:
            if kind == 0 and isinstance(value, tuple | list) and value:
                return type(value)([*value, draw(st.sampled_from(value))])  # twice, or one too many
            if kind == 1 and isinstance(value, tuple | list) and value:
                return type(value)(list(value)[1:])
            if kind == 2 and isinstance(value, tuple):
                return (*value, (draw(st.text(max_size=8)), _Raw(draw(st.sampled_from(ODD)))))
            if kind == 3 and isinstance(value, str) and not isinstance(value, _Raw) and value[:1] == "{":
                return draw(spoiled_json(value)).decode(errors="replace")
            if kind == 4 and isinstance(value, int) and not isinstance(value, bool):
                return value + draw(st.sampled_from([-8, -1, 1, 4, 2**31, 2**62]))
            return _Raw(draw(st.sampled_from(ODD)))

        data = _changed(data, place, change)
    return _dump(data).encode("utf-8", "surrogatepass")


@st.composite
def spoiled_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """Truncated, lengthened, or with some bytes changed; of a frame often its length field."""
    found = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.integers(0, 4))
        if kind == 0:
            del found[draw(st.integers(0, len(found))) :]
        elif kind == 1:
            found += draw(st.binary(min_size=1, max_size=16))
        elif kind == 2 and len(found) >= 8:
            near = min(2**64 - 10, int.from_bytes(found[:8], "little")) + draw(st.integers(-9, 9))
            value = draw(st.sampled_from([*LENGTHS, max(0, near)]))
            found[:8] = value.to_bytes(8, "little")
        elif found:
            at = draw(st.integers(0, len(found) - 1))
            found[at : at + 4] = draw(st.binary(max_size=4))
    return bytes(found)


@st.composite
def spoiled(draw: st.DrawFn, name: str) -> bytes:
    """An input of one reader."""
    data = READERS[name].valid()
    kind = draw(st.integers(0, 7))
    if name == "manifest":
        return draw(spoiled_json(data.decode())) if kind else draw(spoiled_bytes(data))
    length = int.from_bytes(data[:8], "little")
    text, body = data[8 : 8 + length].decode(), data[8 + length :]
    if kind == 0:
        return draw(spoiled_bytes(data))
    if kind == 1:  # thousands of entries over the same bytes, or of none
        many = {str(i): {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(5000)}
        header = json.dumps({"__metadata__": {}, **many}).encode()
    elif kind == 2:  # tensor bytes of any value: versions, masks and offsets among them
        value = st.sampled_from([0, 1, -1, 2**31 - 1, -(2**31), 7])
        values = draw(st.lists(value, min_size=1, max_size=len(body) // 4 + 1))
        raw = np.array(values, np.int32).tobytes()
        at = draw(st.integers(0, len(body)))
        return data[: 8 + length] + (body[:at] + raw + body[at:])[: len(body)]
    else:
        header = draw(spoiled_json(text))
    return len(header).to_bytes(8, "little") + header + body


# ---- running --------------------------------------------------------------------------------------------------


def check(name: str, data: bytes) -> bool:
    """Give an input to a reader; whether it was taken. Anything but its own refusal is raised."""
    reader = READERS[name]
    try:
        reader.read(data)
    except reader.refuses:
        return False
    return True


def _spoil(name: str, examples: int, number: int, note: Callable[[str, bytes], None]) -> None:
    @seed(number)
    @settings(
        max_examples=examples, database=None, deadline=None, phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(data=spoiled(name))
    def once(data: bytes) -> None:
        note(name, data)

    once()


def run(examples: int, number: int, quiet: bool = True) -> Counter[str]:
    """Spoil `examples` inputs in all; counts what was taken and what was refused."""
    seen: Counter[str] = Counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    said = time.monotonic()

    def note(name: str, data: bytes) -> None:
        nonlocal said
        seen["taken" if check(name, data) else "refused"] += 1
        if not quiet and time.monotonic() - said > REPORT_EVERY_S:
            said = time.monotonic()
            print(f"{sum(seen.values())} inputs, at {name}: {dict(seen)}", file=sys.stderr)

    for name, reader in READERS.items():
        assert check(name, reader.valid()), f"the valid {name} is refused"
        _spoil(name, -(-examples // len(READERS)), number, note)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    assert grown < MOST_MEMORY, f"the process grew by {grown / 1e6:.0f} MB"
    return seen


def main() -> int:
    """Fuzz for as long as asked; 0 when nothing was found."""
    parser = argparse.ArgumentParser(description="spoil frames and see what their readers do")
    parser.add_argument("--examples", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    found = parser.parse_args()
    seen = run(found.examples, found.seed, quiet=False)
    print(f"{sum(seen.values())} inputs, nothing found: {dict(seen)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
