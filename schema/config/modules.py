"""Code of others: `external_modules` are found without running them and imported by name; models bring their own."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence

CANNOT_LOAD = (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError, SyntaxError)
"""The errors of transformers where files are missing, contradict each other, or come with code that does not fit."""


class ExternalModuleError(ImportError):
    """A module of `external_modules` cannot be imported: names it, the reason and the remedy."""


def is_importable(name: str) -> bool:
    """Whether the module's top package is where Python looks; nothing is imported, so no code of it runs."""
    try:
        return importlib.util.find_spec(name.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False


def import_external(names: Sequence[str]) -> None:
    """Import modules in order, before a model is loaded. Raises ExternalModuleError."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever the module's own code raises
            raise ExternalModuleError(
                f"policy.external_modules: `{name}` cannot be imported: {type(error).__name__}: {error}; install "
                "what it needs, put its directory into PYTHONPATH, or leave it out"
            ) from error


def remedy(error: Exception) -> str:
    """The hint for a model or tokenizer that did not load: the key for code that comes with it."""
    if "trust_remote_code" not in str(error):
        return ""
    return "; if you trust that code, write policy.trust_remote_code = true"
