"""Files of systems that have no reader: what they look like, and what can be done.

A configuration is recognised by a few telling keys, a script by the modules and options that it names. The table has
a row for each system. Those that are made from verl keep most of its keys, so any one of their own keys tells them,
and they come first. A file with a key that only a system with a reader has is read as that one's, unless it matches a
system made from verl.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.engine.keys import lookup


@dataclass(frozen=True)
class Foreign:
    """A system without a reader.

    title: its name in sentences. signs: each a group of dotted keys that tell it when a file has all of them.
    script: a pattern of what a script or command line of it names. remedy: what can be done, before what can always
    be done.
    """

    title: str
    signs: tuple[str, ...]
    script: str
    remedy: str

    @property
    def is_made_from_verl(self) -> bool:
        """Whether its files have verl's keys, next to its own."""
        return self.remedy.startswith("it is made from verl")

    def matches(self, data: Mapping[str, Any]) -> bool:
        """Whether a configuration has all keys of one of the signs."""
        absent = object()
        return any(
            all(lookup(data, tuple(key.split(".")), absent) is not absent for key in sign.split())
            for sign in self.signs
        )


def _read(text: str) -> Iterator[Foreign]:
    """The rows of `foreign.txt`, whose columns have two blanks between them."""
    remedy = ""
    for line in filter(None, text.splitlines()):
        if line.startswith("=="):
            remedy = line[3:]
        elif not line.startswith("#"):
            title, signs, script = line.split("  ")
            yield Foreign(
                title, () if signs == "-" else tuple(signs.split(", ")), "" if script == "-" else script, remedy
            )


SYSTEMS_WITHOUT_READER = tuple(_read(Path(__file__).with_name("foreign.txt").read_text("utf-8")))
"""In the order in which they are asked."""

_MODULE = re.compile(r"(?:-m\s+|^\s*)((?:verl|recipe)\.[\w.]+)", re.MULTILINE)
VERL_COMMAND = "python3 -m {module} … --cfg job --resolve > run.yaml"
VERL_MAIN = "verl.trainer.main_ppo"
_VERL_SCRIPT = re.compile(
    r"(?<![\w/.])(?:verl\.trainer|verl\.\w+\.main|recipe\.\w+)|(?<![\w.])(?:actor_rollout_ref\.|"
    r"algorithm\.(?:adv_estimator|use_kl_in_reward|norm_adv_by_std_in_grpo)=)"
)
_ROLL_SCRIPT = re.compile(
    r"--config_path\b|\bstart_\w+_pipeline\b|(?<![\w/.])roll\.(?:pipeline|distributed|configs|utils)\b"
)
_COSMOS_SCRIPT = re.compile(r"\bcosmos[-_]rl\b|\bcosmos-launch\b")

_SHELL = re.compile(
    r"^[ \t]*(?:\w+=\S+[ \t]+)*(?:exec |nohup |srun |(?:uv|poetry) run )?(?:python[\d.]*|torchrun|deepspeed|bash|sh|"
    r"srun|sbatch|accelerate launch|ray job submit|uv run|llamafactory-cli|axolotl|tune run|swift|trl)(?=\s|$)",
    re.MULTILINE,
)
_OPTION = re.compile(r"(?:^|\s)--[a-zA-Z][\w.-]*(?=[\s=\\]|$)", re.MULTILINE)
_PYTHON = re.compile(r"^(?:from [\w.]+ import |import [\w.]+|def \w+\(|class \w+[:(]|if __name__ )", re.MULTILINE)
_OVERRIDE = re.compile(r"(?:^|\s)[+~]{0,2}[a-zA-Z_][\w@/]*(?:\.[\w@/]+)+=\S", re.MULTILINE)
_COMMENT = re.compile(r"^[ \t]*#.*$", re.MULTILINE)
_KEY = re.compile(r"^[ \t]*(?:- )?[\w.]+:(?=[ \t]|$)", re.MULTILINE)


def other_system(data: Mapping[str, Any]) -> Foreign | None:
    """The system without a reader that a configuration looks like; None where no row matches."""
    return next((system for system in SYSTEMS_WITHOUT_READER if system.matches(data)), None)


def by_hand(title: str = "") -> str:
    """The way on for a file that has no reader. title: the system that it may be a fork of."""
    new_file = (
        "write the job as a configuration of ours: `cosmos-launch init` begins one, and `cosmos-launch explain NAME` "
        "finds our key for a name of verl, ROLL or cosmos-rl"
    )
    if not title:
        return new_file[0].upper() + new_file[1:]
    return f"of a fork of {title}, remove its own keys or accept each by name (--allow-unknown KEY); else {new_file}"


def described(system: Foreign) -> tuple[str, str]:
    """The message and the hint of an error about a configuration of this system."""
    message = f"this looks like a file of {system.title}, which `convert` does not read"
    return message, _joined(system.remedy)


def script_kind(text: str, name: str) -> str:
    """Which script a text is by its name or first line; "" for any other text."""
    if name.endswith((".sh", ".bash", ".zsh", ".slurm", ".sbatch")) or re.match(r"#!.*\b(?:ba|z|)sh\b", text):
        return "a shell script"
    if name.endswith(".py") or re.match(r"#!.*python", text):
        return "a Python script"
    return "a script" if text.startswith("#!") else ""


def command_kind(text: str) -> str:
    """The kind of a text that cannot be read as keys: a script, a command line, words of one; "" for any other."""
    code = _COMMENT.sub("", text)
    if _PYTHON.search(code) and not _SHELL.search(code):
        return "a Python script"
    if len(_KEY.findall(code)) > 1:
        return ""
    if len(_OVERRIDE.findall(code)) >= 2 and not _SHELL.search(code):
        return "words of a command line"
    if _SHELL.search(code) or len(_OPTION.findall(code)) >= 2:
        return "a command line"
    return ""


def script_problem(kind: str, text: str) -> tuple[str, str]:
    """The message and the hint of an error about a script or a command line.

    kind: as `script_kind` or `command_kind` name it.
    """
    code = _COMMENT.sub("", text)
    counts = {
        system.title: len(re.findall(system.script, code, re.MULTILINE))
        for system in SYSTEMS_WITHOUT_READER
        if system.script
    }
    with_reader = {"verl": _VERL_SCRIPT, "ROLL": _ROLL_SCRIPT, "cosmos-rl": _COSMOS_SCRIPT}
    of_verl = [
        system.title for system in SYSTEMS_WITHOUT_READER if counts.get(system.title) and system.is_made_from_verl
    ]
    counts |= {title: len(pattern.findall(code)) for title, pattern in with_reader.items()}
    title = max(counts, key=lambda name: counts[name]) if any(counts.values()) else ""
    if title == "verl" and of_verl:
        title = of_verl[0]
    if not title:
        return (
            f"{kind}, not a configuration",
            f"convert the YAML or TOML that it names, if it names one. {by_hand()}",
        )
    hint = _script_hint(title, code)
    if kind == "a shell script" and title in with_reader:
        hint = f"`cosmos-launch convert` reads the job that it starts; or {hint}"
    return f"{kind} of {title}, not a configuration", hint


def _script_hint(title: str, code: str) -> str:
    if title == "verl":
        module = _MODULE.search(code)
        command = VERL_COMMAND.format(module=module[1] if module else VERL_MAIN)
        return f"let its own command print what it composes, with all its overrides, and convert that: {command}"
    if title == "ROLL":
        return "convert the YAML that its --config_path and --config_name name"
    if title == "cosmos-rl":
        return "convert the TOML that its --config names"
    remedy = next(system.remedy for system in SYSTEMS_WITHOUT_READER if system.title == title)
    return _joined(remedy)


def _joined(remedy: str) -> str:
    return f"{remedy}. {by_hand()}" if remedy else by_hand()
