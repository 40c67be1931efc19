"""Whatever is in the file, the answer is a configuration or a ConfigError that names keys: never a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schema.config import load_config
from schema.config.loading.tomlwrite import dumps
from tests.schema.config_samples import GRPO, SFT
from tests.schema.fuzz_config import check_data, fuzz, verdict
from tests.schema.mutations import names
from tests.support.effort import examples

CALM = settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def calm_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.scaled
def test_spoiled_configurations(calm_directory: Path) -> None:
    """A taste of `python -m tests.schema.fuzz_config`."""
    counts = fuzz(examples(60))
    assert counts["all"] >= examples(60)
    assert counts["refused"]


def test_what_is_spoiled_was_sound(calm_directory: Path) -> None:
    """Else all refusals would be of the samples themselves."""
    assert check_data(GRPO)
    assert check_data(SFT)


@pytest.mark.scaled
@CALM
@given(text=st.text(alphabet=st.sampled_from(list("[]{}=.,\"'\\\n# ab1-")), max_size=40))
def test_any_text(calm_directory: Path, text: str) -> None:
    (calm_directory / "run.toml").write_text(text, encoding="utf-8")
    verdict(lambda: load_config(calm_directory / "run.toml"))


@pytest.mark.scaled
@CALM
@given(overrides=st.lists(st.text(max_size=20) | names.map(lambda name: f"train.{name}=1"), max_size=3))
def test_any_override(calm_directory: Path, overrides: list[str]) -> None:
    (calm_directory / "run.toml").write_text(dumps(GRPO), encoding="utf-8")
    verdict(lambda: load_config(calm_directory / "run.toml", overrides))
