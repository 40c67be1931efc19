"""Code of the user's that a key names, `path/to/file.py:name`: the file is parsed, and nothing of it runs."""

from __future__ import annotations

import ast
from pathlib import Path

from schema.config.loading.explain import closest
from schema.config.paths import NotAFileError, address_fault, home_hint, read_regular
from schema.config.problem import Absent, Problem

MAX_CODE_BYTES = 4 * 1024 * 1024  # of a file of functions, which is parsed whole

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def own_function(key: str, name: str, purpose: str, *, classes: bool = False) -> Definition | Problem | None:
    """The definition of a user's function, `path/to/file.py:function`, or what is wrong with it.

    None: the name is bound in another way, as by an import. purpose: what the file is for, as the message names it.
    classes: whether a class is asked for.
    """
    file, _, function = name.rpartition(":")
    if fault := address_fault(file, "your functions are"):
        return Problem(key, fault[0], name, fault[1])
    try:
        tree = ast.parse(read_regular(Path(file), MAX_CODE_BYTES), filename=file)
    except OSError as error:
        hint = home_hint(file) or "paths are relative to the current directory"
        kind = Absent if isinstance(error, FileNotFoundError) else Problem
        return kind(key, f"{purpose} {file} cannot be read: {error.strerror}", name, hint)
    except NotAFileError as error:
        return Problem(key, f"{purpose} {file} cannot be read: {error}", name, "write it to a file first")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f" at line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        return Problem(key, f"{purpose} {file} is not valid Python{line}: {error}", name)
    if function in _bound_names(tree):
        return None
    definitions = {node.name: node for node in tree.body if isinstance(node, Definition)}
    if function in definitions:
        return definitions[function]
    names = [node.name for node in definitions.values() if isinstance(node, ast.ClassDef) == classes]
    close = closest(function, names)
    what = "class" if classes else "function"
    hint = f"did you mean `{file}:{close}`?" if close else f"it defines: {', '.join(names) or 'none'}"
    return Problem(key, f"{file} has no {what} `{function}`", name, hint)


def _bound_names(tree: ast.Module) -> set[str]:
    """Names that a module binds without `def`: assigned or imported callables."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names
