"""Keys of a file that no rule knows: what they may have been meant as, and when they are too many.

a key without a rule ─▶ a key of the closed list, an empty table, or unknown with a guess
most keys unknown    ─▶ the file is refused: it is another system's
a name to accept     ─▶ refused unless it is that of a key which is not understood
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from convert.engine.fallback import SPEED_ONLY
from convert.engine.foreign import by_hand
from convert.engine.keys import dotted, split_key
from convert.engine.model import Entry, Outcome, Result, implicit, no_counterpart, unknown
from convert.engine.rules import ConversionContext, KeyPath, Reader, Rule
from convert.engine.unsupported import METHOD_KEYS
from convert.engine.values import shown
from schema.config.loading.explain import closest
from schema.config.problem import MOST_SHOWN, ConfigError, Problem

MOST_STRANGERS = 10
"""At least as many keys that a system does not have, if they are most of a file, make it another system's."""


def without_rule(context: ConversionContext, leaf: KeyPath, reader: Reader) -> Result:
    """A key that no rule knows: without a counterpart, an empty or null table, of the user's own code, or unknown."""
    reason = context.unsupported.reason(leaf.key)
    if reason is not None:
        return no_counterpart(reason)
    inside = leaf.key + "."
    if any(key.startswith(inside) for key in context.by_key):
        if leaf.value is None or leaf.value == {}:
            return implicit("an empty table: nothing is set")
        return unknown(f"expected a table of keys, got {shown(leaf.value)}")
    parts = split_key(leaf.key)
    for end in range(len(parts) - 1, 0, -1):
        around = dotted(parts[:end])
        if around in context.by_key:
            return unknown(f"`{around}` is a single value there, not a table")
    adopted = reader.own_code(context, leaf)
    context.strangers += adopted is None
    if context.strangers > MOST_SHOWN:  # a guess takes milliseconds
        return adopted or unknown(f"not a key of {context.title} that this converter knows")
    known = [key for key in context.by_key if not key.endswith(".*")]
    close = closest(leaf.key, known) or _same_name(parts[-1], known)
    hint = f"; did you mean `{close}`?" if close else ""
    if adopted is not None and not close:
        return adopted
    return unknown(f"not a key of {context.title} that this converter knows{hint}")


def _same_name(name: str, known: Sequence[str]) -> str | None:
    """The one known key whose last part is the same: a key in the wrong table."""
    same_named = [key for key in known if split_key(key)[-1] == name]
    return same_named[0] if len(same_named) == 1 else None


_PLUMBING = re.compile(r"(?:logging|profiler|launcher|redis|controller|weight_sync|placement)\.|.*\.parallelism\.")


def may_be_method(context: ConversionContext, leaf: KeyPath, rule: Rule | None) -> bool:
    """Whether what is not understood may decide what is trained: by our keys that it maps to, else by its place.

    rule: that of the key, if it is known and its value is not understood.
    """
    ours = () if rule is None else rule.converter.ours
    if not METHOD_KEYS.isdisjoint(ours):
        return True
    if ours and all(key in SPEED_ONLY or _PLUMBING.match(key) for key in ours):
        return False  # how fast or where a job runs, or what it shows
    if rule is None and context.unsupported.is_stray(leaf.key, leaf.value, context.helpers):
        return True
    return context.unsupported.may_decide_method(leaf.key, leaf.value, context.helpers)


def refuse_strangers(context: ConversionContext, entries: Sequence[Entry]) -> None:
    """Raise ConfigError for a file of which most keys are unknown: what is left of it is another job."""
    strangers = [
        entry.source
        for entry in entries
        if not entry.understood and entry.outcome is not Outcome.ACCEPTED and context.rule_of(entry.source)[0] is None
    ]
    if len(strangers) < MOST_STRANGERS or 2 * len(strangers) <= len(entries):
        return
    examples = ", ".join(strangers[:8])
    message = (
        f"{len(strangers)} of its {len(entries)} keys are not keys of {context.title} ({examples}, …): this looks "
        f"like a file of another system, or of a fork of {context.title}"
    )
    raise ConfigError([Problem("", message, hint=by_hand(context.title), file=context.source.name)])


def check_accepted(context: ConversionContext, entries: Sequence[Entry], accepted: Collection[str]) -> None:
    """Raise ConfigError for names that are not those of keys which are not understood."""
    unknown_keys = [entry.source for entry in entries if not entry.understood]
    outcomes = {entry.source: entry.outcome.value for entry in entries if entry.understood}
    problems = []
    for name in dict.fromkeys(accepted):
        if name in unknown_keys:
            continue
        inside = [key for key in unknown_keys if key.startswith(f"{name}.")]
        close = closest(name, unknown_keys) or _same_name(split_key(name)[-1], unknown_keys)
        suggestions = inside or ([close] if close else unknown_keys)
        if name in outcomes:
            message = f"cannot be accepted as unknown: it is understood ({outcomes[name]})"
        elif inside:
            message = "cannot be accepted as a table: name each of its keys"
        else:
            message = "cannot be accepted: the file has no such key"
        names = ", ".join(f"`{key}`" for key in suggestions)
        hint = f"did you mean {names}?" if suggestions else "every key of the file is understood"
        if not inside and not close and suggestions:
            hint = f"not understood are: {names}"
        problems.append(Problem(name, message, hint=hint, file=context.source.name))
    if problems:
        raise ConfigError(problems)
