"""What `tests.security.fuzz_api` does for hours, for some seconds: no 5xx, and the document tells the truth."""

from __future__ import annotations

import pytest

from tests.security import fuzz_api


@pytest.mark.slow
def test_no_request_of_any_role_is_answered_by_a_5xx() -> None:
    with fuzz_api.target() as served:
        known = fuzz_api.put_to_work(served)
        seen = fuzz_api.fuzz(served, known, examples=12, number=1)
        fuzz_api.still_sound(served)
    assert seen["2xx"] > 100
    assert seen["4xx"] > 300
    assert "5xx" not in seen
