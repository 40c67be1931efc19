"""Whatever is in the file, the answer is a configuration or a ConfigError that names keys: never a traceback."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schema.config import Config, ConfigError, check_config, load_config
from schema.config.explain import all_fields
from schema.config.positions import locate
from schema.config.tomlwrite import dumps
from tests.schema.config_samples import GRPO, SFT, write

KEYS = list(all_fields())
CALM = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

scalars = st.one_of(
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(10**400), max_value=10**400),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(
        ["grpo", "sft", "none", "float32", "x.py:f", "../nope", "~", "synthetic:addition", "nul\0"]
    ),
)
names = st.one_of(st.text(max_size=6), st.sampled_from([path[-1] for path in KEYS]))
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
mutations = st.lists(st.tuples(st.sampled_from(KEYS), st.none() | names, values), min_size=1, max_size=4)


def mutate(base: dict[str, Any], changes: list[tuple[tuple[str, ...], str | None, Any]]) -> dict[str, Any]:
    data = deepcopy(base)
    for path, extra, value in changes:
        target = (*path[:-1], extra) if extra is not None else path
        try:
            write(data, target, value)
        except (TypeError, AttributeError):  # an earlier change put a plain value where a table was
            data[path[0]] = value
    return data


def outcome(check: Any) -> Config | None:
    error: ConfigError | None = None
    config: Config | None = None
    try:
        config = check()
    except ConfigError as caught:
        error = caught
    if error is not None:
        assert error.render()
        assert all(problem.message for problem in error.problems)
        assert all(problem.key or problem.file for problem in error.problems)
    return config


@pytest.fixture
def calm_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@CALM
@given(base=st.sampled_from([GRPO, SFT, {}]), changes=mutations)
def test_mutated_configurations(calm_directory: Path, base: dict[str, Any], changes: Any) -> None:
    config = outcome(lambda: check_config(mutate(base, changes)))
    if config is not None:
        json.dumps(config.to_dict(), allow_nan=False)
        file = calm_directory / "again.toml"
        file.write_text(config.to_toml(), encoding="utf-8")
        assert load_config(file).to_dict() == config.to_dict()


@CALM
@given(base=st.sampled_from([GRPO, SFT]), changes=mutations)
def test_mutated_files_and_their_positions(calm_directory: Path, base: dict[str, Any], changes: Any) -> None:
    text = dumps(mutate(base, changes))
    (calm_directory / "run.toml").write_bytes(text.encode("utf-8", "surrogatepass"))
    outcome(lambda: load_config(calm_directory / "run.toml"))
    lines = text.split("\n")
    for path, (line, column) in locate(text).items():
        assert column <= len(lines[line - 1]), path


@CALM
@given(text=st.text(alphabet=st.sampled_from(list("[]{}=.,\"'\\\n# ab1-")), max_size=40))
def test_any_text(calm_directory: Path, text: str) -> None:
    (calm_directory / "run.toml").write_text(text, encoding="utf-8")
    outcome(lambda: load_config(calm_directory / "run.toml"))


@CALM
@given(overrides=st.lists(st.text(max_size=20) | names.map(lambda name: f"train.{name}=1"), max_size=3))
def test_any_override(calm_directory: Path, overrides: list[str]) -> None:
    (calm_directory / "run.toml").write_text(dumps(GRPO), encoding="utf-8")
    outcome(lambda: load_config(calm_directory / "run.toml", overrides))
