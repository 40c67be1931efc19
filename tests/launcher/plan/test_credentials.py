"""Where uploads go is reported beforehand, and only the trainer gets their credentials."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.plan.credentials import credentials_of, upload_targets
from launcher.restarts import Role
from schema.config import Config

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


@pytest.mark.parametrize("store", ["", "/shared/weights", "s3://bucket/weights"])
@pytest.mark.parametrize("role", Role)
def test_a_role_gets_what_it_has_a_use_for(role: Role, store: str) -> None:
    given = credentials_of(role, USERS, store)
    reads = role is Role.ROLLOUT and store.startswith("s3://")
    assert given["HOME"] == "/h"
    assert given["HF_HOME"] == "/h/hf"
    assert {name for name in given if name.startswith("AWS_")} == (
        {name for name in USERS if name.startswith("AWS_")} if role is Role.POLICY or reads else set()
    )
    named = credentials_of(role, USERS, store, ["AWS_SESSION_TOKEN"])
    scores = {"AWS_SESSION_TOKEN": "aws-session"} if role in (Role.ROLLOUT, Role.DATA) else {}
    assert named == {**given, **scores}
    taught = credentials_of(role, {**USERS, "KEY": "k"}, store, teachers=["KEY"])
    assert ("KEY" in taught) == (role is Role.POLICY)
    assert ("HF_TOKEN" in given) == (role not in (Role.CONTROLLER, Role.REDIS))


def targets(ckpt: dict[str, Any], env: dict[str, str], store: str = "") -> list[str]:
    data = {"train": {"ckpt": ckpt}, "weight_sync": {"store": store}}
    return list(upload_targets(Config.model_validate(data), "run-1", env))


def test_targets_are_named_without_secrets() -> None:
    bucket = {"s3_bucket": "mine", "s3_prefix": "/team/x/"}
    everything = {**bucket, "upload_s3": "all", "upload_hf": True, "hf_repo_name": "me/model"}
    s3, hub = targets(everything, USERS)
    assert s3.endswith("to s3://mine/team/x/run-1/<checkpoint or final>/ at http://store:9000")
    assert "to https://hub.example/me/model, a commit each" in hub
    assert not [
        text for text in (s3, hub) for secret in ("secret", "session", "hub-secret") if secret in text
    ]
    (final,) = targets({**bucket, "upload_s3": "final"}, {})
    assert final.startswith(
        "the final model to s3://mine/team/x/run-1/final/ at AWS; neither AWS_ACCESS_KEY_ID"
    )
    assert targets({}, USERS) == []
    (weights,) = targets({}, USERS, "s3://mine/weights/")
    assert weights == "every weight version to s3://mine/weights/ at http://store:9000"
    assert targets({}, USERS, "/shared/weights") == []
