from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.errors import ApiError
from controller.state.publications import Publications
from schema.wire.messages import ErrorCode, PublishRequest


def request(version: int, name: str | None = None) -> PublishRequest:
    return PublishRequest(
        request_id=name or f"request-{version}", replica_id="policy-0.1", incarnation=1, policy_epoch=1,
        version=version, uri=f"v{version}", manifest_hash="m", content_hash="c", n_bytes=1,
    )  # fmt: skip


def test_the_same_request_is_one_publication() -> None:
    publications = Publications(keep=2)
    first = publications.publish(request(0), 0, 0)
    assert publications.publish(request(0), 0, 0) is first
    assert first.id == 1


def test_uncommitted_and_older_versions_are_refused() -> None:
    publications = Publications(keep=2)
    publications.publish(request(3), 0, 3)
    for version, code in ((5, ErrorCode.FUTURE_VERSION), (2, ErrorCode.CONFLICT)):
        with pytest.raises(ApiError) as refused:
            publications.publish(request(version), 0, 4)
        assert refused.value.code is code


def test_what_is_held_is_kept_and_the_rest_is_listed_until_the_next_publication() -> None:
    publications = Publications(keep=2)
    for version in range(5):
        publications.publish(request(version), 0, version)
    assert publications.collect({1, 2}) == [3]
    assert publications.collect({1}) == [2, 3]
    publications.publish(request(5), 0, 5)
    assert publications.collect({1}) == [4]
    publications.publish(request(6), 0, 6)
    assert publications.collect(()) == [1, 5]


def test_a_rewind_invalidates_later_versions_and_ids_go_on_rising() -> None:
    publications = Publications(keep=2)
    for version in range(4):
        publications.publish(request(version), 0, version)
    publications.rewind(2)
    assert publications.newest is not None
    assert publications.newest.version == 2
    assert publications.valid(4) is None
    again = publications.publish(request(2, "again-again"), 1, 2)
    assert (again.id, again.timeline) == (5, 1)
    assert publications.publish(request(3, "third-again"), 1, 3).id == 6


def test_a_publication_without_files_is_never_handed_out() -> None:
    publications = Publications(keep=1)
    for version in range(5):
        publications.publish(request(version), 0, version)
        publications.collect(())
    publications.rewind(2)
    assert publications.newest is None
    assert publications.newest_id == 0


@given(st.lists(st.tuples(st.sampled_from(["publish", "rewind", "collect"]), st.integers(0, 9)), max_size=60))
def test_random_histories(events: list[tuple[str, int]]) -> None:
    publications, committed, timeline, ids = Publications(keep=2), 0, 0, [0]
    rows: dict[int, dict[str, object]] = {}
    for number, (event, value) in enumerate(events):
        if event == "publish":
            committed += value % 2
            published = publications.publish(request(committed, f"request-{number}"), timeline, committed)
            assert published.id > max(ids)
            ids.append(published.id)
            assert publications.newest == published
        elif event == "rewind" and value <= committed:
            committed, timeline = value, timeline + 1
            publications.rewind(value)
        else:
            before = publications.collect(set(ids))
            listed = publications.collect({value})
            assert value not in listed or value in before
            assert publications.newest_id not in listed
        newest = publications.newest
        assert newest is None or newest.version <= committed
        rows.update({entry.publication.id: entry.to_record() for entry in publications.take_changes()})
        restored = Publications(2, rows.values())
        assert restored.newest == publications.newest
        assert [restored.valid(i) for i in ids] == [publications.valid(i) for i in ids]
