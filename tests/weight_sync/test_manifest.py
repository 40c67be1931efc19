"""Nothing damaged, missing, swapped or outside of the store is ever handed out."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schema.wire.weights import MAX_MANIFEST_BYTES, Publication, WeightManifest
from tests.support.effort import examples
from tests.support.fetched import fetch
from tests.support.waiting import PATIENCE
from tests.weight_sync.helpers import all_bits, bits, put, small
from weight_sync import DirectoryStore, WeightError
from weight_sync.layout import digest

SHARED = [HealthCheck.function_scoped_fixture]
"""All examples of a test have one directory."""


def version_of(root: Path, publication: Publication) -> Path:
    return root / publication.uri.split("/")[0]


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, Publication]:
    return tmp_path, put(DirectoryStore(tmp_path), small(), version=3)


def rewritten(root: Path, publication: Publication, change: Callable[[dict], None]) -> Publication:
    """Someone rewrites the manifest, and a controller is made to vouch for it: consistency must catch it."""
    path = root / publication.uri
    manifest = json.loads(path.read_text())
    change(manifest)
    text = json.dumps(manifest).encode()
    path.write_bytes(text)
    return publication.model_copy(update={"manifest_hash": digest(text).hex()})


def any_file(root: Path, data: st.DataObject) -> tuple[Publication, Path]:
    """A publication in a new store, and a file of it."""
    shutil.rmtree(root, ignore_errors=True)
    publication = put(DirectoryStore(root), small(), max_file_bytes=300)
    return publication, data.draw(st.sampled_from(sorted(version_of(root, publication).iterdir())))


@pytest.mark.scaled
@settings(max_examples=examples(40), deadline=None, suppress_health_check=SHARED)
@given(data=st.data())
def test_any_flipped_bit_of_any_file_is_found(tmp_path: Path, data: st.DataObject) -> None:
    root = tmp_path / "store"
    publication, file = any_file(root, data)
    content = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(content) * 8 - 1))
    content[place // 8] ^= 1 << place % 8
    file.write_bytes(content)
    with pytest.raises(WeightError, match=file.name):
        fetch(root, publication, patience=0.0)


@pytest.mark.scaled
@settings(max_examples=examples(20), deadline=None, suppress_health_check=SHARED)
@given(data=st.data())
def test_any_torn_file_is_found(tmp_path: Path, data: st.DataObject) -> None:
    root = tmp_path / "store"
    publication, file = any_file(root, data)
    size = file.stat().st_size
    longer = data.draw(st.booleans())
    os.truncate(file, size + 1 if longer else data.draw(st.integers(0, size - 1)))
    with pytest.raises(WeightError, match=file.name):
        fetch(root, publication, patience=0.0)


def test_missing_files_are_named(stored: tuple[Path, Publication]) -> None:
    root, publication = stored
    (version_of(root, publication) / "00000.safetensors").unlink()
    with pytest.raises(WeightError, match=r"00000\.safetensors: No such file"):
        fetch(root, publication, patience=0.0)
    (root / publication.uri).unlink()
    with pytest.raises(WeightError, match=r"manifest\.json: No such file"):
        fetch(root, publication, patience=0.0)


def test_files_of_another_version_are_refused(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    one, two = put(store, small(1)), put(store, small(2))
    source = version_of(tmp_path, two) / "00000.safetensors"
    shutil.copy(source, version_of(tmp_path, one) / "00000.safetensors")
    with pytest.raises(WeightError, match="does not have the hash"):
        fetch(tmp_path, one, patience=0.0)
    shutil.copy(tmp_path / two.uri, tmp_path / one.uri)
    with pytest.raises(WeightError, match="does not have the hash that was published"):
        fetch(tmp_path, one, patience=0.0)


@pytest.mark.parametrize("field", ["version", "timeline", "content_hash", "n_bytes"])
def test_a_publication_that_promises_something_else(stored: tuple[Path, Publication], field: str) -> None:
    root, publication = stored
    other: dict[str, object] = {"version": 4, "timeline": 1, "content_hash": "0" * 32, "n_bytes": 1}
    with pytest.raises(WeightError, match="published was"):
        fetch(root, publication.model_copy(update={field: other[field]}), patience=30.0)


@pytest.mark.parametrize(
    "uri",
    [
        "../outside/manifest.json", "/etc/passwd", "a/../../b", "manifest.json", "a/b/c", "", "/", "a/",
        ".tmp-1/manifest.json", "..", "../..", "a\0b/c", "a//manifest.json", "a/.hidden",
    ],
)  # fmt: skip
def test_uris_that_leave_the_store(stored: tuple[Path, Publication], uri: str) -> None:
    root, publication = stored
    with pytest.raises(WeightError, match="not a key of a weight store"):
        fetch(root / "x", publication.model_copy(update={"uri": uri}), patience=30.0)


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", ".hidden", "sub/file", "a\\b", ""])
def test_file_names_in_a_manifest_that_leave_the_store(stored: tuple[Path, Publication], name: str) -> None:
    root, publication = stored

    def change(manifest: dict) -> None:
        manifest["files"][0]["name"] = name
        for entry in manifest["tensors"].values():
            entry["file"] = name

    with pytest.raises(WeightError, match=r"not a manifest that this build reads"):
        fetch(root, rewritten(root, publication, change), patience=30.0)


def test_links_are_not_followed(stored: tuple[Path, Publication], tmp_path: Path) -> None:
    root, publication = stored
    version = version_of(root, publication)
    outside = tmp_path / "outside"
    version.rename(outside)
    version.symlink_to(outside)
    with pytest.raises(WeightError):
        fetch(root, publication, patience=0.0)
    version.unlink()
    version.mkdir()
    for file in outside.iterdir():
        (version / file.name).symlink_to(file)
    with pytest.raises(WeightError, match=r"manifest\.json"):
        fetch(root, publication, patience=0.0)


def test_a_pipe_instead_of_a_file_does_not_block(stored: tuple[Path, Publication]) -> None:
    root, publication = stored
    (root / publication.uri).unlink()
    os.mkfifo(root / publication.uri)
    with pytest.raises(WeightError, match="not a regular file"):
        fetch(root, publication, patience=30.0)


LIES: dict[str, Callable[[dict], None]] = {
    "shape": lambda m: m["tensors"]["embed.weight"].update(shape=[8, 50]),
    "dtype": lambda m: m["tensors"]["embed.weight"].update(dtype="F16"),
    "unknown dtype": lambda m: m["tensors"]["embed.weight"].update(dtype="F7"),
    "negative shape": lambda m: m["tensors"]["embed.weight"].update(shape=[-50, -8]),
    "endless shape": lambda m: m["tensors"]["embed.weight"].update(shape=[0, 2**62, 2**62]),
    "hash": lambda m: m["tensors"]["embed.weight"].update(hash="0" * 32),
    "file": lambda m: m["tensors"]["embed.weight"].update(file="other.safetensors"),
    "missing tensor": lambda m: m["tensors"].pop("embed.weight"),
    "additional tensor": lambda m: m["tensors"].update(more=m["tensors"]["embed.weight"]),
    "file twice": lambda m: m["files"].append(m["files"][0]),
    "no files": lambda m: m.update(files=[], tensors={}),
    "format": lambda m: m.update(format=3),
    "kind": lambda m: m.update(kind="delta"),
    "unknown field": lambda m: m.update(surprise=1),
    "unknown field of a tensor": lambda m: m["tensors"]["embed.weight"].update(surprise=1),
    "unknown field of a file": lambda m: m["files"][0].update(surprise=1),
    "absent field": lambda m: m.pop("version"),
    "absent field of a tensor": lambda m: m["tensors"]["embed.weight"].pop("file"),
    "number as text": lambda m: m.update(version="3"),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("consistent", [False, True])
def test_manifests_that_contradict_themselves_or_their_files(
    stored: tuple[Path, Publication], lie: str, consistent: bool
) -> None:
    """Even when the content hash and the publication are made to agree with the lie."""
    root, publication = stored
    agreed: dict[str, object] = {}

    def change(manifest: dict) -> None:
        LIES[lie](manifest)
        if consistent:
            rows = [[n, e["dtype"], e["shape"], e["hash"]] for n, e in sorted(manifest["tensors"].items())]
            manifest["content_hash"] = digest(json.dumps(rows, separators=(",", ":")).encode()).hex()
            agreed["content_hash"] = manifest["content_hash"]
            agreed["n_bytes"] = sum(file["n_bytes"] for file in manifest["files"])

    changed = rewritten(root, publication, change)
    with pytest.raises(WeightError):
        fetch(root, changed.model_copy(update=agreed), patience=0.0)


def test_a_manifest_beyond_its_bound(stored: tuple[Path, Publication]) -> None:
    root, publication = stored
    with (root / publication.uri).open("r+b") as file:
        file.truncate(MAX_MANIFEST_BYTES + 1)
    with pytest.raises(WeightError, match="a manifest has at most"):
        fetch(root, publication, patience=30.0)


def test_of_a_field_that_stands_twice_the_last_counts(stored: tuple[Path, Publication]) -> None:
    root, publication = stored
    path = root / publication.uri
    text = path.read_bytes().replace(b'"version":', b'"version":9,"version":', 1)
    path.write_bytes(text)
    changed = publication.model_copy(update={"manifest_hash": digest(text).hex()})
    assert fetch(root, changed, patience=0.0).manifest.version == publication.version


def test_files_that_appear_late_are_waited_for(tmp_path: Path) -> None:
    """As on a shared file system: first nothing, then a short file, then the right one."""
    store = DirectoryStore(tmp_path / "there")
    publication = put(store, small())
    version = version_of(tmp_path / "there", publication)
    here = tmp_path / "here" / version.name
    content = (version / "00000.safetensors").read_bytes()

    def appear() -> None:
        time.sleep(0.05)
        here.mkdir(parents=True)
        time.sleep(0.05)
        shutil.copy(version / "manifest.json", here)
        (here / "00000.safetensors").write_bytes(content[: len(content) // 2])
        time.sleep(0.05)
        (here / "00000.safetensors").write_bytes(content)

    thread = threading.Thread(target=appear)
    thread.start()
    found = fetch(tmp_path / "here", publication, patience=PATIENCE)
    thread.join()
    assert all_bits(found.tensors()) == all_bits(small())


def test_waiting_ends(tmp_path: Path) -> None:
    publication = put(DirectoryStore(tmp_path / "there"), small())
    with pytest.raises(WeightError, match="No such file"):
        fetch(tmp_path / "nowhere", publication, patience=0.2)


def test_manifest_says_what_is_stored(stored: tuple[Path, Publication]) -> None:
    root, publication = stored
    manifest = WeightManifest.model_validate_json((root / publication.uri).read_bytes())
    assert (manifest.version, manifest.timeline, manifest.kind) == (3, 0, "full")
    assert set(manifest.tensors) == set(small())
    assert manifest.tensors["embed.weight"].shape == [50, 8]
    assert manifest.tensors["embed.weight"].hash == digest(digest(bits(small()["embed.weight"]))).hex()


def test_misaligned_tensors_are_usable(tmp_path: Path) -> None:
    odd = {"bytes": torch.arange(3, dtype=torch.uint8), "doubles": torch.arange(5, dtype=torch.float64)}
    found = fetch(tmp_path, put(DirectoryStore(tmp_path), odd))
    assert float(found["doubles"] @ found["doubles"]) == 30.0
