"""What a file leaves to others: a script that starts a job, and Hydra's `defaults`; how to get the whole of it."""

from __future__ import annotations

import re
from typing import Any

from schema.config.problem import ConfigError, Problem

_MODULE = re.compile(r"-m\s+((?:verl|recipe)[\w.]*)")
_VERL = "python3 -m {module} … --cfg job --resolve > run.yaml"
_MAIN = "verl.trainer.main_ppo"


def refuse_script(text: str, name: str) -> None:
    """Raise ConfigError for a shell script, with the way to the configuration that it starts."""
    if not name.endswith((".sh", ".bash", ".slurm", ".sbatch")) and not text.startswith("#!"):
        return
    module = _MODULE.search(text)
    if module or "verl" in text:
        command = _VERL.format(module=module[1] if module else _MAIN)
        hint = (
            f"let its own command print what it composes, with all its overrides, and convert that: {command}"
        )
    elif "--config_path" in text or "--config_name" in text:
        hint = "convert the YAML that its --config_path and --config_name name"
    else:
        hint = (
            f"convert the YAML or TOML that its --config names; of verl, let Hydra print it: "
            f"{_VERL.format(module=_MAIN)}"
        )
    raise ConfigError([Problem("", "a shell script, not a configuration", hint=hint, file=name)])


def not_read(defaults: Any, system: str = "") -> tuple[str, str]:
    """What to say of Hydra's list of defaults, and the remedy; ("", "") where it names no other file.

    system: whose file it is; "" where that is not known.
    """
    names = [name for name in map(_name, defaults if isinstance(defaults, list) else []) if name]
    if not names:
        return "", ""
    composed = (
        f"convert what Hydra composes: {_VERL.format(module=_MAIN)}, with the --config-name of this file"
    )
    written = "write their keys into this file"
    remedy = {"verl": composed, "": f"{written}, or of verl {composed}"}.get(system, written)
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f"`defaults` names files that are not read: {shown}", remedy


def _name(entry: Any) -> str:
    """One file of the list: `ppo_trainer`, or `actor@actor_rollout_ref.actor: dp_actor`; "" for the file itself."""
    if isinstance(entry, dict):
        return ", ".join(f"{group}: {name}" for group, name in entry.items() if name not in (None, "null"))
    return "" if entry in ("_self_", None) else str(entry)
