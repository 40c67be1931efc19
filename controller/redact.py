"""Secrets out of a config before anybody sees it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
_SECRET_KEY = re.compile(r"(^|_)(token|password|passwd|secret|api_?key|credentials?)s?$", re.IGNORECASE)
_URL_CREDENTIALS = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^/@\s]*@")


def without_url_credentials(value: Any) -> Any:
    """The same values, with `user:password@` cut out of every address."""
    if isinstance(value, str):
        return _URL_CREDENTIALS.sub(r"\g<scheme>", value)
    if isinstance(value, Mapping):
        return {key: without_url_credentials(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_url_credentials(item) for item in value]
    return value


def redacted(value: Any) -> Any:
    """The same values without credentials in addresses, and with secret-looking keys masked."""
    if isinstance(value, Mapping):
        return {
            key: MASK if item and isinstance(item, str) and _SECRET_KEY.search(str(key)) else redacted(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [redacted(item) for item in value]
    return without_url_credentials(value)
