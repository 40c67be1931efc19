"""Names that other systems have for our keys: whoever has them is installed, and hints of unknown keys ask it.

    convert.hints ──install()──▶ this ◀──other_systems()── hints, explain, docs/config.md

This package knows no other system. `cosmos-launch` and the controller install `convert.hints` when they start;
without it an unknown key is compared with our own names alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from schema.config.problem import Problem


@dataclass(frozen=True)
class Theirs:
    """A key of another system. ours: keys that it is turned into, if any. reason: why there is none."""

    system: str
    key: str
    ours: tuple[str, ...] = ()
    reason: str = ""


class OtherSystems(Protocol):
    """Names of other systems, by what a hint asks for."""

    def recognise(self, text: str, name: str) -> Problem | None:
        """Say what a text that is not TOML is: a file of a system, a script; None: none of these. name: its file."""

    def described(self, data: Mapping[str, Any]) -> tuple[str, str] | None:
        """Return message and hint of the system whose keys `data` has, if no converter reads that system."""

    def names_here(self, name: str) -> tuple[Theirs, ...]:
        """Return the keys of other systems with this name, or whose last parts it is; names of ours left out."""

    def systems_of_table(self, name: str) -> str:
        """Say whose files have a table of this name at their top: "verl's and cosmos-rl's"; "" for nobody's."""

    def names_elsewhere(self) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
        """Return our key -> system -> its keys that are turned into ours."""


class Nobody:
    """No other system is known."""

    def recognise(self, text: str, name: str) -> Problem | None:
        """Return None."""
        return None

    def described(self, data: Mapping[str, Any]) -> tuple[str, str] | None:
        """Return None."""
        return None

    def names_here(self, name: str) -> tuple[Theirs, ...]:
        """Return nothing."""
        return ()

    def systems_of_table(self, name: str) -> str:
        """Return nothing."""
        return ""

    def names_elsewhere(self) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
        """Return nothing."""
        return {}


_INSTALLED: list[OtherSystems] = [Nobody()]


def other_systems() -> OtherSystems:
    """Return whoever was installed last, else `Nobody`."""
    return _INSTALLED[-1]


def install(systems: OtherSystems) -> None:
    """Let hints of this process ask `systems`."""
    _INSTALLED[:] = [systems]
