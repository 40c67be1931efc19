"""The readers' names for hints of our own loader: what other systems call a key of ours, and what we call theirs.

names_elsewhere()["rollout.n_generation"] ─▶ {"verl": ("actor_rollout_ref.rollout.n",), "ROLL": (…)}
names_here("rollout.n") ─▶ (Theirs("verl", "actor_rollout_ref.rollout.n", ("rollout.n_generation",)),)

Launcher and controller install `Hints` when they start; the tables are imported when the first hint asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import chain
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

    by_own_key: dict[str, dict[str, dict[str, None]]] = {}
    for reader in readers():
        for kind in reader.kinds:
            for rule in reader.rules(kind):
                for ours in rule.converter.ours:
                    if rule.key.removesuffix(".*") != ours:
                        by_own_key.setdefault(ours, {}).setdefault(reader.title, {})[rule.key] = None
    return {ours: {system: tuple(keys) for system, keys in systems.items()} for ours, systems in by_own_key.items()}


def names_here(name: str) -> tuple[Theirs, ...]:
    """The keys of other systems with this name, or whose last parts it is; those with keys of ours first.

    Names that are ours too are left out.
    """
    parts = name.split(".")
    by_last_part = _by_last_part()
    matches = [
        external_key
        for external_key in by_last_part.get(parts[-1], ())
        if external_key.key == name or external_key.key.endswith(f".{name}")
    ]
    tables = (".".join([*parts[:end], "*"]) for end in range(len(parts) - 1, 0, -1))
    matches = matches or next((list(by_last_part[key]) for key in tables if key in by_last_part), [])
    return tuple(sorted(matches, key=lambda external_key: (not external_key.ours, external_key.key != name)))


def systems_of_table(name: str) -> str:
    """Name the systems whose files have such a table at their top: "verl's and cosmos-rl's"; "" for none."""
    return " and ".join(f"{system}'s" for system in _tables().get(name, ()))


@cache
def _tables() -> Mapping[str, Mapping[str, None]]:
    tables: dict[str, dict[str, None]] = {}
    for external_key in chain.from_iterable(_by_last_part().values()):
        table, dot, _ = external_key.key.partition(".")
        if dot:
            tables.setdefault(table, {})[external_key.system] = None
    return tables


@cache
def _by_last_part() -> Mapping[str, tuple[Theirs, ...]]:
    """Keys by their last part, those that end in `.*` by themselves."""
    from convert.engine.registry import readers  # the tables are only needed for a hint

    own_keys = set(leaf_keys())
    by_last_part: dict[str, list[Theirs]] = {}
    for reader in readers():
        rules = [rule for kind in reader.kinds for rule in reader.rules(kind)]
        # One that leads somewhere replaces one that does not.
        rules.sort(key=lambda rule: bool(rule.converter.ours))
        converters = {spelling: rule.converter for rule in rules for spelling in rule.spellings}
        listed = [key for key in reader.unsupported.reasons if not any(sign in key for sign in "=<:")]
        for key in dict.fromkeys((*converters, *listed)):
            if key.removesuffix(".*") in own_keys:
                continue
            keys = converters[key].ours if key in converters else ()
            reason = "" if keys else reader.unsupported.reason(key) or converters[key].words
            external_key = Theirs(reader.title, key, keys, reason)
            by_last_part.setdefault(key if key.endswith(".*") else key.rpartition(".")[2], []).append(external_key)
    return {last: tuple(external_keys) for last, external_keys in by_last_part.items()}


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
