"""Where uploads go is reported beforehand, and only the trainer gets their credentials."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.plan.credentials import (
    credentials_of,
    given_to,
    given_to_trackers,
    is_secret,
    upload_targets,
    withheld,
    without_secrets,
)
from launcher.restarts import Role
from schema.config import Config
from tests.support.secrets_table import secrets_table

USERS = {
    "HOME": "/h",
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "aws-secret",
    "AWS_SESSION_TOKEN": "aws-session",
    "AWS_ENDPOINT_URL": "http://user:url-secret@store:9000",
    "HF_TOKEN": "hub-secret",
    "HF_ENDPOINT": "https://hub.example",
    "HF_HOME": "/h/hf",
}


ADDRESS = "https://me:planted@host.example"
IN_ADDRESSES = ("https_proxy", "DATABASE_URL", "COSMOS_CUSTOM__HOOK")
OF_THE_LAUNCHER = (
    "COSMOS_REDIS_PASSWORD",
    "COSMOS_TOKEN_USER",
    "COSMOS_TOKEN_ROLLOUT",
    "COSMOS_TOKEN_POLICY",
    "COSMOS_REPLICA_SECRET",
)


def test_who_prepares_data_gets_what_its_addresses_need() -> None:
    env = {**USERS, "GOOGLE_APPLICATION_CREDENTIALS": "/key.json", "AZURE_STORAGE_KEY": "k", "HADOOP_TOKEN_FILE": "t"}
    for name, variable in (
        ("s3://bucket/a", "AWS_SECRET_ACCESS_KEY"),
        ("gcs://bucket/a", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("abfss://c@account.dfs.core.windows.net/a", "AZURE_STORAGE_KEY"),
        ("hdfs:///a", "HADOOP_TOKEN_FILE"),
        ("a.csv", ""),
    ):
        config = Config.model_validate({"validation": {"dataset": {"files": [name]}}})
        given = {role: given_to(role, config, env) for role in Role}
        others = set(env) - set(USERS) | {"AWS_SECRET_ACCESS_KEY"}
        assert others & set(given[Role.DATA]) == ({variable} if variable else set())
        assert not any(others & set(given[role]) for role in Role if role is not Role.DATA)


@pytest.mark.parametrize("store", ["", "/shared/weights", "s3://bucket/weights"])
@pytest.mark.parametrize("role", Role)
def test_a_role_gets_what_it_has_a_use_for(role: Role, store: str) -> None:
    given = credentials_of(role, USERS, store)
    uses = role in (Role.ROLLOUT, Role.POLICY) and store.startswith("s3://")
    assert given["HOME"] == "/h"
    assert given["HF_HOME"] == "/h/hf"
    assert {name for name in given if name.startswith("AWS_")} == (
        {name for name in USERS if name.startswith("AWS_")} if uses else set()
    )
    uploading = credentials_of(role, USERS, store, uploads=True)
    assert ("AWS_ACCESS_KEY_ID" in uploading) == (uses or role is Role.POLICY)
    named = credentials_of(role, USERS, store, ["AWS_SESSION_TOKEN"])
    scores = {"AWS_SESSION_TOKEN": "aws-session"} if role in (Role.ROLLOUT, Role.DATA) else {}
    assert named == {**given, **scores}
    taught = credentials_of(role, {**USERS, "KEY": "k"}, store, teachers=["KEY"])
    assert ("KEY" in taught) == (role is Role.POLICY)
    assert ("HF_TOKEN" in given) == (role not in (Role.CONTROLLER, Role.REDIS))


def test_the_table_of_the_documentation_is_what_roles_get() -> None:
    """What the launcher makes, and what reward processes get, is looked at in a real job."""
    config = Config.model_validate(
        {
            "train": {"ckpt": {"upload_s3": "all", "s3_bucket": "bucket"}},
            "logging": {"logger": ["console", "wandb"]},
            "reward": {"environment": ["JUDGE_API_KEY"]},
            "teacher": [{"name": "t", "url": "http://t", "key_variable": "TEACHER_API_KEY"}],
        }
    )
    table = {name: held for name, held in secrets_table().items() if name not in OF_THE_LAUNCHER}
    assert len(table) > 12
    env = {name: ADDRESS if name in IN_ADDRESSES else "planted" for name in table}
    plain = {"HOME": "/h", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1", "MAX_TOKENS": "8", "TOKENIZERS_PARALLELISM": "false"}
    given = {str(role): given_to(role, config, env | plain) for role in Role}
    given["trackers"] = given_to_trackers(config.logging.logger, env | plain)
    for name, held in table.items():
        assert {role for role in given if name in given[role]} == held - {"reward"}, name
    assert all(plain.items() <= found.items() for found in given.values())
    assert withheld(config, env) == sorted(
        name for name, held in table.items() if not held and not name.startswith("COSMOS_")
    )
    ours = {"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONIOENCODING", "NO_PROXY", "no_proxy"}
    assert set(without_secrets(env | plain)) - ours == set(plain)


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("API_KEY", "x", True),
        ("OPENAI_APIKEY", "x", True),
        ("my_secret_value", "x", True),
        ("NPM_CONFIG__AUTH", "x", True),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/key.json", True),
        ("SENTRY_DSN", "x", True),
        ("PIP_INDEX_URL", "https://me:secret@pypi.example/simple", True),
        ("HOOK", "https://hooks.example/x?token=secret", True),
        ("PIP_INDEX_URL", "https://pypi.example/simple", False),
        ("PWD", "/home/me", False),
        ("KEYBOARD", "de", False),
        ("USE_AUTH", "true", False),
        ("VLLM_MAX_TOKENS", "4096", False),
        ("VLLM_MAX_TOKENS_PER_EXPERT_FUSED_MOE_CHUNK", "16384", False),
        ("NCCL_IB_PKEY", "0x8001", False),
        ("TIKTOKEN_CACHE_DIR", "/cache", False),
        ("DB_PASSWORD", "123456", True),
        ("CUDA_VISIBLE_DEVICES", "0", False),
    ],
)
def test_what_looks_like_a_secret(name: str, value: str, secret: bool) -> None:
    assert is_secret(name, value) == secret


def targets(ckpt: dict[str, Any], env: dict[str, str], store: str = "") -> list[str]:
    data = {"train": {"ckpt": ckpt}, "weight_sync": {"store": store}}
    return list(upload_targets(Config.model_validate(data), "run-1", env))


def test_targets_are_named_without_secrets() -> None:
    bucket = {"s3_bucket": "mine", "s3_prefix": "/team/x/"}
    everything = {**bucket, "upload_s3": "all", "upload_hf": True, "hf_repo_name": "me/model"}
    s3, hub = targets(everything, USERS)
    assert s3.endswith("to s3://mine/team/x/run-1/<checkpoint or final>/ at http://store:9000")
    assert "to https://hub.example/me/model, a commit each" in hub
    assert not [text for text in (s3, hub) for secret in ("secret", "session", "hub-secret") if secret in text]
    (final,) = targets({**bucket, "upload_s3": "final"}, {})
    assert final.startswith("the final model to s3://mine/team/x/run-1/final/ at AWS; neither AWS_ACCESS_KEY_ID")
    assert targets({}, USERS) == []
    (weights,) = targets({}, USERS, "s3://mine/weights/")
    assert weights == "every weight version to s3://mine/weights/ at http://store:9000"
    assert targets({}, USERS, "/shared/weights") == []
