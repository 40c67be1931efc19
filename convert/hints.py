"""The readers' names for hints of our own loader: what other systems call a key of ours, and what we call theirs.

names_elsewhere()["rollout.n_generation"] ─▶ {"verl": ("actor_rollout_ref.rollout.n",), "ROLL": (…)}
names_here("rollout.n") ─▶ (Theirs("verl", "actor_rollout_ref.rollout.n", ("rollout.n_generation",)),)

Launcher and controller install `Hints` when they start; the tables are imported when the first hint asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from schema.config.keys import leaf_keys
from schema.config.loading import other_systems
from schema.config.loading.other_systems import Theirs
from schema.config.problem import Problem


@cache
def names_elsewhere() -> Mapping[str, Mapping[str, tuple[str, ...]]]:
    """Our key -> system -> its keys that are turned into ours, in the order of its tables; our own name left out.

    A key that decides about several of ours stands with each of them. Older spellings are left out.
    """
    from convert.engine.registry import readers  # the tables are only needed for a hint

    found: dict[str, dict[str, dict[str, None]]] = {}
    for reader in readers():
        for kind in reader.kinds:
            for rule in reader.rules(kind):
                for ours in rule.converter.ours:
                    if rule.key.removesuffix(".*") != ours:
                        found.setdefault(ours, {}).setdefault(reader.title, {})[rule.key] = None
    return {ours: {system: tuple(keys) for system, keys in systems.items()} for ours, systems in found.items()}


def names_here(name: str) -> tuple[Theirs, ...]:
    """The keys of other systems with this name, or whose last parts it is; those with keys of ours first.

    Names that are ours too are left out.
    """
    parts = name.split(".")
    known = _by_last_part()
    found = [theirs for theirs in known.get(parts[-1], ()) if theirs.key == name or theirs.key.endswith(f".{name}")]
    tables = (".".join([*parts[:end], "*"]) for end in range(len(parts) - 1, 0, -1))
    found = found or next((list(known[key]) for key in tables if key in known), [])
    return tuple(sorted(found, key=lambda theirs: (not theirs.ours, theirs.key != name)))


def systems_of_table(name: str) -> str:
    """Name the systems whose files have such a table at their top: "verl's and cosmos-rl's"; "" for none."""
    return " and ".join(f"{system}'s" for system in _tables().get(name, ()))


@cache
def _tables() -> Mapping[str, Mapping[str, None]]:
    found: dict[str, dict[str, None]] = {}
    for theirs in (theirs for some in _by_last_part().values() for theirs in some if "." in theirs.key):
        found.setdefault(theirs.key.partition(".")[0], {})[theirs.system] = None
    return found


@cache
def _by_last_part() -> Mapping[str, tuple[Theirs, ...]]:
    """Keys by their last part, those that end in `.*` by themselves."""
    from convert.engine.registry import readers  # the tables are only needed for a hint

    ours = set(leaf_keys())
    found: dict[str, list[Theirs]] = {}
    for reader in readers():
        rules = [rule for kind in reader.kinds for rule in reader.rules(kind)]
        # One that leads somewhere replaces one that does not.
        rules.sort(key=lambda rule: bool(rule.converter.ours))
        known = {spelling: rule.converter for rule in rules for spelling in rule.spellings}
        listed = [key for key in reader.unsupported.reasons if not any(sign in key for sign in "=<:")]
        for key in dict.fromkeys((*known, *listed)):
            if key.removesuffix(".*") in ours:
                continue
            keys = known[key].ours if key in known else ()
            reason = "" if keys else reader.unsupported.reason(key) or known[key].words
            theirs = Theirs(reader.title, key, keys, reason)
            found.setdefault(key if key.endswith(".*") else key.rpartition(".")[2], []).append(theirs)
    return {last: tuple(some) for last, some in found.items()}


class Hints:
    """`OtherSystems`, answered by the readers of this package."""

    names_here = staticmethod(names_here)
    names_elsewhere = staticmethod(names_elsewhere)
    systems_of_table = staticmethod(systems_of_table)

    def recognise(self, text: str, name: str) -> Problem | None:
        """Say what a text that is not TOML is; see `convert.recognise`."""
        from convert import recognise

        return recognise(text, name)

    def described(self, data: Mapping[str, Any]) -> tuple[str, str] | None:
        """Return message and hint of a system that no reader reads, else None."""
        from convert.engine.foreign import described, other_system

        system = other_system(data)
        return None if system is None else described(system)


def install() -> None:
    """Let our loader's hints name other systems' keys, in this process."""
    other_systems.install(Hints())
