"""A user's function, written `path/to/file.py:function`: rewards, advantage estimators and policy losses."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


class OwnCodeError(Exception):
    """A function cannot be had: names file and reason. Its cause is what the file raised, if it did."""


def is_own(name: str) -> bool:
    """Whether a name is of this form."""
    path, _, attribute = name.rpartition(":")
    return bool(path and attribute)


def load_function(name: str) -> Callable[..., Any]:
    """The function that such a name stands for; its file is loaded once in a process. Raises `OwnCodeError`."""
    path, _, attribute = name.rpartition(":")
    function = getattr(_load(Path(path)), attribute, None)
    if not callable(function):
        raise OwnCodeError(f"{path} has no function {attribute!r}")
    return function  # type: ignore[no-any-return]


def _load(path: Path) -> ModuleType:
    """The module of a file; its folder is importable, as if it were run as a script."""
    module_name = f"cosmos_own_{path.stem}_{abs(hash(str(path.resolve()))):x}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    if not path.is_file():
        raise OwnCodeError(f"no file {path} exists")
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise OwnCodeError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise OwnCodeError(f"{path} cannot be loaded: {type(error).__name__}") from error
    return module
