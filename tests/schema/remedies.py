"""What every rule owes its reader, checked the same way for all of them.

A message names the fields and values that disagree. A remedy is true: each `key = value` that a hint tells to
write, written into the faulty configuration, makes the fault go away, and so does leaving a key out where the
hint says that.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from schema.config import Config, Problem, check_rules, check_warnings
from schema.config.rules.rows import Each, FirstOf, InGrpo, Rule
from tests.schema.config_samples import write

Row = tuple[Any, ...]
"""The keys that make a fault, the one to blame before the others, and words that the message must hold."""

_ASSIGNMENT = re.compile(
    r"(?P<key>[a-z_][a-z0-9_]*(?:\.[a-z_][a-z0-9_]*(?:\[0\])?)+) = (?P<value>\[[^\]]*\]|\"[^\"]*\"|-?[\w.]*\w)"
)


@dataclass(frozen=True)
class Case:
    """One fault: the dotted keys that make it, the key that is blamed, and words that the message must hold.

    rule: a function that finds it, or a name for one that a row finds.
    """

    rule: Rule | str
    values: dict[str, Any]
    key: str
    words: tuple[str, ...] = ()
    base: dict[str, Any] | None = None

    def __str__(self) -> str:
        return f"{getattr(self.rule, '__name__', self.rule)}-{self.key}"

    def blamed(self, config: Config) -> list[Problem]:
        """What the rule says of a configuration; of a row, what all rules say of its key."""
        if callable(self.rule):
            return list(self.rule(config))
        return [found for found in (*check_rules(config), *check_warnings(config)) if found.key == self.key]


def cases(faults: dict[Any, list[Row]], base: dict[str, Any] | None = None) -> list[Case]:
    """The faults of each rule, row by row."""
    return [
        Case(rule, values, next(iter(values)), tuple(words), base)
        for rule, rows in faults.items()
        for values, *words in rows
    ]


def written(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """A copy of a configuration with dotted keys written."""
    data = deepcopy(base)
    for key, value in values.items():
        write(data, key.split("."), value)
    return data


def config_of(base: dict[str, Any], values: dict[str, Any]) -> Config:
    """The same as a configuration of which only the types are checked."""
    return Config.model_validate(written(base, values))


def assignments(hint: str) -> list[dict[str, Any]]:
    """Every remedy of a hint: one `key = value`, or several joined by `and`."""
    remedies: list[dict[str, Any]] = []
    end = 0
    for found in _ASSIGNMENT.finditer(hint):
        if hint[end : found.start()] != " and ":
            remedies.append({})
        remedies[-1][found["key"].replace("[0]", "")] = tomllib.loads(f"value = {found['value']}")["value"]
        end = found.end()
    return remedies


def without(data: dict[str, Any], key: str) -> dict[str, Any]:
    """A copy with a key left out."""
    data, (*parents, name) = deepcopy(data), key.replace("[0]", "").split(".")
    table: Any = data
    for part in parents:
        table = table.get(part, {})
        table = table[0] if isinstance(table, list) else table
    table.pop(name, None)
    return data


def never_asked(rules: Iterable[Rule], cases: Iterable[Case], base: dict[str, Any]) -> list[Rule]:
    """The rules, and the rows of rules that have some, which find no fault in any of the cases."""
    configs = [config_of(case.base or base, case.values) for case in cases]
    return [leaf for rule in rules for leaf in _leaves(rule) if not any(any(leaf(c)) for c in configs)]


def _leaves(rule: Rule) -> list[Rule]:
    if isinstance(rule, Each):
        return [Each(rule.sections, row) for row in rule.rows]
    if isinstance(rule, InGrpo):
        return [InGrpo(leaf) for inner in rule.rules for leaf in _leaves(inner)]
    return [leaf for inner in rule.rules for leaf in _leaves(inner)] if isinstance(rule, FirstOf) else [rule]


def check_case(case: Case, base: dict[str, Any]) -> Problem:
    """Hold one rule to what it owes. Returns its problem."""
    data = written(case.base or base, case.values)
    blamed = case.blamed(Config.model_validate(data))
    found = blamed
    if isinstance(case.rule, str):
        found = [problem for problem in blamed if all(word in problem.message for word in case.words)]
    assert [problem.key for problem in found] == [case.key], [problem.render() for problem in blamed]
    (problem,) = found
    text = problem.message
    for word in case.words:
        assert word in text, f"{word!r} is not in: {text}"
    assert problem.hint, "every fault comes with a remedy"
    remedies = [written(data, remedy) for remedy in assignments(problem.hint)]
    if "leave it out" in problem.hint:
        remedies.append(without(data, problem.key))
    if other := re.search(r"leave ([\w.]+\.\w+) out", problem.hint):
        remedies.append(without(data, other[1]))
    if others := re.search(r"leave out ([\w.]+) and ([\w.]+)", problem.hint):
        remedies.append(without(without(data, others[1]), others[2]))
    before = {other.key for other in check_rules(Config.model_validate(data))}
    for remedy in remedies:
        again = [other.key for other in case.blamed(Config.model_validate(remedy))]
        assert again.count(problem.key) < len(blamed), f"still there after: {problem.hint}"
        new = [other.render() for other in check_rules(Config.model_validate(remedy)) if other.key not in before]
        assert not new, f"new after: {problem.hint}"
    return problem
