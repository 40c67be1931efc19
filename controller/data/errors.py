"""The one error of data preparation."""

from __future__ import annotations


class DataError(ValueError):
    """The dataset, the tokenizer or the config that names them is at fault; the message says how."""
