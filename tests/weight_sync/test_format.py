"""`docs/weights.md` is enough: a reader that was written from it alone, and uses nothing of this project."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from schema.wire.weights import ChainLink, TensorEntry
from tests.support.effort import examples
from weight_sync.delta.codec import encode
from weight_sync.layout import tensor_bytes
from weight_sync.publishing.writer import assemble, finish, write_delta, write_full
from weight_sync.stores import DirectoryStore, version_name

BLOCK = 1 << 20
ITEMSIZE = {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2}
ITEMSIZE |= {"I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8}
ITEMSIZE |= {f"F8_{kind}": 1 for kind in ("E4M3", "E5M2", "E4M3FNUZ", "E5M2FNUZ", "E8M0")}
KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}/[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
Bits = npt.NDArray[Any]


# ---- the reader ------------------------------------------------------------------------------------------------


def tensor_hash(data: bytes, itemsize: int) -> str:
    state = xxhash.xxh3_128()
    for start in range(0, len(data), BLOCK * itemsize):
        state.update(xxhash.xxh3_128_digest(data[start : start + BLOCK * itemsize]))
    return str(state.hexdigest())


def read_plane(data: bytes, changed: int) -> bytes:
    assert len(data) <= changed
    if len(data) == 0:
        return bytes(changed)
    if len(data) == changed:
        return data
    assert zstandard.frame_content_size(data) == changed
    return bytes(zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False))


def number(planes: list[bytes]) -> list[int]:
    return [int.from_bytes(row, "little") for row in zip(*planes, strict=True)]


def overwrite(payload: bytes, target: Bits) -> int:
    """Write sparse blocks over a flat tensor; how many elements they gave."""
    at = total = 0
    for start in range(0, len(target), BLOCK):
        (head,) = struct.unpack_from("<I", payload, at)
        at += 4
        if head == 0:
            continue
        changed, width = head & 0xFFFFFF, head >> 24
        assert 1 <= width <= 3
        lengths = struct.unpack_from(f"<{width + target.itemsize}I", payload, at)
        at += 4 * len(lengths)
        planes = []
        for length in lengths:
            planes.append(read_plane(payload[at : at + length], changed))
            at += length
        position = -1
        for skip, value in zip(number(planes[:width]), number(planes[width:]), strict=True):
            position += 1 + skip
            assert position < min(BLOCK, len(target) - start)
            target[start + position] = value
        total += changed
    assert at == len(payload)
    return total


def read_version(
    root: Path, uri: str, manifest_hash: str, base: Mapping[str, tuple[Any, ...]] | None
) -> dict[str, tuple[str, list[int], str, Bits]]:
    """All tensors of one form: dtype, shape, hash, flat bits. base: the version that a delta applies to."""
    assert KEY.fullmatch(uri)
    folder, _ = uri.split("/")
    text = (root / uri).read_bytes()
    assert xxhash.xxh3_128_hexdigest(text) == manifest_hash
    manifest = json.loads(text)
    assert manifest["format"] == 2
    assert (manifest["base"] is None) == (manifest["kind"] == "full") == (base is None)
    found = {name: (dtype, shape, value, bits.copy()) for name, (dtype, shape, value, bits) in (base or {}).items()}
    assert manifest["base"] in (None, content_hash(found))
    for file in manifest["files"]:
        data = (root / folder / file["name"]).read_bytes()
        assert len(data) == file["n_bytes"]
        read_file(data, file, manifest["tensors"], found)
    for name, entry in manifest["tensors"].items():
        dtype, shape, value, bits = found[name]
        assert (dtype, shape, value) == (entry["dtype"], entry["shape"], entry["hash"])
        assert tensor_hash(bits.tobytes(), ITEMSIZE[dtype]) == value
    assert content_hash(found) == manifest["content_hash"]
    return found


def read_file(data: bytes, file: Mapping[str, Any], tensors: Mapping[str, Any], found: dict[str, Any]) -> None:
    body = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:body])
    assert header.keys() == {name for name, entry in tensors.items() if entry["file"] == file["name"]}
    state = xxhash.xxh3_128(data[:body])
    for name, place in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        entry, (start, end) = tensors[name], place["data_offsets"]
        stored, kind = data[body + start : body + end], f"<u{ITEMSIZE[entry['dtype']]}"
        if entry["changed"] is None:
            assert (place["dtype"], place["shape"]) == (entry["dtype"], entry["shape"])
            bits = np.frombuffer(stored, kind).copy()
            state.update(bytes.fromhex(tensor_hash(stored, bits.itemsize)))
        else:
            assert (place["dtype"], place["shape"]) == ("U8", [end - start])
            bits = found[name][3]
            assert overwrite(stored, bits) == entry["changed"]
            state.update(xxhash.xxh3_128_digest(stored))
        assert len(bits) == math.prod(entry["shape"])
        found[name] = (entry["dtype"], entry["shape"], entry["hash"], bits)
    assert state.hexdigest() == file["hash"]


def content_hash(tensors: Mapping[str, tuple[Any, ...]]) -> str:
    rows = [[name, *tensors[name][:3]] for name in sorted(tensors)]
    return str(xxhash.xxh3_128_hexdigest(json.dumps(rows, separators=(",", ":")).encode()))


# ---- what it reads ---------------------------------------------------------------------------------------------


def example() -> dict[str, bytes]:
    """The bytes of the worked example in the document."""
    text = (Path(__file__).parents[2] / "docs" / "weights.md").read_text()
    block = re.search(r"```\n(old .*?)```", text, re.DOTALL)
    assert block is not None
    found: dict[str, bytes] = {}
    name = ""
    for line in block[1].splitlines():
        label, rest = line[:10].strip(), line[10:]
        name = label or name
        digits = re.match(r"(?:[0-9a-f]{2} {0,2})*", rest)
        assert digits is not None
        if label or digits[0].strip():
            found[name] = found.get(name, b"") + bytes.fromhex(digits[0])
    return found


def test_the_example_of_the_document() -> None:
    bytes_of = example()
    old, new = (np.frombuffer(bytes_of[name], "<u2") for name in ("old", "new"))
    assert len(old) == len(new) == 6
    target = old.copy()
    assert overwrite(bytes_of["payload"], target) == 3
    assert target.tolist() == new.tolist()
    assert tensor_hash(new.tobytes(), 2) == bytes_of["hash"].hex()
    encoded = encode(old, new)
    assert encoded is not None
    assert b"".join(encoded.parts) == bytes_of["payload"]
    assert encoded.digest == bytes_of["hash"]


@pytest.mark.scaled
@settings(max_examples=examples(25), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([1, 3, 1000, 70_000, BLOCK + 7]),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    changes=st.sampled_from([1, 5, 300]),
)
def test_sparse_blocks(seed: int, size: int, itemsize: int, changes: int) -> None:
    generator = np.random.default_rng(seed)
    old = np.frombuffer(generator.bytes(size * itemsize), f"<u{itemsize}")
    new = old.copy()
    new[generator.integers(0, size, changes)] ^= old.dtype.type(1 << generator.integers(8 * itemsize))
    encoded = encode(old, new)
    assert encoded is not None
    assert encoded.digest.hex() == tensor_hash(new.tobytes(), itemsize)
    if encoded.changed:
        target = old.copy()
        assert overwrite(b"".join(encoded.parts), target) == encoded.changed
        assert target.tobytes() == new.tobytes()


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        'Gewichte/Größe "é" \x7f 😀': torch.randn(40, 30, generator=generator).to(torch.bfloat16),
        "large": torch.randn(BLOCK + 100, generator=generator).to(torch.float16),
        "eight": torch.randn(500, generator=generator).to(torch.float8_e4m3fn),
        "scalar": torch.randn((), generator=generator),
        "empty": torch.empty(0, 4),
        "pairs": torch.randn(30, dtype=torch.complex64, generator=generator),
        "flags": torch.rand(9, generator=generator) < 0.5,
        "same": torch.arange(10),
    }


def stepped(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Some elements of most tensors get other bits; one tensor gets all of them, one none."""
    generator, after = torch.Generator().manual_seed(seed), weights(seed)
    for name, tensor in tensors.items():
        keep = torch.rand(tensor.shape, generator=generator) > 0.02
        if name == "same":
            after[name] = tensor
        elif name not in ("pairs", "scalar"):
            raw, old = after[name].view(torch.uint8), tensor.view(torch.uint8)
            kept = keep.unsqueeze(-1).expand(*tensor.shape, tensor.itemsize).reshape(raw.shape)
            after[name] = torch.where(kept, old, raw).view(tensor.dtype)
    return after


def test_a_full_version_and_deltas(tmp_path: Path) -> None:
    """Written by two processes each, in small files; the last one leaves everything as it is."""
    store, now = DirectoryStore(tmp_path), weights(0)
    table: dict[str, TensorEntry] = {}
    links: list[ChainLink] = []
    states: list[dict[str, torch.Tensor]] = []
    for version in range(5):
        before, now = now, stepped(now, version) if 0 < version < 4 else now
        target = version_name(0, version, "job")
        names = list(now)
        with store.stage(target) as stage:
            parts = []
            for i in range(2):
                mine, options = names[i::2], {"prefix": f"rank{i}-", "max_file_bytes": 1000}
                if version == 0:
                    parts.append(write_full(stage, [(n, now[n]) for n in mine], **options))
                else:
                    parts.append(write_delta(stage, [(n, before[n], now[n]) for n in mine], **options))
            manifest = assemble(parts, version=version, timeline=0, base=table or None, chain=links)
            published = finish(stage, target, manifest)
        table |= manifest.tensors
        form = {"delta" if version else "full": published.piece}
        links.append(ChainLink(version=version, content_hash=published.content_hash, **form))
        states.append(now)

    # From the newest publication alone: its chain names everything before it.
    newest = json.loads((tmp_path / published.uri).read_bytes())
    chain = [*newest["chain"], {"full": None, "delta": published.piece.model_dump()}]
    found = None
    for link, state in zip(chain, states, strict=True):
        piece = link["full"] or link["delta"]
        found = read_version(tmp_path, piece["uri"], piece["manifest_hash"], found)
        assert found.keys() == state.keys()
        for name, tensor in state.items():
            dtype, shape, _, bits = found[name]
            assert shape == list(tensor.shape)
            assert bits.tobytes() == bytes(tensor_bytes(name, tensor)), (name, dtype)
    assert found is not None
    assert content_hash(found) == published.content_hash
    assert newest["tensors"] == {}
    kinds = {entry["changed"] is None for entry in manifest_of(tmp_path, links[1]).values()}
    assert kinds == {True, False}, "both ways to store a tensor were read"
    assert "same" not in manifest_of(tmp_path, links[1])


def manifest_of(root: Path, link: ChainLink) -> dict[str, Any]:
    assert link.delta is not None
    tensors: dict[str, Any] = json.loads((root / link.delta.uri).read_bytes())["tensors"]
    return tensors
