"""From a file to a `Conversion`: detect, resolve, apply the rules, add their defaults, fall back.

    text ─▶ Source ─detect─▶ Reader ─interpolate─▶ leaves ─rows─▶ entries ─┐
                                        rows whose key is absent ─▶ additions ─┴▶ config ─fallback─▶ Conversion

The order of precedence where several things write one key of ours: the file's first entry, then what the
reader adds, then defaults. Two entries that want different values are a warning.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from convert.engine.fallback import nearest
from convert.engine.interpolation import references, resolve
from convert.engine.keys import dotted, leaves, lookup, split_key, store, unsupported_key
from convert.engine.model import Addition, Conversion, Entry, Outcome, Result, Target, implicit, unknown
from convert.engine.rules import ABSENT, ConversionContext, KeyPath, Reader, Rule, defaults_of
from convert.engine.source import Source, not_read
from convert.engine.strangers import check_accepted, may_be_method, refuse_strangers, without_rule
from convert.engine.values import BadValue, shown
from schema.config.keys import leaf_keys
from schema.config.root import Config
from schema.config.rules.batch import whole_batches
from schema.config.sections.train_policy import SFTDataConfig
from schema.config.sections.unsupported import TABLE

_SECRET = re.compile(r"(api_key|apikey|token|password|secret|access_key)$", re.IGNORECASE)


def convert_source(
    source: Source, reader: Reader, kind: str, env: Mapping[str, str], allow_unknown: Collection[str] = ()
) -> Conversion:
    """Convert one file that is known to be of this system and kind.

    allow_unknown: dotted keys of the file that are not understood and may be left out. Raises ConfigError where an
    interpolation cannot be resolved, most keys are not of this system, or one of `allow_unknown` is none of those
    that are not understood; whatever else is wrong with the file is in the entries.
    """
    rules = reader.rules(kind)
    helpers = source.shared | references(source.data)
    left_out, remedy = not_read(source.data.get("defaults"), reader.title)
    taken: list[str] = []  # from the environment, or in place of the time
    if reader.interpolates:
        hint = f"{left_out}; {remedy}" if left_out else ""
        defaults = defaults_of(rules)
        data = resolve(source.data, source.lines, source.name, env, defaults, hint, taken.append)
        source = replace(source, data=data)
    context = ConversionContext(reader, kind, source, rules)
    context.helpers = helpers
    written = [(path, dotted(path), value) for path, value in leaves(source.data)]
    context.values = {key: value for _, key, value in written}
    entries = [
        _entry(context, reader, KeyPath(key, value, line=source.line(path)), key in allow_unknown)
        for path, key, value in written
    ]
    refuse_strangers(context, entries)
    check_accepted(context, entries, allow_unknown)
    if left_out:
        context.warn(f"{left_out}. What they say other than {reader.title}'s own defaults is left out; {remedy}")
    for text in taken:
        context.warn(text)
    reader.finish(context)
    final, added, config = _assemble(context, entries, _additions(context, entries))
    keys = tuple(key for _, key, _ in written)
    conversion = Conversion(reader.system, kind, source.name, keys, final, added, config, tuple(context.warnings))
    assert not conversion.missing_leaves
    assert not conversion.repeated_leaves
    return conversion


# --- one entry ----------------------------------------------------------------------------------------------


def _entry(context: ConversionContext, reader: Reader, leaf: KeyPath, is_accepted: bool) -> Entry:
    result = _decide(context, reader, leaf)
    unwritable = next((reason for _, value in result.targets if (reason := _unwritable(value))), None)
    if unwritable is not None:
        result = unknown(unwritable)
    value = leaf.value
    if not result.targets and _SECRET.search(leaf.key) and isinstance(value, str):
        value = "***"  # the report and the comments of the result must not spread it
    understood = result.outcome is not Outcome.UNKNOWN
    if is_accepted and not understood:
        result = Result(Outcome.ACCEPTED, (), result.note)
    result = _with_method(context, KeyPath(leaf.key, value), result)
    return Entry(leaf.key, value, result.outcome, result.targets, result.note, leaf.line, understood=understood)


def _with_method(context: ConversionContext, leaf: KeyPath, result: Result) -> Result:
    """A result that would change what is trained goes into `[unsupported]`; every other one stays as it is.

    That is a key without counterpart; a value that is not understood of a key that maps to one of METHOD_KEYS: our
    default would train by another method; and whatever is not understood in a table that decides what is trained.
    """
    rule, _ = context.rule_of(leaf.key)
    if result.outcome is Outcome.NONE:
        names = {leaf.key} if rule is None else {leaf.key, rule.key}
        loses_method = any(context.unsupported.decides_method(name, leaf.value) for name in names)
    elif result.outcome is Outcome.UNKNOWN:
        loses_method = may_be_method(context, leaf, rule)
    else:
        loses_method = result.outcome is Outcome.UNSUPPORTED
    if not loses_method or result.targets:
        return result
    value = leaf.value if _plain(leaf.value) and _unwritable(leaf.value) is None else yaml_value(leaf.value)
    if isinstance(value, str):
        value = value.encode("utf-8", "replace").decode()
    return Result(Outcome.UNSUPPORTED, ((unsupported_key(leaf.key), value),), result.note)


def _plain(value: Any) -> bool:
    """Whether JSON and TOML have such a value: no null, no date."""
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return isinstance(value, bool | int | float | str | list | Mapping) and all(map(_plain, items))


def _unwritable(value: Any, inside: bool = False) -> str | None:
    """Why TOML and JSON cannot hold a value; None where they can. None by itself means to leave a key out."""
    if value is None:
        return "null inside a list cannot be written in TOML" if inside else None
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} is not a finite number"
    if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        return "half of a surrogate pair is not text"
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return next((reason for item in items if (reason := _unwritable(item, inside=True))), None)


def _decide(context: ConversionContext, reader: Reader, leaf: KeyPath) -> Result:
    artefact = reader.artefacts(leaf.key, leaf.value)
    if artefact is not None:
        return artefact
    rule, rest = context.rule_of(leaf.key)
    if rule is None:
        return without_rule(context, leaf, reader)
    repeated = _repeats(context, rule, leaf)
    if repeated is not None:
        return repeated
    return _apply(context, rule, KeyPath(leaf.key, leaf.value, rest, leaf.line))


def _apply(context: ConversionContext, rule: Rule, leaf: KeyPath) -> Result:
    try:
        idle = rule.when(context) if rule.when is not None else ""
        return implicit(idle) if idle else rule.converter.run(context, leaf)
    except BadValue as error:
        return unknown(str(error))


def _repeats(context: ConversionContext, rule: Rule, leaf: KeyPath) -> Result | None:
    """A second spelling of a key that is written too: the first of its spellings wins."""
    written = [name for name in rule.spellings if context.values.get(name) is not None and not name.endswith(".*")]
    if not written or written[0] == leaf.key:
        return None
    other_key = written[0]
    if leaf.value is None or leaf.value == context.values[other_key]:
        return implicit(f"another name of `{other_key}`, which is written too")
    context.warn(
        f"`{leaf.key}` = {shown(leaf.value)} and `{other_key}` = {shown(context.values[other_key])} are two names "
        f"of one key and contradict each other; `{other_key}` is taken"
    )
    return implicit(
        f"another name of `{other_key}`, whose different value {shown(context.values[other_key])} is taken"
    )


# --- what the file leaves out -------------------------------------------------------------------------------


def _additions(context: ConversionContext, entries: list[Entry]) -> list[Addition]:
    """Return what the reader adds, then their defaults where the file is silent and ours differ."""
    written = {key for entry in entries for key, _ in entry.targets}
    chosen: dict[str, Addition] = {}
    for addition in context.additions:
        if addition.key not in written:
            chosen.setdefault(addition.key, addition)
    for rule in context.rules:
        default = context.default_of(rule)
        if default is ABSENT or context.has(rule.key):
            continue
        leaf = KeyPath(rule.key, default)
        result = _with_method(context, leaf, _apply(context, rule, leaf))
        for key, value in result.targets:
            origin = f", that of {rule.follows}" if rule.follows else ""
            note = f"{context.title}'s default: {rule.key} = {yaml_value(default)}{origin}"
            if result.note:
                note += f"; {result.note}"
            if key not in written and key not in chosen:
                chosen[key] = Addition(key, value, note)
    job = _job_type(entries, chosen)
    return [
        addition
        for addition in chosen.values()
        if addition in context.additions or not _is_our_default(addition.key, addition.value, job)
    ]


def _job_type(entries: list[Entry], chosen: Mapping[str, Addition]) -> str:
    written = [target for entry in entries for target in entry.targets]
    written += [(addition.key, addition.value) for addition in chosen.values()]
    return next((str(value) for key, value in written if key == "train.train_policy.type"), "grpo")


def _is_our_default(key: str, value: Any, job: str) -> bool:
    default = our_default(key, job)
    return (type(default) is not bool and default == value) or default is value


def our_default(key: str, job: str = "grpo") -> Any:
    """Our default of a dotted key in a job of this type; ABSENT where the schema has no such key."""
    return lookup(_our_defaults(job), split_key(key), ABSENT)


@cache
def _our_defaults(job: str) -> dict[str, Any]:
    data = Config().model_dump()
    if job == "sft":
        data["train"]["train_policy"] = SFTDataConfig(type="sft").model_dump()
    return data


# --- the configuration --------------------------------------------------------------------------------------


def _assemble(
    context: ConversionContext, entries: list[Entry], additions: list[Addition]
) -> tuple[tuple[Entry, ...], tuple[Addition, ...], dict[str, Any]]:
    """The nested configuration, with what the build lacks replaced where that changes speed only."""
    entries, additions = _in_whole_groups(context, _without_contradictions(context, entries), additions)
    lacking = nearest(_nested(entries, additions))
    nearer = {key: value for key, (value, _) in lacking.items()}
    reasons = {key: f"this build lacks {missing}, which changes no number" for key, (_, missing) in lacking.items()}
    entries = [_fallen_back(entry, lacking) for entry in entries]
    touched = {key for entry in entries for key, _ in entry.faithful} | {item.key for item in additions}
    additions = [_changed(item, nearer, reasons.get(item.key, "")) for item in additions]
    for key, (value, missing) in lacking.items():
        if key not in touched:
            note = f"our default needs {missing}, which this build does not have yet"
            additions.append(Addition(key, value, note, faithful=our_default(key)))
    return tuple(entries), tuple(additions), _nested(entries, additions)


def _without_contradictions(context: ConversionContext, entries: list[Entry]) -> list[Entry]:
    """The first entry that writes a key has it; a later one with another value says so and writes nothing."""
    first: dict[str, tuple[Any, str]] = {}
    kept: list[Entry] = []
    for entry in entries:
        targets: list[Target] = []
        note = entry.note
        for key, value in entry.targets:
            taken, by = first.setdefault(key, (value, entry.source))
            if taken == value and isinstance(taken, bool) == isinstance(value, bool):
                targets.append((key, taken))
                continue
            context.warn(
                f"`{by}` and `{entry.source}` both set {key}, to {shown(taken)} and {shown(value)}: "
                f"{shown(taken)} is written"
            )
            note = "; ".join(filter(None, (note, f"{key} is already set by `{by}`, which wins")))
        outcome = entry.outcome
        if entry.targets and not targets:
            outcome = Outcome.IMPLICIT
        kept.append(replace(entry, targets=tuple(targets), note=note, outcome=outcome))
    return kept


_BATCH = "train.train_batch_per_replica"
_STEP = (_BATCH, "rollout.n_generation", "policy.parallelism.n_init_replicas")


def _in_whole_groups(
    context: ConversionContext, entries: list[Entry], additions: list[Addition]
) -> tuple[list[Entry], list[Addition]]:
    """A step is whole groups here: a batch that is not becomes the nearest that is, the larger of two."""
    written = {addition.key: addition.value for addition in additions}
    written |= {key: value for entry in entries for key, value in entry.targets}
    sizes = [our_default(key) if written.get(key) is None else written[key] for key in _STEP]
    batch, generation, replicas = sizes
    if _job_type(entries, {item.key: item for item in additions}) != "grpo" or not all(map(_is_count, sizes)):
        return entries, additions
    near = whole_batches(batch, generation, replicas)
    whole = min(near, key=lambda value: (abs(value - batch), -value))
    if whole == batch:
        return entries, additions
    note = f"{batch} samples are not whole groups of {generation}: {whole}"
    context.warn(
        f"{_BATCH} is {whole} instead of {batch}: a step of {batch} samples on {replicas} policy "
        f"{'replica' if replicas == 1 else 'replicas'} is not a whole number of groups of "
        f"rollout.n_generation = {generation}"
    )
    rounded = {_BATCH: whole}
    return [_rewritten(entry, rounded, note) for entry in entries], [
        _changed(item, rounded, note) for item in additions
    ]


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _rewritten(entry: Entry, values: Mapping[str, Any], note: str) -> Entry:
    """The entry with these values of our keys, and the reason."""
    targets = tuple((key, values.get(key, value)) for key, value in entry.targets)
    if values.keys().isdisjoint(dict(entry.targets)):
        return entry
    note = "; ".join(filter(None, (entry.note, note)))
    return replace(entry, targets=targets, note=note, faithful=entry.faithful or entry.targets)


def _changed(item: Addition, values: Mapping[str, Any], note: str) -> Addition:
    """The addition with one of these values, and the reason."""
    if item.key not in values:
        return item
    return replace(item, value=values[item.key], note=f"{item.note}; {note}", faithful=item.value)


def _fallen_back(entry: Entry, lacking: Mapping[str, tuple[Any, str]]) -> Entry:
    hit = [key for key, _ in entry.targets if key in lacking]
    if not hit:
        return entry
    missing = " and ".join(dict.fromkeys(lacking[key][1] for key in hit))
    changed = _rewritten(
        entry, {key: lacking[key][0] for key in hit}, f"this build lacks {missing}, which changes no number"
    )
    return replace(changed, outcome=Outcome.FALLBACK)


def _nested(entries: list[Entry], additions: list[Addition]) -> dict[str, Any]:
    """Everything that is written, in the order of the schema; what the schema does not know comes last."""
    config: dict[str, Any] = {}
    targets = [target for entry in entries for target in entry.targets]
    targets += [(addition.key, addition.value) for addition in additions]
    place = {key: index for index, key in enumerate(leaf_keys())}

    def order(target: Target) -> int:
        first = target[0].startswith(f"{TABLE}.")  # whoever opens the file sees it
        return -1 if first else place.get(target[0], len(place))

    for key, value in sorted(targets, key=order):
        if value is not None:
            store(config, split_key(key), value)
    return config


def yaml_value(value: Any) -> str:
    """A value of the other system as its file would write it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return "[" + ", ".join(yaml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        items = ", ".join(f"{key}: {yaml_value(item)}" for key, item in value.items())
        return "{" + items + "}"
    return str(value)
