"""What `tests.security.fuzz_api` does for hours, for some seconds: no 5xx, and the document is true."""

from __future__ import annotations

import pytest

from tests.security import fuzz_api
from tests.support.effort import examples


@pytest.mark.slow
@pytest.mark.scaled
def test_no_request_of_any_role_is_answered_by_a_5xx() -> None:
    tried = examples(6)
    with fuzz_api.target() as served:
        known = fuzz_api.put_to_work(served)
        seen = fuzz_api.fuzz(served, known, examples=tried, number=1)
        fuzz_api.still_sound(served)
    assert seen["2xx"] > tried * 8
    assert seen["4xx"] > tried * 25
    assert "5xx" not in seen
