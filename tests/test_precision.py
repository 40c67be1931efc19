"""docs/precision.md says of each value of each key of number formats and kernels what becomes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from schema.config.keys import fields_of, leaf_keys

PAGE = Path(__file__).parents[1] / "docs" / "precision.md"
NAMES = {
    "master_dtype", "param_dtype", "fsdp_reduce_dtype", "transfer_dtype", "compile", "fa_version",
    "enable_liger_kernel", "enable_fp8", "fp8_recipe", "enable_fp4", "fp4_recipe", "quant_recipe", "async_tp_enabled",
    "use_flashinfer", "vllm_use_flashinfer",
}  # fmt: skip
KEYS = {key for key in leaf_keys() if key.rpartition(".")[2] in NAMES} | {"rollout.dtype"}


def values(key: str) -> set[str]:
    """All that the schema takes."""
    _, field = fields_of(key)[0]
    if key.endswith("fa_version"):
        (low, high) = (next(getattr(m, b) for m in field.metadata if hasattr(m, b)) for b in ("ge", "le"))
        return {str(version) for version in range(low, high + 1)}
    return {str(value).lower() if isinstance(value, bool) else str(value) for value in choices(field.annotation)}


def choices(annotation: Any) -> list[Any]:
    if annotation is bool:
        return [True, False]
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for part in get_args(annotation) for choice in choices(part)]


def rows() -> list[tuple[list[str], str, str, str]]:
    """Keys, a value, and what becomes of it on a CPU and on a GPU."""
    found: list[tuple[list[str], str, str, str]] = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or len(cells) != 4 or cells[0] == "key" or set(line) <= set("|-"):
            continue
        keys = [part.strip("`, ") for part in cells[0].split(",")] if cells[0] else found[-1][0]
        found.append((keys, *cells[1:]))  # type: ignore[arg-type]
    return found


def test_every_value_of_every_key_has_a_row_and_none_is_empty() -> None:
    told: dict[str, set[str]] = {}
    for keys, value, *places in rows():
        for place in places:
            assert place.startswith(("runs", "to be measured", "refused", "it is the default", "the same")), place
        for key in keys:
            assert value not in told.setdefault(key, set()), f"{key} = {value} stands there twice"
            told[key].add(value)
    assert told == {key: values(key) for key in KEYS}


def test_tests_that_it_names_are_there() -> None:
    text = PAGE.read_text()
    named = {part for part in text.split("`")[1::2] if part.endswith(".py")}
    assert named
    root = PAGE.parents[1]
    places = (root, root / "tests", root / "tests" / "policy_worker", root / "tests" / "rollout_worker")
    assert [name for name in named if not any((place / name).exists() for place in places)] == []
