"""What counts as a number, and which failures as time-outs and connection errors: those of the libraries that
rewards call others with."""

from __future__ import annotations

import asyncio
import errno
import http.client
import socket
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import requests
import urllib3

from rollout_worker.rewards.functions import BUILTIN
from rollout_worker.rewards.process import is_outage, score


@pytest.fixture(scope="module")
def refusing() -> Iterator[str]:
    """An address at which nobody listens, and nobody will."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture(scope="module")
def silent() -> Iterator[str]:
    """An address that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


async def _aiohttp(url: str) -> None:
    import aiohttp

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=0.1)) as session:
        await session.get(url)


def _openai(url: str) -> object:
    import openai

    return openai.OpenAI(base_url=url, api_key="none", timeout=0.1, max_retries=0).models.list()


CALLS: list[Any] = [
    lambda url: urllib.request.urlopen(url, timeout=0.1),
    lambda url: requests.get(url, timeout=0.1),
    lambda url: httpx.get(url, timeout=0.1),
    lambda url: urllib3.PoolManager(retries=False).request("GET", url, timeout=0.1),
    lambda url: urllib3.PoolManager(retries=0).request("GET", url, timeout=0.1),
    pytest.param(lambda url: asyncio.run(_aiohttp(url)), marks=pytest.mark.slow),  # these two come with vLLM
    pytest.param(_openai, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("address", ["refusing", "silent"])
@pytest.mark.parametrize("call", CALLS)
def test_libraries(request: pytest.FixtureRequest, address: str, call: Callable[[str], object]) -> None:
    with pytest.raises(Exception) as raised:
        call(request.getfixturevalue(address))
    assert not isinstance(raised.value, ImportError)
    assert is_outage(raised.value), raised.value


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "outage"),
    [
        (TimeoutError(), True),
        (OSError(errno.EHOSTUNREACH, "no route"), True),
        (socket.gaierror(-2, "unknown"), True),
        (http.client.RemoteDisconnected("gone"), True),
        (caused(RuntimeError("the judge is away"), ConnectionResetError()), True),
        (FileNotFoundError(errno.ENOENT, "rubric.txt"), False),
        (PermissionError(errno.EACCES, "no"), False),
        (TypeError("takes 3 positional arguments"), False),
        (caused(KeyError("x"), ValueError("y")), False),
        (httpx.InvalidURL("no"), False),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "reason"), False),
    ],
)
def test_kinds(error: Exception, outage: bool) -> None:
    assert is_outage(error) == outage


@pytest.mark.parametrize(
    ("value", "reward", "kind"),
    [
        (np.bool_(True), 1.0, None),
        (np.array(0.5), 0.5, None),
        (np.array([2]), 2.0, None),
        (np.array([1.0, 2.0]), None, "numpy.ndarray"),
        ("1.0", None, "builtins.str"),
        (1j, None, "builtins.complex"),
        ((np.bool_(True), {0: 0.5}), 1.0, None),
        (("1.0", {}), None, "builtins.str"),
    ],
)
def test_what_counts_as_a_number(value: object, reward: float | None, kind: str | None) -> None:
    reply = score("text", {}, {"f": lambda completion, row: value}, print)
    assert reply["rewards"].get("f") == reward
    assert kind is None or f"of type {kind}, not a number" in reply["error"]


@pytest.mark.parametrize(
    ("value", "parts", "words"),
    [
        ((1.0, {3: 0.5, 0: np.float32(0.25)}), [(0, 0.25), (3, 0.5)], ""),
        ((1.0, {}), [], ""),
        ((1.0, {4: 0.5}), None, "a part at 4, but the answer has 4 characters"),
        ((1.0, {True: 0.5}), None, "a part at True"),
        ((1.0, {0: "much"}), None, "not a number"),
        ((1.0, [0.5]), None, "neither a number nor"),
        ((1.0, {}, {}), None, "neither a number nor"),
    ],
)
def test_where_in_the_answer_a_reward_was_earned(value: object, parts: Any, words: str) -> None:
    reply = score("text", {}, {"f": lambda completion, row: value}, print)
    assert (reply["parts"].get("f"), reply["rewards"]) == (parts, {} if words else {"f": 1.0})
    assert words in (reply["error"] or "")


@pytest.mark.parametrize(
    ("value", "answer", "words"),
    [
        (1.0, None, ""),
        ({"score": 1.0, "answer": " 4\n2 "}, "4 2", ""),
        ({"score": 1.0, "acc": True, "pred": 42}, "42", ""),
        ({"score": 1.0}, None, ""),
        ({"reward": 1.0}, None, 'has no "score"'),
        ((1.0, {"answer": "42"}), "42", ""),
        ((1.0, {0: 0.5, "pred": "\x07x"}), "␇x", ""),
    ],
)
def test_the_extracted_answer_of_a_function_of_ones_own(value: object, answer: str | None, words: str) -> None:
    reply = score("text", {}, {"f": lambda completion, row: value}, print)
    assert (reply["answer"], reply["rewards"]) == (answer, {} if words else {"f": 1.0})
    assert words in (reply["error"] or "")
    assert reply["parts"].get("f") == ([(0, 0.5)] if isinstance(value, tuple) and 0 in value[1] else None)


@pytest.mark.parametrize(
    ("name", "completion", "row", "answer"),
    [
        ("gsm8k", "so #### 1,200", {"answer": "7"}, "1,200"),
        ("single_choice", "The answer is (b).", {"answer": "A"}, "B"),
        ("boxed_math", r"\boxed{1/2} \boxed{ x + 1 }", {"answer": "x+1"}, "x + 1"),
        ("boxed_math", "none", {"answer": "1"}, None),
        ("format", r"<think>a</think>\boxed{3}", {}, None),
        ("by_source", "#### 3", {"answer": "3", "data_source": "openai/gsm8k"}, "3"),
    ],
)
def test_the_extracted_answer_of_a_built_in_function(
    name: str, completion: str, row: dict[str, Any], answer: str | None
) -> None:
    others = {"format": BUILTIN["format"], name: BUILTIN[name]}
    assert score(completion, row, others, lambda name: None)["answer"] == answer


def test_each_function_has_a_row_of_its_own() -> None:
    """What a function writes into its row, at any depth, reaches neither the next function nor the caller."""
    row = {"answer": "12", "extra": {"tests": [{"input": 1}]}}
    seen = []

    def spoil(completion: str, row: dict[str, Any]) -> float:
        seen.append(repr(row))
        row["extra"]["tests"][0]["input"] = 2
        row["extra"]["tests"].append(3)
        row.pop("answer")
        return 1.0

    reply = score("text", row, {"first": spoil, "second": spoil, "third": spoil}, lambda name: None)
    assert (reply["error"], len(set(seen))) == (None, 1)
    assert seen[0] == repr(row)
