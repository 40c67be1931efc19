"""Before its engine starts a replica proves that weights can be read."""

from __future__ import annotations

import pytest

from tests.rollout_worker.stage import Stage
from tests.support.objects import running_objects

pytestmark = pytest.mark.slow


def test_a_bucket_that_is_not_there_is_exit_code_2(stage: Stage) -> None:
    stage.prepare(stage.config(weight_sync__store="s3://no-such-bucket/weights"), ["question?"] * 8)
    served = stage.serve()
    with running_objects() as objects:
        worker = stage.worker_process(served.url, **objects.environment)
        assert worker.wait() == 2
    text = worker.log.read_text()
    assert "weight_sync.store: s3://no-such-bucket/weights cannot be read: " in text
    assert "no such bucket: create it, or correct weight_sync.store" in text
    assert "engine ready" not in text
