"""Publishing from one, two and three real ranks, against a real controller: what is in the store afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from schema.wire.weights import Piece, Publication, WeightManifest
from tests.policy_worker.material import make_config
from tests.policy_worker.ranks import start_ranks, wait_ranks
from tests.support.controller import TOKENS, ControllerProcess, make_run_dir
from tests.support.valkey import ValkeyServer, running_valkey
from tests.weight_sync.helpers import bits
from weight_sync import DirectoryStore
from weight_sync.delta.delta import open_delta
from weight_sync.manifest import open_piece, parse_manifest, piece_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with running_valkey() as server:
        yield server


@dataclass
class Outcome:
    """What a run of the script left."""

    out: Path
    store: DirectoryStore
    publications: list[Publication]
    output: str

    @property
    def forms(self) -> list[str]:
        """`delta<4`: its chain begins with the full form of publication 4."""
        return [p.kind + (f"<{p.begins}" if p.kind == "delta" else "") for p in self.publications]

    def expected(self, number: int) -> dict[str, torch.Tensor]:
        return load_file(self.out / f"expected-{number}.safetensors")

    def chain(self, number: int) -> list[str]:
        links = read_manifest(self.store, piece_of(self.publications[number])).chain
        return [("d" if link.delta else "") + ("f" if link.full else "") for link in links]


class Ranks:
    def __init__(self, directory: Path, url: str, settings: dict[str, Any]) -> None:
        sections = {"train": {"transfer_dtype": "bfloat16"}, **settings}
        config = make_config(
            train=sections["train"],
            policy={"model_name_or_path": "unused", "model_max_length": 64},
            weight_sync={"keep": 50, **sections.get("weight_sync", {})},
        )
        self.run_dir = make_run_dir(directory / "run", config)
        self.controller = ControllerProcess(self.run_dir, url)
        self.controller.start()
        self.store = DirectoryStore(self.run_dir / "weights")

    def run(self, world: int, *script: str, codes: int = 0) -> Outcome:
        out = self.run_dir.parent / "out"
        out.mkdir(exist_ok=True)
        arguments = ["tests.policy_worker.publish_program", str(out), json.dumps(script)]
        ranks = start_ranks(
            world, arguments, COSMOS_CONTROLLER_URL=self.controller.url, COSMOS_TOKEN=TOKENS["policy"],
            COSMOS_REPLICA_NAME="policy-0",
        )  # fmt: skip
        outputs = wait_ranks(ranks)
        for code, output in outputs:
            assert code == codes, output
        reported = out / "publications.json"
        found = json.loads(reported.read_text()) if reported.exists() else []
        return Outcome(out, self.store, [Publication.model_validate(entry) for entry in found], outputs[0][1])


@pytest.fixture
def start(tmp_path: Path, valkey: ValkeyServer) -> Iterator[Any]:
    started: list[Ranks] = []

    def starter(**settings: Any) -> Ranks:
        started.append(Ranks(tmp_path, valkey.url, settings))
        return started[-1]

    yield starter
    for ranks in started:
        ranks.controller.stop()


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert {n: (t.shape, bits(t)) for n, t in found.items()} == {n: (t.shape, bits(t)) for n, t in expected.items()}


def read_manifest(store: DirectoryStore, piece: Piece) -> WeightManifest:
    return parse_manifest(bytes(store.read(piece.uri)), piece)


def weights(outcome: Outcome, publication: Publication) -> dict[str, torch.Tensor]:
    """A version as somebody finds it who has nothing: the newest full form of the chain, and deltas."""
    store = outcome.store
    manifest = read_manifest(store, piece_of(publication))
    pieces, full = [piece_of(publication)], piece_of(publication)
    if manifest.kind == "delta":
        for link in reversed(manifest.chain):
            if link.full is not None:
                full = link.full
                break
            assert link.delta is not None
            pieces.insert(0, link.delta)
    else:
        pieces = []
    opened = open_piece(store, full, "full")
    found: dict[str, torch.Tensor] = {}
    for name, entry in opened.manifest.tensors.items():
        assert entry.dtype == "BF16"
        raw = torch.frombuffer(bytearray(opened.data[name]), dtype=torch.bfloat16)
        found[name] = raw.view(entry.shape)
    base = opened.manifest.content_hash
    for piece in pieces:
        delta = open_delta(store.root, piece)
        assert delta.base == base
        for change in delta.changes():
            flat = found[change.name].view(-1)
            if change.positions is None:
                flat.copy_(change.values)
            else:
                flat[change.positions] = change.values
        base = delta.content_hash
    assert base == publication.content_hash
    return found


WORLDS = [2, pytest.param(1, marks=pytest.mark.soak), pytest.param(3, marks=pytest.mark.soak)]


@pytest.mark.parametrize("world", WORLDS)
def test_every_version_has_the_bits_of_its_moment(start: Any, world: int) -> None:
    """The weights change right after each snapshot, of which changes alone are copied, while it is encoded."""
    steps = ["touch 97", "publish", "touch 89", "touch 53", "settle"]
    dense = ["touch 1", "publish", "touch 1", "settle"]
    none = ["publish", "settle", "publish", "settle"]
    outcome = start(weight_sync={"anchor_interval": 3}).run(world, "compare", *steps * 5, *dense, *steps, *none)
    assert outcome.forms == [
        "full", "delta<1", "delta<1", "delta<1", "delta<4", "full", "full", "delta<7", "delta<7",
    ]  # fmt: skip
    assert [p.id for p in outcome.publications] == list(range(1, 10))
    for number, publication in enumerate(outcome.publications):
        assert_equal(weights(outcome, publication), outcome.expected(number))
    assert outcome.chain(4) == ["f", "d", "d", "df"]
    assert outcome.publications[-1].n_bytes == 0  # nothing had changed
    if world > 1:
        manifest = read_manifest(outcome.store, piece_of(outcome.publications[0]))
        assert sorted(file.name for file in manifest.files) == [
            f"r{rank:03d}-00000.safetensors" for rank in range(world)
        ]
    metrics = json.loads((outcome.out / "metrics.json").read_text())
    assert metrics["publish_density"] == 0.0
    assert metrics["publish_copied_bytes"] < 0.01 * outcome.publications[0].n_bytes
    assert {f"publish_{stage}_seconds" for stage in ("gather", "encode", "write", "announce")} <= metrics.keys()


@pytest.mark.parametrize("world", WORLDS[:2])
def test_a_store_that_is_held_is_owed_and_caught_up(start: Any, world: int) -> None:
    outcome = start().run(
        world, "publish", "settle", "touch 97", "hold", "publish", "touch 89", "owe", "touch 83", "owe",
        "release", "touch 71", "catch up", "touch 59", "settle", "touch 51", "publish", "settle",
    )  # fmt: skip
    assert outcome.forms == ["full", "delta<1", "delta<1", "delta<1"]
    for number, publication in enumerate(outcome.publications):
        assert_equal(weights(outcome, publication), outcome.expected(number))


def test_a_store_that_fails_for_too_long_is_an_error_with_a_name(start: Any) -> None:
    outcome = start(weight_sync={"store_timeout": 1.0}).run(2, "hold", "publish", "fail")
    for rank in range(2):
        error = (outcome.out / f"error-{rank}").read_text()
        assert error.startswith("PublishError: version 0 cannot be written to DirectoryStore(")
        assert "weight_sync.store_timeout" in error
    assert outcome.publications == []


def test_a_version_that_is_given_up_while_leaving_stops_no_checkpoint(start: Any) -> None:
    """The step that was under way is committed, its version is owed, and the replica goes on to save and leave."""
    outcome = start().run(2, "publish", "settle", "hold", "publish", "leave", "stopped", "owe", "owe", "settle")
    assert (outcome.out / "settled").read_text() == "False"
    assert outcome.forms == ["full"]


def test_an_anchor_that_a_replica_needs_is_there_before_the_next_delta(start: Any) -> None:
    step = ["touch 97", "publish", "settle"]
    outcome = start().run(1, *step * 2, "report", *step * 3)
    # publication 3 is answered with the wish, gets a full form at once, and is where the next chain begins
    assert outcome.forms == ["full", "delta<1", "delta<1", "delta<3", "delta<3"]
    assert outcome.chain(4) == ["f", "d", "df", "d"]
    assert_equal(weights(outcome, outcome.publications[3]), outcome.expected(3))


@pytest.mark.parametrize("world", WORLDS[:2])
def test_an_anchor_that_cannot_be_written_ends_no_run(start: Any, world: int) -> None:
    step = ["touch 97", "publish", "settle"]
    ranks = start(weight_sync={"anchor_interval": 2})
    outcome = ranks.run(world, *step, "exhaust", *step * 4)
    assert outcome.forms == ["full", *["delta<1"] * 4]
    assert "no memory for a full form" in outcome.output


def test_replicas_that_can_read_nothing_get_the_same_version_in_full(start: Any) -> None:
    step = ["touch 97", "publish", "settle"]
    outcome = start().run(1, *step * 2, "ask", "publish", "settle", *step)
    assert outcome.forms == ["full", "delta<1", "full", "delta<3"]
    assert outcome.publications[2].content_hash == outcome.publications[1].content_hash


def test_what_is_collected_leaves_store_and_chain(start: Any) -> None:
    step = ["touch 97", "publish", "settle"]
    ranks = start(weight_sync={"anchor_interval": 2, "keep": 1})
    outcome = ranks.run(1, *step * 8)
    newest = outcome.publications[-1]
    assert newest.kind == "delta"
    assert_equal(weights(outcome, newest), outcome.expected(7))
    manifest = read_manifest(outcome.store, piece_of(newest))
    there = outcome.store.versions()
    assert len(there) < 12  # eight deltas and four anchors were written
    assert manifest.chain[0].full is not None
    assert len(manifest.chain) < 7  # of the seven before it


@pytest.mark.parametrize("world", WORLDS[:2])
def test_ranks_that_die_leave_nothing_that_is_seen(start: Any, world: int) -> None:
    ranks = start()
    ranks.run(world, "publish", "settle", "touch 97", "publish", "die", codes=9)
    for version in ranks.store.versions():  # whole, if they are there
        assert (ranks.store.root / version / "manifest.json").exists()
    outcome = ranks.run(world, "publish", "settle", "touch 97", "publish", "settle")
    assert outcome.forms[-2][:4] == "full"
    assert outcome.forms[-1] == f"delta<{outcome.publications[-2].id}"
    assert not [path.name for path in ranks.store.root.iterdir() if path.name.startswith(".tmp-")]
    for number, publication in enumerate(outcome.publications[-2:]):
        assert_equal(weights(outcome, publication), outcome.expected(number))
