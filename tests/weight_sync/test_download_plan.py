"""The cheapest way to a version: against brute force over every way there is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schema.wire.weights import ChainLink, Piece, WeightManifest
from tests.support.effort import examples
from weight_sync.download_plan import cheapest, deltas_between, links_of
from weight_sync.errors import WeightError


def piece(name: str, n_bytes: int) -> Piece:
    return Piece(uri=f"{name}/manifest.json", manifest_hash=name, n_bytes=n_bytes)


@st.composite
def chains(draw: st.DrawFn) -> list[ChainLink]:
    """Up to eight versions; contents may return (a step that changes nothing, or changes back)."""
    sizes = st.none() | st.integers(0, 20)
    links = []
    for i in range(draw(st.integers(1, 8))):
        delta, full = draw(sizes), draw(sizes)
        links.append(
            ChainLink(
                version=i,
                content_hash=draw(st.sampled_from("abcdefgh")),
                delta=None if delta is None else piece(f"d{i}", delta),
                full=None if full is None else piece(f"f{i}", full),
            )
        )
    return links


def every_way(links: list[ChainLink], held: str | None, broken: set[str]) -> list[list[str]]:
    """All ways to the last link as lists of URIs, without cleverness."""
    ways: list[list[str]] = []
    for start, link in enumerate(links):
        tail = [after.delta for after in links[start + 1 :]]
        if any(delta is None or delta.uri in broken for delta in tail):
            continue
        uris = [delta.uri for delta in tail if delta is not None]
        if link.content_hash == held:
            ways.append(uris)
        if link.full is not None and link.full.uri not in broken:
            ways.append([link.full.uri, *uris])
    return ways


@pytest.mark.scaled
@settings(max_examples=examples(40), deadline=None)
@given(data=st.data(), links=chains())
def test_no_way_is_cheaper(data: st.DataObject, links: list[ChainLink]) -> None:
    forms = [form for link in links for form in (link.delta, link.full) if form is not None]
    sizes = {form.uri: form.n_bytes for form in forms}
    held = data.draw(st.none() | st.sampled_from("abcdefgh"))
    broken = data.draw(st.sets(st.sampled_from(sorted(sizes)))) if sizes else set()
    ways = every_way(links, held, broken)
    plan = cheapest(links, held, broken)
    if plan is None:
        assert ways == []
        return
    uris = [step.piece.uri for step in plan.steps]
    assert uris in ways
    costs = [(sum(sizes[uri] for uri in way), len(way)) for way in ways]
    assert (plan.n_bytes, len(uris)) == min(costs)
    assert [step.content_hash for step in plan.steps] == [
        link.content_hash for link in links[len(links) - len(uris) :]
    ]


@pytest.mark.scaled
@settings(max_examples=examples(30), deadline=None)
@given(links=chains(), base=st.sampled_from("abcdefgh"))
def test_deltas_alone(links: list[ChainLink], base: str) -> None:
    ways = every_way([link.model_copy(update={"full": None}) for link in links], base, set())
    found = deltas_between(links, base)
    if found is None:
        assert ways == []
    else:
        assert [piece.uri for piece in found] == min(ways, key=len)


def manifest(base: str | None, chain: list[ChainLink]) -> WeightManifest:
    kind = "full" if base is None else "delta"
    return WeightManifest(
        kind=kind, version=9, timeline=0, base=base, files=[], tensors={}, content_hash="z", chain=chain
    )


def test_the_manifest_is_the_last_link() -> None:
    before = ChainLink(version=8, content_hash="y", full=piece("f8", 100))
    own = piece("own", 3)
    assert links_of(manifest("y", [before]), own) == [before, ChainLink(version=9, content_hash="z", delta=own)]
    assert links_of(manifest(None, [before]), own)[-1].full == own
    for chain in ([], [before.model_copy(update={"content_hash": "x"})]):
        with pytest.raises(WeightError, match="delta against y, its chain ends at"):
            links_of(manifest("y", chain), own)


def test_who_joins_at_version_30_takes_the_nearest_anchor() -> None:
    links = [ChainLink(version=0, content_hash="h0", full=piece("f0", 1000))]
    for i in range(1, 31):
        full = piece(f"f{i}", 1000) if i % 8 == 0 else None
        links.append(ChainLink(version=i, content_hash=f"h{i}", delta=piece(f"d{i}", 10), full=full))
    plan = cheapest(links, None)
    assert plan is not None
    assert [step.piece.manifest_hash for step in plan.steps] == ["f24", *(f"d{i}" for i in range(25, 31))]
    assert cheapest(links, None, {"d27/manifest.json"}) is None
    plan = cheapest(links, "h20", {"f24/manifest.json"})
    assert plan is not None
    assert plan.n_bytes == 100
