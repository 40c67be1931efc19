"""What can be called as a reward, by its text and by itself."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schema.config.reward_signature import SignatureFault, of_function, of_source


def faults(code: str, *custom: str) -> tuple[SignatureFault | None, SignatureFault | None]:
    """Of the last definition: by its text, and by what it makes."""
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    statement = ast.parse(code).body[-1]
    assert isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    return of_source(statement, custom), of_function(namespace[statement.name], custom)


@pytest.mark.parametrize(
    ("code", "message", "hint"),
    [
        ("def f(): ...", "takes nothing", "def score(completion: str, row: dict) -> float"),
        ("def f(completion): ...", "takes `completion` alone", "def score("),
        ("def f(completion, *, row): ...", "takes `completion` alone", "def score("),
        ("def f(prompt, completion, answer): ...", "requires `answer`, which nothing passes", 'row["answer"]'),
        ("def f(c, r, /, x, y=1, *, z): ...", "requires `x`, `z`", 'row["x"]'),
        ("def f(c, r, key, /): ...", "requires `key`", 'row["key"]'),  # by name it cannot be passed
        ("def f(prompts, completions, **kwargs): ...", "as TRL's", "the row"),
        ("def f(completions, answer, **kwargs): ...", "as TRL's", "the row"),
        (
            "def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...",
            "verl's",
            'compute_score(data_source=row["data_source"], solution_str=completion, ground_truth=row["answer"], '
            "extra_info=row)",
        ),
        (
            "def f(solution_str, ground_truth, method='strict'): ...",
            "verl's",
            'f(solution_str=completion, ground_truth=row["answer"])',
        ),
        ("def f(data_sources, solution_strs, ground_truths, extra_infos): ...", "as verl's batched", "the row"),
        ("async def f(completion, row): ...", "is asynchronous", "def score("),
        ("class F:\n    def __init__(self, completion, row): ...", "is a class", "def score("),
    ],
)
def test_what_cannot_be_called_is_named_with_the_remedy(code: str, message: str, hint: str) -> None:
    by_text, by_itself = faults(code, "key")
    assert by_text is not None
    assert by_text == by_itself
    assert message in by_text.message
    assert hint in by_text.hint


@given(
    alone=st.integers(0, 3),
    positional=st.integers(0, 3),
    defaults=st.integers(0, 6),
    keywords=st.lists(st.booleans(), max_size=2),
    starred=st.booleans(),
    double=st.booleans(),
    custom=st.sets(st.sampled_from(["p2", "p3", "p4", "k0", "k1", "other"])),
)
def test_without_a_fault_it_can_be_called_and_with_one_it_cannot(
    alone: int, positional: int, defaults: int, keywords: list[bool], starred: bool, double: bool, custom: set[str]
) -> None:
    count = alone + positional
    parameters = [f"p{i}" + ("=None" if i >= count - defaults else "") for i in range(count)]
    if alone:
        parameters.insert(alone, "/")
    if starred or keywords:
        parameters.append("*rest" if starred else "*")
    parameters += [f"k{i}" + ("=None" if default else "") for i, default in enumerate(keywords)]
    parameters += ["**others"] if double else []
    code = f"def f({', '.join(parameters)}): ..."
    by_text, by_itself = faults(code, *custom)
    assert by_text == by_itself
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    signature = inspect.signature(namespace["f"])
    by_name = {p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    try:
        signature.bind("completion", {}, **dict.fromkeys(custom & by_name))
    except TypeError:
        assert by_text is not None, code
    else:
        assert by_text is None, code


@pytest.mark.parametrize("code", ["@wraps\ndef f(): ...", "f = g(1)", "from g import f"])
def test_text_that_does_not_tell_is_no_fault(code: str) -> None:
    assert of_source(ast.parse(code).body[-1], ()) is None
