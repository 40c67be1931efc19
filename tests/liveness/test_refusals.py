"""Every key of a part that is not built refuses what would need it; what it accepts is neutral."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from schema.config import UNAVAILABLE, Config, check_available
from schema.config.availability import refused_by
from schema.config.keys import acting_keys, fields_of, leaf_keys, observable
from tests.schema.config_samples import GRPO, SFT, write
from tests.support.each import check_each
from tests.support.effort import examples

REFUSED = [key for key in leaf_keys() if refused_by(key) is not None]
CHECKPOINTS = {"train": {"ckpt": {"enable_checkpoint": True, "save_mode": "sync"}}}
CANDIDATES: list[Any] = [
    True, False, 3, 7, 0.25, 2.5, "own.py:thing", "other", 'gaussian', ["other"], ["own"], [3], [0.5, 0.5],
    {"other": 0.5}, {"other": True}, {"other": 3},
]  # fmt: skip


def candidates(annotation: Any) -> Iterator[Any]:
    """Values of all kinds, the choices of the key's own type first."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
        return
    if get_origin(annotation) is list:
        yield from ([choice] for choice in candidates(get_args(annotation)[0]) if isinstance(choice, str))
    for part in get_args(annotation):
        yield from candidates(part)


def jobs() -> Iterator[dict[str, Any]]:
    """Between them, every key means something in one."""
    for base in (GRPO, SFT):
        data = deepcopy(base)
        data["train"]["ckpt"] = deepcopy(CHECKPOINTS["train"]["ckpt"])
        yield data


def refusals(key: str, value: Any) -> list[str] | None:
    """What the check says of a value in the first job in which it says anything; None if it is valid in neither."""
    said: list[str] | None = None
    for data in jobs():
        write(data, key.split("."), value)
        try:
            config = Config.model_validate(data)
        except ValidationError:
            continue
        found = [problem.message for problem in check_available(config) if problem.key == refused_by(key)]
        said = found
        if said:
            break
    return said


def test_what_is_not_built_is_refused_by_name() -> None:
    check_each(REFUSED, _check_refusal)


def _check_refusal(key: str) -> None:
    row, tried = UNAVAILABLE[refused_by(key) or ""], 0
    for value in [*candidates(fields_of(key)[0][1].annotation), *CANDIDATES]:
        neutral = refused_by(key) == key and any(
            isinstance(value, bool) == isinstance(one, bool) and value == one for one in row.neutral
        )
        said = refusals(key, value)
        if neutral or said is None:
            continue
        if tried == examples(2):
            break
        tried += 1
        assert said, f"{key} = {value!r} is taken and does nothing"
        assert all(row.missing in message for message in said)
    assert tried, f"no value of {key} was tried"


def test_the_reference_says_so() -> None:
    for key in REFUSED:
        if key not in acting_keys():
            assert UNAVAILABLE[refused_by(key) or ""].missing in observable(key).sentence
