"""Rules of data that consists of several parts, or of domains, with shares of their own."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from difflib import get_close_matches

from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.rules.idle import written
from schema.config.rules.rows import InGrpo, Refusal, Rule, refused
from schema.config.sections.dataset import DatasetConfig, DatasetKeys
from schema.util.text import one_line

_POLICY = "train.train_policy"
_CURRICULUM = f"{_POLICY}.curriculum"
_OF_RESULTS = tuple(f"{_CURRICULUM}.{name}" for name in ("order_by_results", "leave_out_solved", "leave_out_failed"))
MOST_NAME = 200
MOST_REPORTED = 128
"""Characters of a name in samples and scores (`schema.wire.sample.LONGEST_SOURCE`)."""
ALL = "all"
_SHARES_ADD_UP = 1.001e-3  # shares are written by hand: three times 0.333 is meant to be 1
_TRAIN, _VALIDATION = f"{_POLICY}.dataset", "validation.dataset"


def parts_agree(config: Config) -> Iterator[Problem]:
    """Several datasets stand in parts alone, have names of their own, and all or none a share."""
    yield from _parts(_TRAIN, config.train.train_policy.dataset)
    yield from part_problems(_VALIDATION, config.validation.dataset, "all of its rows are validated")


def part_problems(key: str, dataset: DatasetConfig, why: str) -> Iterator[Problem]:
    """The faults of parts of which none can have a share. why: the reason."""
    yield from _parts(key, dataset)
    for i, part in enumerate(dataset.part):
        if part.share is not None:
            yield Problem(f"{key}.part[{i}].share", f"has no effect: {why}", part.share, "leave it out")


def _parts(key: str, dataset: DatasetConfig) -> Iterator[Problem]:
    if not dataset.part:
        return
    for name, value in written(dataset, *DatasetKeys.model_fields):
        message = f"has no effect: [[{key}.part]] says what is read"
        yield Problem(
            f"{key}.{name}", message, value, "write it in the parts that it is for", related=(f"{key}.part",)
        )
    labels = Counter(reported(part.label) for part in dataset.part)
    for i, part in enumerate(dataset.part):
        if not part.is_named:
            yield Problem(f"{key}.part[{i}].name", "this part names no dataset", "", "write its name or its files")
        elif labels[reported(part.label)] > 1:
            message = f"{labels[reported(part.label)]} parts are called {reported(part.label)!r}"
            if reported(part.label) != one_line(part.label):
                message += f" in reports, which cut names after {MOST_REPORTED} characters"
            yield Problem(f"{key}.part[{i}].source", message, part.source, "give each part a source of its own")
        elif part.label == ALL:
            yield Problem(f"{key}.part[{i}].source", "stands for all of them in reports", ALL, "call it otherwise")
    without = [i for i, part in enumerate(dataset.part) if part.share is None]
    if without and len(without) < len(dataset.part):
        message = "this part has no share and others have one"
        hint = "write the share of each part, or of none: then their rows are one dataset"
        yield Problem(f"{key}.part[{without[0]}].share", message, None, hint)
    elif not without and (fault := _not_one(dataset.shares)):
        yield Problem(f"{key}.part[0].share", fault[0], dataset.part[0].share, fault[1])


def reported(label: str) -> str:
    """The name of a part as samples and scores carry it."""
    return one_line(label)[:MOST_REPORTED]


def _stops_early(config: Config) -> bool:
    trains = not config.validation.only
    return trains and config.train.train_policy.domain_exhausted != "repeat" and not config.shares


def domains_are_shared(config: Config) -> Iterator[Problem]:
    """Shares of domains have a column that names the domain; they are positive and add up to one."""
    key, column, shares = (f"{_POLICY}.domain_shares", f"{_POLICY}.domain_column_name", config.grpo.domain_shares)
    if shares and not config.grpo.domain_column_name:
        message = f'{_table(shares)} are shares of domains, and {column} = "" names none'
        hint = f"name the column of the domain in {column}, or leave it out"
        yield Problem(key, message, shares, hint, related=(column,))
    if long := [name for name in shares if not 0 < len(name) <= MOST_NAME]:
        yield Problem(key, f"{long[0][:40]!r} … is not a name of 1 to {MOST_NAME} characters", shares, "shorten it")
    if config.grpo.domain_column_name and not shares:
        hint = "leave it out, or give each domain its share"
        yield refused(config, column, "{} has no effect: {.domain_shares!} is empty", hint, (key,))
    if low := [name for name, share in shares.items() if share <= 0.0]:
        message = f"{', '.join(low)} has no positive share in {_table(shares)}"
        yield Problem(key, message, shares, "give it a share, or filter the data")
    elif shares and (fault := _not_one(shares)):
        yield Problem(key, fault[0], shares, fault[1])


def stages_are_shared(config: Config) -> Iterator[Problem]:
    """Stages of a curriculum follow each other, and each divides one among parts or domains with a share."""
    before, limit = -1, config.train.max_num_steps
    for i, stage in enumerate(config.curriculum.stage):
        key = f"{_CURRICULUM}.stage[{i}]"
        if not config.shares:
            message = "has no effect: no part and no domain has a share"
            hint = f"give each part of {_TRAIN} a share, for the steps before this stage, or leave it out"
            yield Problem(key, message, stage.shares, hint, related=(f"{_TRAIN}.part",))
            return
        if stage.from_step <= before:
            message = f"begins at step {stage.from_step}, and the stage in front of it at step {before}"
            yield Problem(f"{key}.from_step", message, stage.from_step, "write stages in the order of their steps")
        before = stage.from_step
        if limit is not None and stage.from_step >= limit:
            message = f"never begins: train.max_num_steps = {limit}"
            yield Problem(
                f"{key}.from_step", message, stage.from_step, "leave it out", related=("train.max_num_steps",)
            )
        if unknown := [name for name in stage.shares if name not in config.shares]:
            message = f"{unknown[0]!r} is not a part or domain with a share; these are {', '.join(config.shares)}"
            near = get_close_matches(unknown[0], config.shares, 1)
            hint = f"write {near[0]}" if near else "give it a share of its own, for the steps before this stage"
            yield Problem(f"{key}.shares", message, stage.shares, hint)
        elif low := [name for name, share in stage.shares.items() if share < 0.0]:
            message = f"{low[0]} has a negative share"
            yield Problem(f"{key}.shares", message, stage.shares, "leave it out: then it has none in this stage")
        elif fault := _not_one(stage.shares):
            yield Problem(f"{key}.shares", fault[0], stage.shares, fault[1])


def _never_passed_again(config: Config) -> bool:
    repeats = config.shares and config.train.train_policy.domain_exhausted == "repeat"
    return config.is_grpo and config.curriculum.follows_results and config.train.epoch == 1 and not repeats


def _not_one(shares: dict[str, float]) -> tuple[str, str] | None:
    """(message, remedy) where shares do not add up to one."""
    total = math.fsum(shares.values()) if all(abs(share) <= 1e9 for share in shares.values()) else math.inf
    if abs(total - 1.0) <= _SHARES_ADD_UP:
        return None
    if not total:
        return "no part or domain has a share in it", "write the share of each, which add up to 1"
    scaled = {name: round(share / total, 4) for name, share in shares.items()}
    largest = max(scaled, key=lambda name: scaled[name])
    scaled[largest] = round(scaled[largest] + 1.0 - math.fsum(scaled.values()), 4)
    return f"{_table(shares)} add up to {total:g}, not to 1", f"in these proportions: {_table(scaled)}"


def _table(shares: dict[str, float]) -> str:
    return "{" + ", ".join(f"{name} = {share:g}" for name, share in shares.items()) + "}"


MIXTURE_RULES: tuple[Rule, ...] = (
    parts_agree,
    InGrpo(domains_are_shared),
    stages_are_shared,
    Refusal(f"{_CURRICULUM}.descending", lambda c: c.curriculum.descending and not c.curriculum.column_name,
        "has no effect: {.column_name=} orders no rows", "name a column of numbers, or leave it out"),
    Refusal(f"{_CURRICULUM}.pass_score",
        lambda c: c.curriculum.pass_score != 1.0 and not c.curriculum.follows_results,
        "has no effect: no key makes later passes follow results",
        "write {.order_by_results!}, {.leave_out_solved!} or {.leave_out_failed!}, or leave it out",
        (".order_by_results", ".leave_out_solved", ".leave_out_failed")),
    Refusal(_OF_RESULTS, lambda c: not c.is_grpo and c.curriculum.follows_results,
        "has no effect: supervised training scores no answers", "leave it out", ("train.train_policy.type",)),
    Refusal(_OF_RESULTS,
        lambda c: c.is_grpo and c.curriculum.follows_results and not any(c.grpo.reward_weights.values()),
        "has no effect: all weights of train.train_policy.reward_function are 0, so every score is", "leave it out",
        ("train.train_policy.reward_function",)),
    Refusal(_OF_RESULTS, _never_passed_again,
        "has no effect: it acts from the second pass over the rows on, and {train.epoch=}",
        "raise {train.epoch!}, or leave it out", ("train.epoch",)),
    Refusal(f"{_POLICY}.domain_shares",
        lambda c: c.is_grpo and bool(c.grpo.domain_shares) and bool(c.train.train_policy.dataset.shares),
        "parts of the dataset have shares as well", "write the shares of the parts, or those of the domains",
        (f"{_TRAIN}.part",)),
    Refusal(f"{_POLICY}.domain_exhausted", _stops_early,
        "has no effect: no part and no domain has a share", "leave it out",
        (".domain_shares", f"{_TRAIN}.part")),
)  # fmt: skip
