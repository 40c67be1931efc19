"""A reward process: `python -m rollout_worker.rewards.process`, started by the pool, one sample after the other.

Messages come on what was standard input and go out on what was standard output: functions, and what they start,
find an empty input, and what they print goes to standard error. It ends when its input does, and dies with its parent
even in the middle of a function.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import math
import numbers
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from rollout_worker.rewards import registry
from rollout_worker.rewards.functions import PACKAGES, extracted, source_scorers
from rollout_worker.rewards.protocol import MessageDecoder, encode
from rollout_worker.rewards.registry import RewardConfigError, RewardFunction, described, resolve
from schema.scores.answers import shown

MAX_ERROR = 4000
"""Characters of an error: name, message, function (by which the controller recognises the failure), and the last
lines of the traceback."""
TRACEBACK_FRAMES = 4
OURS = (__file__, registry.__file__)
"""Files whose frames around the function tell its author nothing."""
_PR_SET_PDEATHSIG = 1
_PASSING = (TimeoutError, ConnectionError, socket.gaierror, socket.herror)
NETWORK_ERRNO = frozenset(
    {
        errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE, errno.ETIMEDOUT, errno.ENETDOWN,
        errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN,
    }
)  # fmt: skip
LIBRARIES = frozenset(
    {
        "ConnectionError", "Timeout", "ChunkedEncodingError",  # requests
        "TimeoutException", "NetworkError", "ProxyError", "RemoteProtocolError",  # httpx
        "TimeoutError", "MaxRetryError", "NewConnectionError", "ProtocolError",  # urllib3
        "ClientConnectionError", "ServerTimeoutError", "ClientPayloadError",  # aiohttp
        "APIConnectionError", "APITimeoutError",  # clients of model services
    }
)  # fmt: skip
MOST_CAUSES = 8


class RewardNotANumber(Exception):
    """A reward function returned NaN, infinity, or something that is not a number."""


def main() -> int:
    _die_with_parent()
    messages, replies = _messages(os.dup(0)), os.dup(1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    try:
        setup = next(messages, None)
        if setup is None:
            return 0
        resolved = {name: resolve(name, setup["custom"]) for name in setup["functions"]}
        _warm_up(resolved)
    except RewardConfigError as error:
        _send(replies, {"fatal": str(error)})
        return 2
    _send(replies, {"ready": True})
    for message in messages:
        completion, row, names = message["sample"]
        chosen = {name: resolved[name] for name in names}
        _send(replies, score(completion, row, chosen, lambda name: _send(replies, {"at": name})))
    return 0


def _send(descriptor: int, message: dict[str, Any]) -> None:
    data = memoryview(encode(message))
    while data:
        data = data[os.write(descriptor, data) :]


def score(
    completion: str, row: dict[str, Any], functions: dict[str, RewardFunction], at: Callable[[str], None]
) -> dict[str, Any]:
    """The reply for one sample: rewards of the functions that worked, and the error of the first that did not.

    answer: the one that the first function has extracted which extracts any; null: none has.

    Each function gets a row of its own, so that none sees what another wrote into it. at: called with the name of
    each function but the first, before that is called.
    """
    rewards: dict[str, float] = {}
    parts: dict[str, list[tuple[int, float]]] = {}
    began = time.perf_counter()
    failure, outage, answer = None, False, None
    for number, (name, function) in enumerate(functions.items()):
        if number:
            at(name)
        try:
            value = function(completion, _copy(row) if len(functions) > 1 else row)
            value, located, given = _taken_apart(name, value)
            if located is not None:
                parts[name] = _parts(name, located, completion)
            rewards[name] = _as_number(name, value)
            if answer is None:
                answer = shown(extracted(name, completion, row) if given is None else given)
        except Exception as error:
            if failure is None:
                failure, outage = _describe(name, error), is_outage(error)
    seconds = time.perf_counter() - began
    return {
        "rewards": rewards, "parts": parts, "error": failure, "outage": outage, "answer": answer, "seconds": seconds,
    }  # fmt: skip


def _copy(value: Any) -> Any:
    """A copy of what JSON holds, in less than half of the time of copy.deepcopy (85 µs for a row of 7 kB)."""
    if isinstance(value, dict):
        return {name: _copy(inner) for name, inner in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def is_outage(error: BaseException | None) -> bool:
    """Whether an error, or what it was raised from, is a time-out or a connection error: it may pass by itself.

    A reward process imports nothing but what the functions do, so the classes of HTTP libraries are known by name.
    """
    for _ in range(MOST_CAUSES):
        if error is None:
            return False
        names = {kind.__name__ for kind in type(error).__mro__}
        by_number = isinstance(error, OSError) and error.errno in NETWORK_ERRNO
        if isinstance(error, _PASSING) or by_number or names & LIBRARIES:
            return True
        reason = getattr(error, "reason", None)  # of urllib.error.URLError
        error = error.__cause__ or (reason if isinstance(reason, BaseException) else None)
    return False


def _as_number(name: str, value: Any) -> float:
    real = value
    if not isinstance(value, numbers.Real) and hasattr(value, "item"):
        with contextlib.suppress(Exception):  # an array or a tensor of more than one element
            real = value.item()
    if not isinstance(real, numbers.Real):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise RewardNotANumber(f"{name} returned {value!r:.200} of type {kind}, not a number")
    result = float(real)
    if not math.isfinite(result):
        raise RewardNotANumber(f"{name} returned {result}")
    return result


def _taken_apart(name: str, value: Any) -> tuple[Any, Mapping[Any, Any] | None, Any]:
    """Return the number, the parts that were earned at places of the answer, and the extracted answer, if given.

    A function may return `number`, `(number, {place: part, "answer": text})` or `{"score": number, "answer": text}`,
    of which other entries are ignored; "pred", as verl's functions call it, counts as "answer".
    """
    if isinstance(value, Mapping):
        if "score" not in value:
            raise RewardNotANumber(f'{name} returned {value!r:.200}, which has no "score"')
        return value["score"], None, value.get("answer", value.get("pred"))
    if not isinstance(value, tuple):
        return value, None, None
    if len(value) != 2 or not isinstance(value[1], Mapping):
        raise RewardNotANumber(f"{name} returned {value!r:.200}, neither a number nor (number, {{place: number}})")
    located = {place: part for place, part in value[1].items() if place not in ("answer", "pred")}
    answer = value[1].get("answer", value[1].get("pred"))
    return value[0], located if located or answer is None else None, answer


def _parts(name: str, parts: Mapping[Any, Any], completion: str) -> list[tuple[int, float]]:
    """(character of the answer, part of the reward that was earned there), in order."""
    for place in parts:
        if type(place) is not int or not 0 <= place < len(completion):
            raise RewardNotANumber(
                f"{name} returned a part at {place!r:.200}, but the answer has {len(completion)} characters"
            )
    return [(place, _as_number(name, parts[place])) for place in sorted(parts)]


def _describe(name: str, error: Exception) -> str:
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename in OURS:
        frame = frame.tb_next
    lines = traceback.format_exception(type(error), error, frame, limit=-TRACEBACK_FRAMES)
    text = f"{described(error)}\nin reward function {name}\n{''.join(lines)}"
    return text if len(text) <= MAX_ERROR else text[: MAX_ERROR // 2] + "\n…\n" + text[-MAX_ERROR // 2 :]


def _warm_up(names: Collection[str]) -> None:
    """Import now what the first sample would otherwise pay for out of its deadline."""
    for package in {PACKAGES.get(name, "") for name in names} - {""}:
        importlib.import_module(package)
    if "by_source" in names:
        source_scorers()


def _messages(descriptor: int) -> Iterator[dict[str, Any]]:
    decoder = MessageDecoder()
    while data := os.read(descriptor, 1 << 20):
        yield from decoder.feed(data)


def _die_with_parent() -> None:
    """Linux: be killed when the parent dies; elsewhere the end of the input must do."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (BrokenPipeError, KeyboardInterrupt):
        sys.exit(0)
