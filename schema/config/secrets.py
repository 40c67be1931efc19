"""Secrets out of values that others will see: credentials in addresses, and keys that sound like secrets.

    cut(value)            credentials are left out: what is written to files and sent to workers
    masked(value, key)    *** in their place: what is shown to people
    found_in(value)       whether there are any

An address may hold them before its host (`redis://user:password@host`) or in its query (`https://host/hook?token=…`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

MASK = "***"
SECRET_KEY = re.compile(
    r"(^|[_-])(token|password|passwd|passphrase|secret|(api|access|private|secret_access)[_-]?key|credential|webhook)s?$",
    re.IGNORECASE,
)
# A scheme is short: without the bound, a long word in front of `://` is looked at from each of its letters.
# What stands before the `@` of abfs://container@account is a container, unless a password follows it.
_CONTAINER = r"(?!(?:(?<=abfs://)|(?<=abfss://))[^/:@\s?#]*@)"
_USER = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]{0,31}://)" + _CONTAINER + r"(?P<name>[^/:@\s?#]*:)?[^/\s?#]*@")
# What a password breaks that has a `/`, `?` or `#` in it: where a port would be is none.
_BROKEN = re.compile(r"^(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?P<name>(?!\[)[^/:@\s?#]*:)(?!\d{1,5}(?:[/?#]|$))\S*@")
_PARAMETER = re.compile(
    r"(?P<mark>[?&])(?P<name>[A-Za-z0-9_.-]*?(?:token|password|passwd|pwd|secret|key|sig|signature|auth|credential|"
    r"authorization)s?=)[^&#\s]*",
    re.IGNORECASE,
)
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,31}://\S+")


def cut(value: Any) -> Any:
    """The same values, with credentials left out of every address."""
    return _walk(value, lambda text: _in_addresses(text, _cut), hides=False)


def masked(value: Any, key: str = "") -> Any:
    """The same values, with credentials in addresses and the texts below keys that sound secret replaced by ***."""
    change = _hidden if SECRET_KEY.search(key) else lambda text: _in_addresses(text, _mask)
    return _walk(value, change, hides=True)


def found_in(value: Any) -> bool:
    """Whether an address among the values holds credentials."""
    return bool(cut(value) != value)


def _walk(value: Any, change: Callable[[str], str], hides: bool) -> Any:
    """All texts changed; hides: those below a key that sounds secret are replaced whole."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            key: _walk(item, _hidden if hides and SECRET_KEY.search(str(key)) else change, hides)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_walk(item, change, hides) for item in value]
    return value


def _hidden(text: str) -> str:
    return MASK if text else text


def _in_addresses(text: str, change: Callable[[str], str]) -> str:
    return _ADDRESS.sub(lambda match: change(match.group()), text) if "://" in text else text


def _without_user(address: str, change: Callable[[re.Match[str]], str]) -> str:
    changed, count = _USER.subn(change, address)
    return changed if count else _BROKEN.sub(change, address)


def _mask(address: str) -> str:
    address = _without_user(address, lambda m: f"{m['scheme']}{m['name'] or ''}{MASK}@")
    return _PARAMETER.sub(rf"\g<mark>\g<name>{MASK}", address)


def _cut(address: str) -> str:
    head, mark, query = _without_user(address, lambda m: m["scheme"]).partition("?")
    if not mark:
        return head
    query, hash_mark, fragment = query.partition("#")
    kept = [part for part in query.split("&") if not _is_secret(part)]
    return head + ("?" + "&".join(kept) if kept else "") + hash_mark + fragment


def _is_secret(parameter: str) -> bool:
    return parameter.startswith("username=") or _PARAMETER.fullmatch("?" + parameter) is not None
