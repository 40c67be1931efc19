"""Environments of processes, and the targets of uploads; the trainer uploads (`checkpoints.uploads`).

Secrets of the user go to the processes that use them, and to no others. What looks like a secret, by its name
(`is_secret`) or as an address with credentials in it, is withheld unless a row below, or the configuration, gives it
to a role; everything else of the environment is handed on as it is.

    AWS_*                          trainers where weights or checkpoints go to a bucket; rollout replicas where
                                   weights do
    AWS_*, GOOGLE_*, GCP_*, AZURE_*, HADOOP_*, KRB5_*
                                   the preparation of data where a dataset is at such an address
    HF_*, HUGGING…, proxies        trainers, rollout replicas, the preparation of data: they load models and data
    `teacher.key_variable`         trainers
    `reward.environment`           rollout replicas and the preparation of data; `rollout_worker.rewards` hands those
                                   alone on to its processes
    WANDB_*, MLFLOW_*, …           the process that feeds trackers, if the tracker is chosen
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from launcher.paths import absolute
from launcher.plan.rundir import RunTokens
from launcher.restarts import Role
from schema.config import Config
from schema.config.secrets import found_in
from schema.util.proxies import spared
from schema.wire.store_url import is_url

HUB = "https://huggingface.co"
_AWS, _HUB, _PROXY = "AWS_", ("HF_", "HUGGING"), re.compile(r"(HTTPS?|ALL|FTP)_PROXY")
_OF_DATA = {"s3": (_AWS,), "gs": ("GOOGLE_", "GCP_"), "hdfs": ("HADOOP_", "KRB5"), "abfs": ("AZURE_",)}
"""Prefixes of the variables that the clients of addresses read, by `Config.data_schemes`."""
_OF_TRACKERS = {
    "wandb": ("WANDB_",),
    "mlflow": ("MLFLOW_", "DATABRICKS_"),
    "swanlab": ("SWANLAB_",),
    "trackio": ("TRACKIO_", *_HUB),
}
"""Prefixes of the variables that the library of a tracker reads."""
_SECRET_WORD = re.compile(
    r"\w*(SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)\w*|\w*(TOKEN|KEY)S?|PASS|PWD|AUTH|PAT|JWT|BEARER|COOKIES?|"
    r"WEBHOOKS?|DSN|PRIVATE"
)
_NO_SECRETS = ("PWD", "OLDPWD", "GPG_KEY", "SSH_AUTH_SOCK", "VLLM_USE_FASTOKENS")
"""GPG_KEY: the fingerprint of Python's own releases in its images."""
_SETTINGS = re.compile(r"(TIKTOKEN|NCCL|UCX|CUDA|TORCH\w*|PYTORCH|TRITON)_\w+")
"""Settings of libraries that have no secrets."""
_NUMBER = re.compile(r"-?\d{1,9}(\.\d+)?|0[xX][0-9a-fA-F]{1,8}")
"""Too short for a secret."""
_EVERYBODYS = ("PATH", "HOME", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")
"""Variables that no process does without, even if `reward.environment` names them."""
_SWITCHES = ("", "0", "1", "true", "false", "yes", "no", "on", "off")


def is_secret(name: str, value: str) -> bool:
    """Whether a variable must be taken for a secret: by its name, or as an address that holds one.

    A word of the name decides (`MY_API_KEY`, `PGPASSWORD`; not `TOKENIZERS_PARALLELISM`). Switches, short numbers
    that are not passwords, and settings of numerical libraries are none.
    """
    upper = name.upper()
    if found_in(value):
        return True
    if value.lower() in _SWITCHES or upper in _NO_SECRETS or _SETTINGS.fullmatch(upper):
        return False
    if _NUMBER.fullmatch(value) and not re.search("PASS|PWD|PIN", upper):
        return False
    return any(_SECRET_WORD.fullmatch(word) for word in upper.split("_"))


def environment(
    role: Role, tokens: RunTokens, url: str, redis_url: str, password: str, tls_ca: str = ""
) -> dict[str, str]:
    """The secrets and addresses that a role gets: its own and no other. `tls_ca`: whom callers of `url` trust."""
    if role is Role.CONTROLLER:
        env = {f"COSMOS_TOKEN_{name.upper()}": getattr(tokens, name) for name in ("user", "rollout", "policy")}
        env["COSMOS_REDIS_URL"] = redis_url
        return {**env, "COSMOS_REDIS_PASSWORD": password} if password else env
    return worker_secrets(url, getattr(tokens, role), tls_ca) if role in (Role.ROLLOUT, Role.POLICY) else {}


def worker_secrets(url: str, token: str, tls_ca: str) -> dict[str, str]:
    """The address of the controller and the token of its role, for a trainer or a generator."""
    return {"COSMOS_CONTROLLER_URL": url, "COSMOS_TOKEN": token, **trust(tls_ca)}


def trust(tls_ca: str) -> dict[str, str]:
    """Whom callers of the controller trust, where that is not whom the system does: `controller.tls_ca`."""
    return {"COSMOS_TLS_CA": absolute(tls_ca)} if tls_ca else {}


def base_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The user's environment, without the secrets and addresses of jobs and without keys of the configuration, which
    may hold credentials: processes read `config.json`. For the user's own secrets see `given_to`,
    for addresses that no proxy is asked for `spared`."""
    private = ("COSMOS_TOKEN", "COSMOS_REDIS_", "COSMOS_CONTROLLER_URL", "COSMOS_REPLICA_", "COSMOS_PARENT_PID")
    kept = {
        key: value
        for key, value in env.items()
        if not key.startswith(private) and not (key.upper().startswith("COSMOS_") and "__" in key)
    }
    root = Path(__file__).resolve().parents[2]
    # Run from a source tree: -P keeps the current directory off the path.
    if (root / "pyproject.toml").exists():
        kept["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, [kept.get("PYTHONPATH")])])
    # What processes print is read as UTF-8.
    return {**kept, **spared(kept), "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8:backslashreplace"}


def credentials_of(
    role: Role,
    env: Mapping[str, str],
    weight_store: str = "",
    rewards: Collection[str] = (),
    teachers: Collection[str] = (),
    uploads: bool = False,
    data: Collection[str] = (),
) -> dict[str, str]:
    """An environment without the secrets that this role has no use for.

    weight_store: `weight_sync.store`. rewards: `reward.environment`, for processes that score.
    teachers: `key_variable` of each, for trainers. uploads: whether trainers upload checkpoints to a bucket.
    data: schemes of the addresses that data is read from.
    """
    buckets = {Role.POLICY} if uploads else set()
    if is_url(weight_store):
        buckets = {Role.POLICY, Role.ROLLOUT}
    loads, scores = role in (Role.POLICY, Role.ROLLOUT, Role.DATA), role in (Role.ROLLOUT, Role.DATA)

    def has_use(name: str) -> bool:
        upper = name.upper()
        if (scores and name in rewards) or (role is Role.POLICY and name in teachers):
            return True
        if role is Role.DATA and any(upper.startswith(_OF_DATA[scheme]) for scheme in data):
            return True
        if upper.startswith(_AWS):
            return role in buckets
        return loads and (upper.startswith(_HUB) or _PROXY.fullmatch(upper) is not None)

    named = set(teachers) - set(_EVERYBODYS)
    return {
        name: value
        for name, value in env.items()
        if has_use(name) or not (is_secret(name, value) or name.startswith(_AWS) or name in named)
    }


def given_to(role: Role, config: Config, env: Mapping[str, str]) -> dict[str, str]:
    """Return what a process of a job gets of the environment of its machine's launcher."""
    teachers = [teacher.key_variable for teacher in config.teacher if teacher.key_variable]
    store, rewards = config.weight_sync.store, config.reward.environment
    uploads = bool(config.train.ckpt.upload_s3)
    return credentials_of(role, base_environment(env), store, rewards, teachers, uploads, config.data_schemes)


def given_to_trackers(trackers: Collection[str], env: Mapping[str, str]) -> dict[str, str]:
    """Return what the process that feeds these trackers gets of the environment: of the secrets, theirs."""
    prefixes = tuple(prefix for name in trackers for prefix in _OF_TRACKERS.get(name, ()))
    if "mlflow" in trackers and (
        env.get("MLFLOW_TRACKING_URI", "").startswith("arn:") or env.get("MLFLOW_TRACKING_AWS_SIGV4")
    ):
        prefixes += (_AWS,)
    return {
        name: value
        for name, value in base_environment(env).items()
        if (prefixes and name.upper().startswith(prefixes))
        or (prefixes and _PROXY.fullmatch(name.upper()))
        or not (is_secret(name, value) or name.startswith(_AWS))
    }


def without_secrets(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that has a use for none."""
    return credentials_of(Role.REDIS, base_environment(env))


def withheld(config: Config, env: Mapping[str, str]) -> list[str]:
    """Names of variables that look like secrets and reach no process of the job."""
    passed_on = set(given_to_trackers(config.logging.logger, env))
    for role in Role:
        passed_on |= set(given_to(role, config, env))
    return sorted(set(base_environment(env)) - passed_on)


def upload_targets(config: Config, run: str, env: Mapping[str, str]) -> Iterator[str]:
    """One line for each target. Names no credential."""
    ckpt, store = config.train.ckpt, config.weight_sync.store
    if is_url(store) and config.generates and not config.is_evaluation:
        yield f"every weight version to {store.rstrip('/')}/ {_bucket_access(env)}"
    if ckpt.upload_s3 and ckpt.s3_bucket:
        uploads = "the final model" if ckpt.upload_s3 == "final" else "every checkpoint and the final model"
        prefix = "/".join([*filter(None, ckpt.s3_prefix.split("/")), run])
        name = "final" if ckpt.upload_s3 == "final" else "<checkpoint or final>"
        yield f"{uploads} to s3://{ckpt.s3_bucket}/{prefix}/{name}/ {_bucket_access(env)}"
    if ckpt.upload_hf:
        note = "" if env.get("HF_TOKEN") else "; HF_TOKEN is not set: the login stored on this machine is used"
        endpoint = _without_credentials(env.get("HF_ENDPOINT") or HUB)
        yield f"exports of checkpoints and the final model to {endpoint}/{ckpt.hf_repo_name}, a commit each{note}"


def _bucket_access(env: Mapping[str, str]) -> str:
    """At which endpoint, and with whose credentials."""
    endpoint = env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL") or "AWS"
    keyed = any(env.get(key) for key in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE"))
    note = "" if keyed else "; neither AWS_ACCESS_KEY_ID nor AWS_PROFILE is set: a role of this machine is used"
    return f"at {_without_credentials(endpoint)}{note}"


def _without_credentials(url: str) -> str:
    parsed = urlsplit(url)
    if parsed.hostname is None:
        return url
    return f"{parsed.scheme}://{parsed.hostname}" + (f":{parsed.port}" if parsed.port else "") + parsed.path
