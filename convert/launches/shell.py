"""The jobs that a shell script starts: bash runs it in a sandbox in which no program is, and prints each command.

    script ──bash, no programs──▶ trace ─▶ commands ─▶ jobs
        ▲                           │ unset variables, missing directories
        └──────── once more ◀───────┘

Variables, arrays, functions and loops are bash's own. What a job's words take from the output of a command, from an
argument or from a variable that is not set is asked for by name; so is what decides which commands follow, where that
changes the jobs. Where bubblewrap does not work the text is read as it is.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import NamedTemporaryFile

from convert.launches.shell_text import KNOWN_PS4, MARKER, Command, commands, script_of_text
from convert.launches.words import Launch, Script, launch_of
from schema.config.problem import ConfigError, Problem
from schema.sandbox.bubblewrap import Outcome, Sandbox, programs, why_not

BASH = Path("/bin/bash")
MOST_RUNS = 40
MOST_JOBS = 100
_RECORDER = Path(__file__).with_name("recorder.sh")
_UNBOUND = re.compile(r"line \d+: \$?(\w+): unbound variable")
_ABSENT = re.compile(r"line \d+: (?:(cd): )?(.+): No such file or directory")
_NAME = re.compile(r"[A-Za-z_]\w*")
_ENDED = {
    "time": "does not end within {0.seconds:g} s",
    "memory": "takes more than 256 MiB of memory",
    "processes": "starts more than {0.processes} processes at once",
    "output": "prints more than 2 MiB, or runs more commands than jobs need",
}


def launches_of(path: Path, text: str, answers: Mapping[str, str], home: str = "") -> Script:
    """The jobs of a script. answers: values by the name of a variable, number of an argument, or command.

    Raises ConfigError: it does not end, or starts no job.
    """
    reason = why_not() if BASH.exists() else f"{BASH} is not there"
    script = _Recorded(path, answers, home).read() if not reason else script_of_text(path, text, answers, home)
    if reason:
        note = f"{reason}: {path} was read without running it, so that functions, loops and conditions do not count"
        script = replace(script, notes=(note, *script.notes))
    if not script.launches and not script.decisive:
        message = "a shell script that starts no job of verl, ROLL or cosmos-rl"
        hint = "convert the script or the configuration that it calls; `--env NAME=VALUE` gives it a variable"
        raise ConfigError([Problem("", message, hint=hint, file=str(path))])
    return script


@dataclass
class _Recorded:
    """Runs of one script, with what the run before lacked."""

    path: Path
    answers: Mapping[str, str]
    home: str
    unset: set[str] = field(default_factory=set)
    folders: dict[Path, None] = field(default_factory=dict)
    absent: dict[Path, None] = field(default_factory=dict)

    def read(self) -> Script:
        outcome = self._run({})
        for _ in range(MOST_RUNS):
            if not self._lacked(outcome):
                break
            outcome = self._run({})
        traced = self._commands(outcome)
        launches = self._launches(traced)
        unknown = [_markers(" ".join(launch.words)) for launch in launches]
        decisive = self._decisive(traced, launches, outcome) - set().union(*unknown)
        notes = [f"{path} is not read: it is taken for an empty file" for path in self.absent]
        return Script(
            tuple(launches),
            tuple(_names(markers, traced) for markers in unknown),
            _names(decisive, traced),
            tuple(notes),
        )

    def _decisive(self, traced: Sequence[Command], launches: Sequence[Launch], outcome: Outcome) -> set[str]:
        """The markers with another value of which there are other jobs, or that cannot be tried."""
        decisive = _markers(outcome.stderr.decode(errors="replace"))
        tried: set[tuple[str, str]] = set()
        held = {name: f"\x01${name}\x02" for name in self.unset}
        for command in traced:
            held |= dict([command.assigned]) if command.assigned else {}
            for marker in _markers(command.decided_by(held)) - decisive if command.is_condition else ():
                values = command.compared_with()
                if values is None or len(tried) > MOST_RUNS:
                    decisive.add(marker)
                    continue
                for value in values:
                    if (marker, value) not in tried and marker not in decisive:
                        tried.add((marker, value))
                        others = self._launches(self._commands(self._run({marker: value})))
                        if [_known(launch, {marker: value}) for launch in launches] != [o.words for o in others]:
                            decisive.add(marker)
        return decisive

    def _run(self, values: Mapping[str, str]) -> Outcome:
        """Run it once. values: for markers by what they stand for, in place of the markers."""
        environment = {"HOME": self.home or "/root", "PATH": "/nonexistent", "TERM": "dumb", "LANG": "C.UTF-8"}
        known = {name: f"\x01${name}\x02" for name in self.unset}
        known |= {name.removeprefix("$"): value for name, value in values.items() if name.startswith("$")}
        known |= self.answers
        named = {name: value for name, value in known.items() if _NAME.fullmatch(name)}
        arguments = [known.get(str(number), "") for number in range(1, 1 + max(map(_number, known), default=0))]
        of_commands = {name: value for name, value in {**values, **known}.items() if not name.startswith("$")}
        fixed = {name: value for name, value in named.items() if name in self.answers}
        folder, place, home = Path.cwd(), self.path.absolute(), Path(environment["HOME"])
        visible = place if place.parent in (Path("/"), home) else place.parent
        writable = [Path("/tmp"), home, *self.folders]  # noqa: S108 - of the sandbox
        writable += [] if folder.is_relative_to(visible) else [folder]
        with NamedTemporaryFile("w", suffix=".sh") as recorder:
            recorder.write(_recorder(fixed, of_commands))
            recorder.flush()
            readable = [*programs([BASH]), (visible, visible), (Path(recorder.name), _RECORDED_BY)]
            readable += [(Path("/dev/null"), path) for path in self.absent]
            environment |= {**named, "BASH_ENV": str(_RECORDED_BY)}
            sandbox = Sandbox(readable, writable, environment, folder)
            outcome = sandbox.run([str(BASH), str(self.path), *arguments], "BASH_XTRACEFD")
        if outcome.ended_by:
            message = "a shell script that " + _ENDED[outcome.ended_by].format(sandbox.limits)
            hint = "take out of it what does not start the job, or give it a variable: --env NAME=VALUE"
            raise ConfigError([Problem("", message, hint=hint, file=str(self.path))])
        return outcome

    def _lacked(self, outcome: Outcome) -> bool:
        """Note what the run lacked: variables that are not set, directories that are not there. Whether it is new."""
        before = len(self.unset) + len(self.folders) + len(self.absent)
        text = outcome.stderr.decode(errors="replace")
        self.unset |= set(_UNBOUND.findall(text)) - self.answers.keys()
        called = {word for command in self._commands(outcome) for word in command.words[:1]}
        for changes, name in _ABSENT.findall(text):
            path = Path.cwd() / name
            if "\x01" in name or name in called or str(path).startswith("/dev"):
                continue
            if changes:
                self.folders[path] = None
            elif path.parent in self.folders or path.parent.is_relative_to(self.path.absolute().parent):
                self.absent[path] = None
            else:
                self.folders[path.parent] = None
        return len(self.unset) + len(self.folders) + len(self.absent) > before

    def _commands(self, outcome: Outcome) -> list[Command]:
        return list(commands(outcome.channel.decode(errors="replace"), _OURS))

    def _launches(self, traced: Sequence[Command]) -> list[Launch]:
        """The jobs among the commands, each once, with what was exported before."""
        environment: dict[str, str] = {}
        launches: dict[tuple[str, ...], Launch] = {}
        for command in traced:
            if (assigned := command.assigned) is not None:
                environment |= {} if assigned[0] == "PS4" or assigned[1].startswith("(") else dict([assigned])
                continue
            launch = _launch(command, str(self.path), self.path.absolute().parent)
            if launch is not None and len(launches) < MOST_JOBS:
                known = {name: value for name, value in environment.items() if not MARKER.search(value)}
                launches.setdefault((launch.program, *launch.words), replace(launch, env=known))
        return list(launches.values())


_RECORDED_BY = Path("/recorder.sh")
_OURS = frozenset({"set +e -uxT", KNOWN_PS4, "PS4='", 'case "$*" in', ":", "set -uxT", "trap - DEBUG"})


def _recorder(fixed: Mapping[str, str], answers: Mapping[str, str]) -> str:
    """The recorder with values of variables, and with what commands print."""
    cases = [
        f"    {shlex.quote(command)}) printf '%s\\n' {shlex.quote(value)} ;;" for command, value in answers.items()
    ]
    values = "".join(f"{name}={shlex.quote(value)}; " for name, value in fixed.items())
    template = _RECORDER.read_text(encoding="utf-8")
    inner = f"set +e -uxT; {KNOWN_PS4}; {values}:"
    return template.replace("__ANSWERS__", "\n".join(cases)).replace("__TRAP__", shlex.quote(inner))


def _launch(command: Command, file: str, folder: Path) -> Launch | None:
    """The job of a command, or of the commands that it hands to a shell as a text."""
    words = command.words
    if (launch := launch_of(words, file, command.line, folder)) is not None:
        return launch
    for text in words:
        if " " in text:
            try:
                inner = shlex.split(text)
            except ValueError:
                continue
            if (launch := launch_of(inner, file, command.line, folder)) is not None:
                return launch
    return None


def _known(launch: Launch, values: Mapping[str, str]) -> tuple[str, ...]:
    """The words of a job with values in place of markers."""

    def value(match: re.Match[str]) -> str:
        return values.get(match[1].replace("\x03", " "), match[0])

    return tuple(MARKER.sub(value, word) for word in launch.words)


def _number(name: str) -> int:
    return int(name) if name.isdigit() else 0


def _markers(text: str) -> set[str]:
    return {marker.replace("\x03", " ") for marker in MARKER.findall(text)}


def _names(asked: set[str], traced: Sequence[Command]) -> dict[str, str]:
    """For each marker the name to give a value to, and what it stands for."""
    names: dict[str, str] = {}
    for marker in sorted(asked):
        if marker.startswith("$"):
            name = marker.removeprefix("$")
            names[name] = f"argument {name} of the script" if name.isdigit() else "a variable that is not set"
            continue
        whole = "\x01" + marker.replace(" ", "\x03") + "\x02"
        holders = [command.assigned[0] for command in traced if command.assigned and command.assigned[1] == whole]
        names[holders[0] if holders else marker] = f"the output of `{marker}`"
    return names
