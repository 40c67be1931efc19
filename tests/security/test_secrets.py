"""Secrets out of values: what is cut from files and messages, what is masked for people, what is warned of."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from launcher.paths import resolved
from launcher.plan.rundir import RunDir, RunTokens
from schema.config import Config, ConfigError, check_warnings, load_config
from schema.config.secrets import cut, found_in, masked
from tests.support.controller import make_config

S = "planted-secret"

ADDRESSES = [  # with the secret, cut, masked
    (f"redis://:{S}@h:1/0", "redis://h:1/0", "redis://:***@h:1/0"),
    (f"rediss://me:{S}@h/0?db=2", "rediss://h/0?db=2", "rediss://me:***@h/0?db=2"),
    (f"redis://me:{S}@@h:1", "redis://h:1", "redis://me:***@h:1"),
    (f"redis://h?username=me&password={S}&db=1", "redis://h?db=1", "redis://h?username=me&password=***&db=1"),
    (f"rediss://h?ssl_keyfile=/k&ssl_password={S}", "rediss://h?ssl_keyfile=/k",
     "rediss://h?ssl_keyfile=/k&ssl_password=***"),
    (f"https://{S}@api.example.org/x", "https://api.example.org/x", "https://***@api.example.org/x"),
    (f"https://h/hook?token={S}", "https://h/hook", "https://h/hook?token=***"),
    (f"https://h/a?x=1&access_token={S}#f", "https://h/a?x=1#f", "https://h/a?x=1&access_token=***#f"),
    (f"https://h/a?API_KEY={S}&y=2", "https://h/a?y=2", "https://h/a?API_KEY=***&y=2"),
    (f"https://h/a?X-Amz-Signature={S}", "https://h/a", "https://h/a?X-Amz-Signature=***"),
    (f"redis://me:{S}/x9@h:1/0", "redis://h:1/0", "redis://me:***@h:1/0"),
    (f"postgresql://:a#{S}?@h/db", "postgresql://h/db", "postgresql://:***@h/db"),
    (f"redis://me:{S}/b@c@h:1", "redis://h:1", "redis://me:***@h:1"),
    (f"unix://user:{S}@/run/redis.sock", "unix:///run/redis.sock", "unix://user:***@/run/redis.sock"),
    (f"unix:///r.sock?username=u&password={S}", "unix:///r.sock", "unix:///r.sock?username=u&password=***"),
    (f"see https://u:{S}@h/a and b", "see https://h/a and b", "see https://u:***@h/a and b"),
]  # fmt: skip

HARMLESS = [
    "unix:///run/redis.sock", "redis://h:1/0?db=2", "https://h/a?page=2", "Qwen/Qwen3-0.6B", "a@b", "s3://bucket/a",
    "http://[::1]:80/a@b", "https://h:443/a@1.jsonl?x=@", "https://h/a:b@c",
    "hf://datasets/x@rev", "no address: token=abc", "{% if x %}://{% endif %}",
]  # fmt: skip


@pytest.mark.parametrize(("address", "without", "shown"), ADDRESSES)
def test_credentials_in_addresses(address: str, without: str, shown: str) -> None:
    assert cut(address) == without
    assert masked(address) == shown
    assert found_in(address)
    assert cut({"a": [address]}) == {"a": [without]}


@pytest.mark.parametrize("text", [text for text in HARMLESS if not text.startswith("hf:")])
def test_other_texts_stay(text: str) -> None:
    assert cut(text) == masked(text) == text


@pytest.mark.parametrize(
    "key",
    ["token", "hf_token", "password", "api_key", "apikey", "access_key", "aws_secret_access_key", "private_key",
     "client-secret", "credentials", "slack_webhook", "webhooks", "API_KEY"],
)  # fmt: skip
def test_keys_that_sound_like_secrets(key: str) -> None:
    assert masked({"custom": {key: S}}) == {"custom": {key: "***"}}
    assert masked({key: [S, {"a": S}], "b": S}) == {key: ["***", {"a": "***"}], "b": S}
    assert masked(S, key) == "***"
    assert masked({key: ""}) == {key: ""}


@pytest.mark.parametrize("key", ["max_tokens", "tokenizer", "keys", "key_prefix", "monkey", "secretary"])
def test_keys_that_do_not(key: str) -> None:
    assert masked({key: 5 if key == "max_tokens" else "x"}) != {key: "***"}


def planted() -> Config:
    custom = {"hook": f"https://h/x?token={S}", "list": [f"https://{S}@h"], "api_key": "in-the-open", "n": 1}
    custom |= {"tokens": ["in-the-open"]}
    return make_config(redis={"url": f"redis://me:{S}@h:1/0"}, custom=custom)


def test_nothing_of_it_is_written_to_the_run_directory(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.make()
    written = run.write_config(planted())
    run.write_tokens(RunTokens.fresh())
    assert S not in json.dumps(written)
    assert S not in json.dumps(resolved(planted()))
    for path in run.path.rglob("*"):
        if path.is_file():
            assert S not in path.read_text()
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    for name in (".tokens", ".locks", "redis"):
        assert stat.S_IMODE((run.path / name).stat().st_mode) == 0o700


def test_the_user_is_told() -> None:
    warned: dict[str, Any] = {p.key: p for p in check_warnings(planted()) if p.key.startswith(("custom", "redis"))}
    assert all(S not in problem.render() for problem in warned.values())
    del warned["redis.url"]  # without TLS, not that it holds a password: the job uses it
    assert set(warned) == {"custom.hook", "custom.list[0]", "custom.api_key", "custom.tokens[0]"}
    assert all("file that" in problem.hint for problem in warned.values())


@pytest.mark.parametrize(
    "setting",
    [
        f'weight_sync.store="s3://me:{S}@bucket/p"', f'weight_sync.store="https://me:{S}@host/p"',
        f'redis.url="http://me:{S}@host"', f'redis.url="redis://me:{S}@host:99999/0"',
        f'validation.no_such_key="https://h?token={S}"',
    ],
)  # fmt: skip
def test_a_refusal_does_not_repeat_them(tmp_path: Path, setting: str) -> None:
    """Neither its text nor its place, which is the setting itself, nor what programs read of it."""
    config = tmp_path / "config.toml"
    config.write_text("")
    with pytest.raises(ConfigError) as refused:
        load_config(config, [setting])
    (problem, *_) = [p for p in refused.value.problems if p.key.startswith(("weight", "redis", "validation"))]
    assert "--set" in problem.where
    assert S not in problem.render() + repr(problem)
