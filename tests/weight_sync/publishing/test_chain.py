"""Which form a trainer publishes next, and what its manifests name: with numbers."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schema.wire.weights import Piece
from tests.support.effort import examples
from weight_sync.publishing.chain import LONGEST, MOST_UNTRIED, Chain
from weight_sync.publishing.writer import PublishedVersion


def stored(number: int, kind: str) -> PublishedVersion:
    return PublishedVersion(f"v{number}-{kind}/manifest.json", "m", f"content-{number}", 10, kind)  # type: ignore[arg-type]


def publish(chain: Chain, number: int, *, asked: bool = False) -> str:
    """One publication as the trainer does it, anchors included; its form and where its chain begins."""
    kind = "full" if chain.next_is_full else "delta"
    begins = chain.named()[1] if kind == "delta" else None
    chain.published(number, number - 1, stored(number, kind))
    if asked:
        chain.asked()
    due = chain.anchor_due
    if due:
        chain.anchored(number, stored(number, "full").piece)
    return kind + ("+full" if due else "") + (f"<{begins}" if begins else "")


def names(chain: Chain) -> list[str]:
    return [
        f"{link.version + 1}" + ("d" if link.delta else "") + ("f" if link.full else "") for link in chain.named()[0]
    ]


def test_anchors_by_count() -> None:
    chain = Chain(3)
    forms = [publish(chain, number) for number in range(1, 9)]
    assert forms == [
        "full", "delta<1", "delta<1", "delta+full<1", "delta<4", "delta<4", "delta+full<4", "delta<7"
    ]  # fmt: skip
    assert names(chain) == ["1f", "2d", "3d", "4df", "5d", "6d", "7df", "8d"]
    assert chain.named()[0][-1].content_hash == "content-8"


def test_an_interval_of_one_anchors_every_version() -> None:
    chain = Chain(1)
    assert [publish(chain, number) for number in range(1, 4)] == ["full", "delta+full<1", "delta+full<2"]


def test_an_anchor_that_a_replica_asks_for() -> None:
    chain = Chain(100)
    assert publish(chain, 1) == "full"
    assert publish(chain, 2, asked=True) == "delta+full<1"
    assert not chain.waits_for_anchor
    assert publish(chain, 3) == "delta<2"


def test_who_asks_about_versions_before_a_full_one_has_what_is_needed() -> None:
    chain = Chain(100)
    publish(chain, 1, asked=True)
    assert not chain.waits_for_anchor
    assert publish(chain, 2) == "delta<1"


def test_an_anchor_that_was_asked_for_and_fails_becomes_the_next_publication() -> None:
    chain = Chain(100)
    publish(chain, 1)
    chain.published(2, 1, stored(2, "delta"))
    chain.asked()
    assert chain.anchor_due
    assert chain.waits_for_anchor
    chain.anchor_failed()
    assert not chain.waits_for_anchor
    assert chain.next_is_full
    assert publish(chain, 3) == "full"
    assert publish(chain, 4) == "delta<3"


def test_an_anchor_by_count_that_fails_is_due_again() -> None:
    chain = Chain(2)
    publish(chain, 1)
    publish(chain, 2)
    chain.published(3, 2, stored(3, "delta"))
    assert chain.anchor_due
    chain.anchor_failed()
    assert not chain.next_is_full
    assert publish(chain, 4) == "delta+full<1"
    assert names(chain) == ["1f", "2d", "3d", "4df"]


def test_dense_versions_are_full_and_tried_less_and_less_often() -> None:
    chain = Chain(100)
    publish(chain, 1)
    tried = []
    for number in range(2, 60):
        if not chain.next_is_full:
            tried.append(number)
            chain.dense()
        chain.published(number, number - 1, stored(number, "full"))
        assert names(chain) == [f"{number}f"]
    assert tried == [2, 4, 8, 16, 32, 48]
    assert tried[-1] - tried[-2] == MOST_UNTRIED + 1
    while chain.next_is_full:
        number += 1
        chain.published(number, number - 1, stored(number, "full"))
    chain.published(100, 99, stored(100, "delta"))  # sparse again
    chain.dense()
    chain.published(101, 100, stored(101, "full"))
    assert chain.next_is_full
    chain.published(102, 101, stored(102, "full"))
    assert not chain.next_is_full


def test_collected_links_leave_and_a_chain_begins_at_a_full_one() -> None:
    chain = Chain(3)
    for number in range(1, 10):
        publish(chain, number)
    assert names(chain) == ["1f", "2d", "3d", "4df", "5d", "6d", "7df", "8d", "9d"]
    chain.collected([1])
    assert names(chain) == ["4df", "5d", "6d", "7df", "8d", "9d"]
    chain.collected([2, 3, 5])
    assert names(chain) == ["7df", "8d", "9d"]
    assert chain.named()[1] == 7
    chain.collected([7])
    assert chain.named()[1] is None
    assert chain.next_is_full
    assert publish(chain, 10) == "full"


def test_a_chain_has_an_end() -> None:
    chain = Chain(10_000)
    assert publish(chain, 1) == "full"
    number = 1
    while not chain.next_is_full:
        number += 1
        publish(chain, number)
        assert len(chain.named()[0]) <= LONGEST + 1
    assert number == LONGEST + 1
    assert publish(chain, number + 1) == "full"
    assert names(chain) == [f"{number + 1}f"]


Step = st.tuples(st.sampled_from(["publish", "ask", "fail", "dense", "collect"]), st.integers(0, 9))


@pytest.mark.scaled
@settings(max_examples=examples(60), deadline=None)
@given(st.lists(Step, max_size=60), st.integers(1, 5))
def test_whoever_holds_anything_that_is_listed_has_a_way(steps: Iterable[tuple[str, int]], interval: int) -> None:
    chain, number, gone = Chain(interval), 0, set[int]()
    for what, value in steps:
        if what == "collect":
            gone |= {n for n in range(number - value) if n >= 1}
            chain.collected(gone)
        else:
            number += 1
            kind = "full" if chain.next_is_full else "delta"
            begins = chain.named()[1]
            if kind == "delta" and what == "dense":
                chain.dense()
                kind = "full"
            if kind == "delta":
                assert begins is not None
                assert begins not in gone
            chain.published(number, number, stored(number, kind))
            if what == "ask":
                chain.asked()
            if chain.anchor_due:
                if what == "fail":
                    chain.anchor_failed()
                else:
                    chain.anchored(number, Piece(uri="a/b", manifest_hash="m", n_bytes=1))
        links = chain.named()[0]
        assert not links or links[0].full is not None
        assert all(link.delta is not None for link in links[1:])
        versions = [link.version for link in links]
        assert versions == list(range(versions[0], versions[0] + len(versions))) if versions else True
        assert not gone & set(versions)
