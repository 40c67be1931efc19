"""Pass-through options against the engine that is installed, without importing it.

`rollout.engine_kwargs` and `rollout.sampling_config.extra` hand names to vLLM that only its own version knows.
Importing vLLM takes seconds; the names stand as annotated fields of two classes, so its source is parsed instead.
The engine checks again when it starts.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from schema.config import Config, Problem

ENGINE_CLASSES = ("engine/arg_utils.py", ("EngineArgs", "AsyncEngineArgs"))
SAMPLING_CLASSES = ("sampling_params.py", ("SamplingParams",))


def check_engine_options(config: Config) -> list[Problem]:
    """Names that the installed engine does not know; nothing if it is not installed here."""
    if not config.is_grpo or config.rollout.backend != "vllm":
        return []
    passed = [
        ("rollout.engine_kwargs", config.rollout.engine_kwargs, ENGINE_CLASSES),
        ("rollout.sampling_config.extra", config.rollout.sampling_config.extra, SAMPLING_CLASSES),
    ]
    if not any(options for _, options, _ in passed) or (root := installed_vllm()) is None:
        return []
    problems = []
    for key, options, (file, classes) in passed:
        if options:
            problems += unknown_names(key, options, fields(root / file, classes))
    return problems


def installed_vllm() -> Path | None:
    """Where vLLM's source lies."""
    spec = importlib.util.find_spec("vllm")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def fields(path: Path, classes: Collection[str]) -> frozenset[str]:
    """Public annotated fields of these classes; empty if the file is not what we know."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    return frozenset(
        line.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name in classes
        for line in node.body
        if isinstance(line, ast.AnnAssign)
        and isinstance(line.target, ast.Name)
        and not line.target.id.startswith("_")
    )


def unknown_names(key: str, options: Mapping[str, Any], known: Collection[str]) -> list[Problem]:
    """One problem for each name that is not known. Without known names nothing can be said."""
    if not known:
        return []
    problems = []
    for name, value in options.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "see the engine's own documentation"
            message = f"the installed vLLM has no option {name!r}"
            problems.append(Problem(f"{key}.{name}", message, value, hint))
    return problems
