from __future__ import annotations

from pathlib import Path

import pytest

from policy_worker.publish_record import RECORD, read_record


def test_what_an_earlier_process_published_is_known(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / RECORD
    assert read_record(path) == {}
    lines = [(1, "a"), (2, "b"), (2, "c")]  # a delta, and its anchor
    text = "".join(f'{{"id": {number}, "uri": "{name}/manifest.json"}}\n' for number, name in lines)
    path.write_text(text + '{"id": 3, "u')
    assert read_record(path) == {1: ["a/manifest.json"], 2: ["b/manifest.json", "c/manifest.json"]}
    assert "damaged line" in caplog.text
