"""The readers' names for hints of our own loader; the tables are imported when the first hint asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schema.config.loading import other_systems
from schema.config.loading.other_systems import Theirs
from schema.config.problem import Problem


class Hints:
    """`OtherSystems`, answered by the readers of this package."""

    def recognise(self, text: str, name: str) -> Problem | None:
        """Say what a text that is not TOML is; see `convert.recognise`."""
        from convert import recognise

        return recognise(text, name)

    def described(self, data: Mapping[str, Any]) -> tuple[str, str] | None:
        """Return message and hint of a system that no reader reads, else None."""
        from convert.foreign import described, other_system

        system = other_system(data)
        return None if system is None else described(system)

    def names_here(self, name: str) -> tuple[Theirs, ...]:
        """Return their keys of this name; see `convert.engine.names`."""
        from convert.engine import names

        return names.names_here(name)

    def systems_of_table(self, name: str) -> str:
        """Say whose files have this table at their top."""
        from convert.engine import names

        return names.systems_of_table(name)

    def names_elsewhere(self) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
        """Return our key -> system -> its keys."""
        from convert.engine import names

        return names.names_elsewhere()


def install() -> None:
    """Let our loader's hints name other systems' keys, in this process."""
    other_systems.install(Hints())
