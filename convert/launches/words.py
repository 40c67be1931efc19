"""The command line of one job: its program, its options, and Hydra's words.

    python3 -m verl.trainer.main_ppo --config-name=ppo_trainer data.train_batch_size=64
    python examples/start_rlvr_pipeline.py --config_path qwen --config_name rlvr_config
    cosmos-rl --config run.toml

What stands before the program (`torchrun --nproc_per_node 8`, `ray job submit … --`, `nohup`) is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from convert.hydra.words import BadWord, Override, parse_word
from convert.launches.programs import system_of
from schema.config.problem import ConfigError, Problem

_OPTION = re.compile(r"--?([A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)


@dataclass(frozen=True)
class Launch:
    """One job. system: whose program it is. program: its module or file. words: what follows it; before: what stands
    in front of it.

    file, line: where it stands; folder: from which directory relative paths count. env: what it is started with.
    """

    system: str
    program: str
    words: tuple[str, ...]
    file: str = ""
    line: int | None = None
    folder: Path = Path()
    env: Mapping[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()

    @property
    def options(self) -> dict[str, str]:
        """Options of the program by name, with `_` for `-`: `--config-name=x`, `--config_path x`."""
        return _options(self.words)

    @property
    def ranks(self) -> dict[str, int]:
        """The numbers of nodes and of processes on each that torchrun is asked for."""
        names = {"nnodes": "trainer.nnodes", "nproc_per_node": "trainer.n_gpus_per_node"}
        options = _options(self.before)
        return {key: int(options[name]) for name, key in names.items() if options.get(name, "").isdigit()}

    def overrides(self) -> list[Override]:
        """Hydra's words among the others. Raises ConfigError for one that Hydra would refuse."""
        words: list[Override] = []
        problems: list[Problem] = []
        is_value = False
        for word in self.words:
            if is_value or word.startswith("-"):
                is_value = not is_value and _takes_value(word)
                continue
            try:
                words.append(parse_word(word))
            except BadWord as error:
                problems.append(Problem("", f"the word `{word[:80]}`: {error}", file=self.file, line=self.line))
        if problems:
            raise ConfigError(problems)
        return words

    def shown(self) -> str:
        """The job in a few words."""
        return re.sub("\x01[^\x02]*\x02", "…", " ".join((self.program, *self.words)))[:100]


@dataclass(frozen=True)
class Script:
    """The jobs that a script starts. notes: how it was read.

    unknown: of each job, by name what its words depend on. decisive: on what it depends which jobs there are.
    """

    launches: tuple[Launch, ...]
    unknown: tuple[Mapping[str, str], ...] = ()
    decisive: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def asked_by(self, launch: Launch | None) -> dict[str, str]:
        """Values that must be known for one job: what each is, by the name to give it to."""
        unknown = self.unknown[self.launches.index(launch)] if launch is not None else {}
        return {**self.decisive, **unknown}


def _options(words: Sequence[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for position, word in enumerate(words):
        if (match := _OPTION.fullmatch(word)) is None:
            continue
        following = words[position + 1 : position + 2]
        value = match[2] if match[2] is not None else following[0] if following else ""
        options.setdefault(match[1].replace("-", "_"), value)
    return options


def _takes_value(option: str) -> bool:
    return "=" not in option and option.lstrip("-").replace("-", "_") in (
        "config_path",
        "config_name",
        "config_dir",
        "cn",
        "cp",
        "cd",
    )


def launch_of(words: Sequence[str], file: str = "", line: int | None = None, folder: Path = Path()) -> Launch | None:
    """The job that a command line starts; None where none of its words is a program of a system with a reader."""
    for position, word in enumerate(words):
        system = system_of(word, words[position - 1] if position else "")
        if system is None:
            continue
        before = tuple(words[:position])
        return Launch(system, word, tuple(words[position + 1 :]), file, line, folder, before=before)
    return None


def launch_of_text(text: str, file: str, folder: Path) -> Launch | None:
    """The job of a file of words, one in each line, the module first; None where the text is something else.

    Without a module the words are those of verl's own trainer, if their keys are.
    """
    lines = [line.strip() for line in text.splitlines()]
    words = [line for line in lines if line and not line.startswith("#")]
    if not words:
        return None
    launch = launch_of(words, file, 1, folder)
    if launch is not None and words[0] == launch.program:
        return launch
    is_words = all(_is_word(word) for word in words)
    if not is_words or not any(word.lstrip("+~").startswith(("actor_rollout_ref.", "algorithm.")) for word in words):
        return None
    return Launch("verl", "verl.trainer.main_ppo", tuple(words), file, 1, folder)


def _is_word(word: str) -> bool:
    try:
        parse_word(word)
    except BadWord:
        return _OPTION.fullmatch(word) is not None
    return True
