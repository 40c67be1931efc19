"""The list of long proofs is whole: each area's programs are there, and no marked test is left out."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.soak import AREAS, main, marked_folders, module_of

ROOT = Path(__file__).parent.parent


def test_every_program_and_path_is_there() -> None:
    for name, area in AREAS.items():
        for program, *_ in area.programs:
            assert find_spec(module_of(program)), f"{name}: {program}"
        paths = [path for path in area.pytest if not path.startswith("--")]
        assert all((ROOT / path).exists() for path in paths), name


def test_every_folder_with_a_marked_test_is_an_area() -> None:
    covered = {Path(path).parts[1] for area in AREAS.values() for path in area.pytest if path[0] != "-"}
    assert marked_folders() <= covered


def test_without_an_area_the_areas_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {name} " in listed for name in AREAS)
    with pytest.raises(SystemExit):
        main(["nowhere"])
