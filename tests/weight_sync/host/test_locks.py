"""Who holds a lock is named by its command line, but not what is secret in that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from weight_sync.host.locks import LockTimeoutError, locked

HOLD = "import fcntl,sys;f=open(sys.argv[1]);fcntl.flock(f,2);print(1,flush=True);input()"


@pytest.mark.parametrize(
    "words",
    [
        ["redis://user:hunter2@host/0"], ["--url=redis://:hunter2@host"],
        ["https://host/hook?a=1&token=hunter2"], ["--api-key", "hunter2=="], ["--api-key=hunter2"],
        ["store.secret=hunter2"], ["sh -c 'X_TOKEN=hunter2 run'"],
        ["redis://user:hunter2" + "2" * 100 + "@host"],  # what is cut off does not save the rest
    ],
)  # fmt: skip
def test_credentials_of_who_holds_a_lock_are_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("f")
    path.touch()
    (tmp_path / "x.py").write_text(HOLD)
    with subprocess.Popen(  # under a short name: the message has 100 characters of the command
        ["p", "x.py", "f", *words, "--last"], executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            assert process.stdout.readline()
            with pytest.raises(LockTimeoutError) as caught, locked(path, exclusive=True, timeout=0.0):
                pass
        finally:
            process.stdin.close()
    assert f"held by pid {process.pid} (p x.py f " in str(caught.value)
    assert "***" in str(caught.value)
    assert "hunter2" not in str(caught.value)
