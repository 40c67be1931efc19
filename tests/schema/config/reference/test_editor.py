"""An editor that reads `#:schema` headers checks our files: taplo, the engine of the usual TOML extensions."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from schema.config.reference.export import FILE_NAME

ROOT = Path(__file__).parents[4]
EXAMPLES = sorted((ROOT / "examples").rglob("*.toml"))


def taplo(file: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("taplo")
    return subprocess.run(
        [str(program), "check", "--colors", "never", file.name],
        cwd=file.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_have_a_header_and_pass(example: Path) -> None:
    first = example.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("#:schema ")
    assert (example.parent / first.removeprefix("#:schema ")).resolve() == ROOT / FILE_NAME
    found = taplo(example)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("[rollout]\nn_generation = 0", "0 is less than the minimum of 1"),
        ("[train]\nepohc = 3", "'epohc' was unexpected"),
        ("[policy]\nmodel_max_length = '4096'", 'is not of type "integer"'),
        ("[train.train_policy]\ntype = 'grpo'\nepsilon = 0.2", "'epsilon' was unexpected"),
    ],
)
def test_mistakes_are_shown(tmp_path: Path, line: str, complaint: str) -> None:
    shutil.copy(ROOT / FILE_NAME, tmp_path)
    (tmp_path / "run.toml").write_text(f"#:schema ./{FILE_NAME}\n{line}\n", encoding="utf-8")
    found = taplo(tmp_path / "run.toml")
    assert found.returncode == 1
    assert complaint in found.stderr
