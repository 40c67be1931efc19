"""Whether a function can be called as a reward: `score(completion, row) -> float`, one answer at a time.

    of_source(statement)   from the text of a file, which is not run: before a job starts
    of_function(object)    from the function itself: in the process that runs it

Parameters beyond these two are keys of `[custom]`, or have defaults.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection, Sequence
from inspect import Parameter
from typing import Any, NamedTuple

SIGNATURE = "def score(completion: str, row: dict) -> float"
_VERL = {
    "data_source": 'row["data_source"]',
    "solution_str": "completion",
    "ground_truth": 'row["answer"]',
    "extra_info": "row",
}
"""verl's parameters, and what they are here."""
_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


class SignatureFault(NamedTuple):
    """Why a function cannot be called, as a predicate of its name, and what to do."""

    message: str
    hint: str


_CLASS = SignatureFault("is a class", f"name a function: {SIGNATURE}")
_ASYNC = SignatureFault("is asynchronous", f"write {SIGNATURE}; each process scores one answer at a time")


def of_source(statement: ast.stmt, custom: Collection[str]) -> SignatureFault | None:
    """The fault of a definition; None also where its text does not tell. custom: keys of `[custom]`."""
    if isinstance(statement, ast.ClassDef):
        return _CLASS
    if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) or statement.decorator_list:
        return None
    if isinstance(statement, ast.AsyncFunctionDef):
        return _ASYNC
    return _of_parameters(statement.name, _parameters(statement.args), custom)


def of_function(function: Any, custom: Collection[str]) -> SignatureFault | None:
    """The fault of a callable; None also where it has no signature, as some written in C."""
    if inspect.isclass(function):
        return _CLASS
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return _ASYNC
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    return _of_parameters(getattr(function, "__name__", "it"), parameters, custom)


def _of_parameters(name: str, parameters: Sequence[Parameter], custom: Collection[str]) -> SignatureFault | None:
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    names = {p.name for p in required}
    if "completions" in names:
        message = "takes lists, as TRL's reward functions do; here a call scores one answer and returns one number"
        return SignatureFault(message, f"write {SIGNATURE}; columns of the data are in the row")
    if "solution_strs" in names:
        message = "takes lists, as verl's batched compute_score does; here a call scores one answer"
        return SignatureFault(message, f"write {SIGNATURE}; columns of the data are in the row")
    if "solution_str" in names:
        call = ", ".join(f"{p.name}={_VERL[p.name]}" for p in parameters if p.name in _VERL)
        hint = f"add def score(completion, row): return {name}({call}), and name `score`"
        return SignatureFault("has the parameters of verl's compute_score", hint)
    positional = [p for p in parameters if p.kind in _POSITIONAL]
    if len(positional) < 2 and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        accepted = f"`{positional[0].name}` alone" if positional else "nothing"
        return SignatureFault(f"takes {accepted}, and is called with two arguments", f"write {SIGNATURE}")
    unfilled = [
        p.name for p in required if p not in positional[:2] and (p.kind is p.POSITIONAL_ONLY or p.name not in custom)
    ]
    if unfilled:
        hint = f'columns are in the row, such as row["{unfilled[0]}"]; keys of [custom] are passed by name'
        missing = ", ".join(f"`{name}`" for name in unfilled)
        return SignatureFault(f"requires {missing}, which nothing passes", f"write {SIGNATURE}: {hint}")
    return None


def _parameters(arguments: ast.arguments) -> list[Parameter]:
    """The parameters of a definition; what has a default gets None for it."""
    alone, positional = len(arguments.posonlyargs), [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    parameters = [
        Parameter(a.arg, _POSITIONAL[index >= alone], default=Parameter.empty if index < first_default else None)
        for index, a in enumerate(positional)
    ]
    if arguments.vararg is not None:
        parameters.append(Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL))
    parameters += [
        Parameter(a.arg, Parameter.KEYWORD_ONLY, default=Parameter.empty if default is None else None)
        for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg is not None:
        parameters.append(Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD))
    return parameters
