"""What a job uploads where, reported before anything starts; the trainer uploads (`checkpoints.uploads`).

Credentials go to those who use them. AWS_*: to the trainer, and to rollout replicas where the weight store is a
bucket; to no other process of a job, rewards among them (`rollout_worker.rewards` passes on a short list, and what
`reward.environment` names). The token
of the Hugging Face hub: to trainers, generators and the preparation of data, which need it for gated models.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from urllib.parse import urlsplit

from launcher.plan.rundir import base_environment
from launcher.restarts import Role
from schema.config import Config
from schema.wire.store_url import is_url

HUB = "https://huggingface.co"
_AWS = "AWS_"
_HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN", "HUGGINGFACE_TOKEN")


def credentials_of(
    role: Role,
    env: Mapping[str, str],
    weight_store: str = "",
    rewards: Collection[str] = (),
    teachers: Collection[str] = (),
) -> dict[str, str]:
    """An environment without the credentials that this role has no use for.

    weight_store: `weight_sync.store`. rewards: `reward.environment`, which whoever scores has a use for.
    teachers: `key_variable` of each, which trainers have a use for.
    """
    kept, buckets = dict(env), {Role.POLICY, Role.ROLLOUT} if is_url(weight_store) else {Role.POLICY}
    scores = role in (Role.ROLLOUT, Role.DATA)
    for name in env:
        if scores and name in rewards:
            continue
        if name in teachers and role is not Role.POLICY:
            del kept[name]
            continue
        is_hub = name in _HUB_TOKENS and role in (Role.CONTROLLER, Role.REDIS)
        if is_hub or (name.startswith(_AWS) and role not in buckets):
            del kept[name]
    return kept


def given_to(role: Role, config: Config, env: Mapping[str, str]) -> dict[str, str]:
    """What a process of a job gets of the environment of its machine's launcher."""
    teachers = [one.key_variable for one in config.teacher if one.key_variable]
    store, rewards = config.weight_sync.store, config.reward.environment
    return credentials_of(role, base_environment(env), store, rewards, teachers)


def upload_targets(config: Config, run: str, env: Mapping[str, str]) -> Iterator[str]:
    """One line for each target. Names no credential."""
    ckpt, store = config.train.ckpt, config.weight_sync.store
    if is_url(store) and config.is_grpo and not config.is_evaluation:
        yield f"every weight version to {store.rstrip('/')}/ {_bucket_access(env)}"
    if ckpt.upload_s3 and ckpt.s3_bucket:
        what = "the final model" if ckpt.upload_s3 == "final" else "every checkpoint and the final model"
        prefix = "/".join([*filter(None, ckpt.s3_prefix.split("/")), run])
        name = "final" if ckpt.upload_s3 == "final" else "<checkpoint or final>"
        yield f"{what} to s3://{ckpt.s3_bucket}/{prefix}/{name}/ {_bucket_access(env)}"
    if ckpt.upload_hf:
        given = (
            "" if env.get("HF_TOKEN") else "; HF_TOKEN is not set: the login stored on this machine is used"
        )
        endpoint = _without_credentials(env.get("HF_ENDPOINT") or HUB)
        yield f"exports of checkpoints and the final model to {endpoint}/{ckpt.hf_repo_name}, a commit each{given}"


def _bucket_access(env: Mapping[str, str]) -> str:
    """At which endpoint, and with whose credentials."""
    endpoint = env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL") or "AWS"
    keyed = any(env.get(key) for key in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE"))
    given = (
        "" if keyed else "; neither AWS_ACCESS_KEY_ID nor AWS_PROFILE is set: a role of this machine is used"
    )
    return f"at {_without_credentials(endpoint)}{given}"


def _without_credentials(url: str) -> str:
    parsed = urlsplit(url)
    if parsed.hostname is None:
        return url
    return f"{parsed.scheme}://{parsed.hostname}" + (f":{parsed.port}" if parsed.port else "") + parsed.path
