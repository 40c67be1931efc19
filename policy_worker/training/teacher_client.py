"""The client of a `[[teacher]]` with a url: log-probs of given tokens from a server like vLLM's.

    meet      GET /v1/models (the served model, how long a sequence may be), POST /tokenize (where there is such)
    ask       POST /v1/completions with token ids, `prompt_logprobs` = k and `max_tokens` = 1, one per sequence

A server that is away, slow or out of order (connection errors, time-outs, 5xx, 429) is asked again with back-off for
as long as it takes; `trouble` says so meanwhile. What asking again would not mend (another 4xx, an answer that is not
one about the tokens sent) is a `TeacherError`. No answer is ever made up.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import httpx
import torch
from torch import Tensor

from policy_worker.errors import TeacherError
from policy_worker.model.logits.logprobs import TopTokens
from policy_worker.model.micro_batch import TrainSample
from schema.config.sections.teacher import TeacherConfig
from schema.util.backoff import Backoff
from schema.util.proxies import passed_over, proxy_of
from tokenization.loading import comparison

log = logging.getLogger(__name__)

AT_ONCE = 16
"""Requests on their way to one teacher: more than a server computes at once gain nothing."""
BACKOFF = Backoff(0.5, 15.0)
LONGEST_REASON = 300
MOST_BYTES, MOST_OF_A_TOKEN = 2**20, 1024
"""Largest answer that is read, and what each log-prob in it adds; vLLM writes some 100 bytes for one."""
ABOVE_ZERO = 1e-4
"""A log-prob this far above 0 is rounding."""
PROBE = "\n".join([*comparison.PROBE.values(), "<|end|>"])
"""A text of many kinds of pieces: tokenizers that agree on it are the same one, or very nearly."""


class Judged(NamedTuple):
    """A teacher's judgement of the learned tokens of a sample: their log-probs [n]; its likeliest tokens [n, k]."""

    logprobs: Tensor
    top: TopTokens | None


class TeacherClient:
    """See the module's docstring. Its requests are on their way only while `advance` runs, in the calling thread.

    vocabulary: ids are below it. headers hold the API key, which no message does."""

    def __init__(self, teacher: TeacherConfig, vocabulary: int, api_key: str | None = None) -> None:
        self.teacher, self._vocabulary = teacher, vocabulary
        # Uncompressed, so that a bound on bytes bounds memory.
        self._headers = {"accept-encoding": "identity"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        url = str(teacher.url)
        self._proxy = proxy_of(url) if url.startswith("https://") else None  # which would read the rest
        self._runner = asyncio.Runner()
        self._tasks: list[asyncio.Task[None]] = []
        self._served = teacher.served_model
        self._down: tuple[str, float] | None = None
        self.found: dict[int, Judged] = {}

    @property
    def trouble(self) -> str:
        """Describe what it waits for, and since when; "" while the server answers."""
        if self._down is None:
            return ""
        reason, since = self._down
        clock = time.strftime("%H:%M:%S UTC", time.gmtime(since))
        return f"waits for teacher {self.teacher.name} ({self.teacher.url}): {reason}, since {clock}"

    @property
    def is_done(self) -> bool:
        """Whether all that was begun is answered."""
        return not self._tasks

    def meet(self, tokenize: Callable[[str], list[int]], longest: int) -> None:
        """Begin to find out whether it is the teacher that is meant. longest: tokens of a sample, at most."""
        if self._proxy is None and (proxy := passed_over(str(self.teacher.url))) is not None:
            log.info("teacher %s is asked without %s", self.teacher.name, proxy)
        self._begin([lambda http: self._meet(http, tokenize, longest)])

    def ask(self, samples: Mapping[int, TrainSample]) -> None:
        """Begin to ask for these samples; when it is done they are in `found`."""
        self.found = {}
        room = asyncio.Semaphore(AT_ONCE)
        self._begin([partial(self._judge, room=room, row=row, sample=sample) for row, sample in samples.items()])

    def advance(self, seconds: float) -> None:
        """Let requests go on for so long, or until all are answered.

        Raises `TeacherError`: see the module's docstring. The other requests are given up."""
        if self._tasks:
            self._runner.run(self._advance(seconds))

    def give_up(self) -> None:
        """Drop the requests that are on their way."""
        tasks, self._tasks, self._down = self._tasks, [], None
        if tasks:
            self._runner.run(_cancel(tasks))

    def close(self) -> None:
        self.give_up()
        self._runner.close()

    # ---- requests -----------------------------------------------------------------------------------------

    def _begin(self, calls: Sequence[Callable[[httpx.AsyncClient], Awaitable[None]]]) -> None:
        assert self.is_done

        async def all_of(pending: Sequence[Callable[[httpx.AsyncClient], Awaitable[None]]]) -> None:
            address = str(self.teacher.url).rstrip("/")
            made = httpx.AsyncClient(
                base_url=address,
                headers=self._headers,
                timeout=self.teacher.timeout,
                limits=httpx.Limits(max_connections=AT_ONCE),
                verify=httpx.create_ssl_context(),
                proxy=None if self._proxy is None else self._proxy.url,
                trust_env=False,  # httpx fails at some entries of NO_PROXY, and passes others over
            )
            async with made as http, asyncio.TaskGroup() as group:
                for call in pending:
                    group.create_task(_as_coroutine(call(http)))

        self._tasks = [self._runner.get_loop().create_task(all_of(calls))] if calls else []

    async def _advance(self, seconds: float) -> None:
        done, _ = await asyncio.wait(self._tasks, timeout=seconds)
        if not done:
            return
        (task,), self._tasks, self._down = done, [], None
        if (error := task.exception()) is not None:
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise error

    async def _meet(self, http: httpx.AsyncClient, tokenize: Callable[[str], list[int]], longest: int) -> None:
        listed = await self._request(http, "GET", "/v1/models")
        models = (model for model in listed.get("data") or () if isinstance(model, dict))
        served = {str(model.get("id")): model for model in models}
        if self._served is None and len(served) != 1:
            raise self._error(f"it serves {', '.join(served) or 'no model'}: say which with served_model")
        self._served = self._served or next(iter(served))
        if self._served not in served:
            raise self._error(f"it does not serve {self._served!r}, but {', '.join(served) or 'no model'}")
        most = served[self._served].get("max_model_len")
        if isinstance(most, int) and most < longest + 1:
            raise self._error(
                f"it takes {most} tokens, and a sample of {longest} needs {longest + 1}: start it with a larger "
                f"--max-model-len, or lower policy.model_max_length"
            )
        body = {"model": self._served, "prompt": PROBE, "add_special_tokens": False}
        answer = await self._request(http, "POST", "/tokenize", body, optional=True)
        tokens_here, tokens_there = tokenize(PROBE), answer.get("tokens") if answer else None
        if tokens_there is not None and tokens_there != tokens_here:
            raise self._error(
                f"it has another tokenizer: a text of {len(tokens_here)} tokens here is {len(tokens_there)} others "
                f"there; choose a teacher of the policy's family"
            )
        log.info("teacher %s: %s at %s", self.teacher.name, self._served, self.teacher.url)

    async def _judge(self, http: httpx.AsyncClient, room: asyncio.Semaphore, row: int, sample: TrainSample) -> None:
        k = self.teacher.top_k if self.teacher.loss == "top_k_jsd" else 0
        parts = []
        for segment in sample.segments:
            ids = segment.token_ids.tolist()
            learned = [i for i in range(1, len(ids)) if segment.loss_mask[i]]
            if not learned:
                continue
            body = {"model": self._served, "prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": k}
            most = MOST_BYTES + MOST_OF_A_TOKEN * len(ids) * (k + 2)
            async with room:
                answer = await self._request(http, "POST", "/v1/completions", body, most=most)
            parts += list(self._entries(answer, ids, learned, k))
        of_tokens, values, tokens = zip(*parts, strict=True)
        top = TopTokens(torch.tensor(values), torch.tensor(tokens)) if k else None
        self.found[row] = Judged(torch.tensor(of_tokens), top)

    async def _request(
        self,
        http: httpx.AsyncClient,
        method: str,
        path: str,
        body: Any = None,
        *,
        optional: bool = False,
        most: int = MOST_BYTES,
    ) -> dict[str, Any]:
        """The answer, of at most so many bytes; {} where the server has no such path and it is optional."""
        attempt = 0
        while True:
            attempt += 1
            try:
                async with http.stream(method, path, json=body) as answer:
                    again = answer.status_code >= 500 or answer.status_code in (408, 429)
                    content = b"" if again else await self._content(answer, f"{method} {path}", most)
            except httpx.TransportError as error:
                if (fault := _distrust(error)) is not None:
                    raise self._error(f"its certificate is not trusted: {fault}") from error
                reason = f"{type(error).__name__}: {error}".rstrip(": ")
                reason += "" if self._proxy is None else f", through {self._proxy}"
            else:
                if not again:
                    break
                reason = f"HTTP {answer.status_code}"
            if self._down is None:
                self._down = reason[:LONGEST_REASON], time.time()
                log.warning("%s", self.trouble)
            await asyncio.sleep(BACKOFF.after(attempt))
        if self._down is not None:
            log.warning("teacher %s answers again", self.teacher.name)
            self._down = None
        if optional and answer.status_code in (404, 405, 501):
            return {}
        if not answer.is_success:
            text = " ".join(content.decode(errors="replace").split())[:LONGEST_REASON]
            raise self._error(f"{method} {path} is refused with HTTP {answer.status_code}: {text}")
        try:
            reply = json.loads(content)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            raise self._error(f"{method} {path} is not answered with a JSON object")
        return reply

    async def _content(self, answer: httpx.Response, asked: str, most: int) -> bytes:
        """Read what was answered. Raises TeacherError: it is compressed, which nobody asked for, or too long."""
        content = bytearray()
        if answer.headers.get("content-encoding", "identity") != "identity":
            raise self._error(f"{asked} is answered with compressed data")
        async for piece in answer.aiter_raw():
            content += piece
            if len(content) > most:
                raise self._error(f"{asked} is answered with more than {most} bytes")
        return bytes(content)

    # ---- answers ------------------------------------------------------------------------------------------

    def _entries(
        self, answer: Mapping[str, Any], ids: Sequence[int], learned: Sequence[int], k: int
    ) -> Iterator[tuple[float, list[float], list[int]]]:
        """Yield for each learned position the token's log-prob, and the k likeliest tokens with theirs."""
        choices = answer.get("choices")
        entries = choices[0].get("prompt_logprobs") if choices and isinstance(choices[0], dict) else None
        if not isinstance(entries, list):
            raise self._error("its answer has no prompt_logprobs: is it vLLM's /v1/completions?")
        if len(entries) != len(ids):
            raise self._error(f"it was sent {len(ids)} tokens, and answers of {len(entries)}")
        for position in learned:
            entry = entries[position]
            known = {} if not isinstance(entry, dict) else {
                token: candidate.get("logprob") for token, candidate in entry.items() if isinstance(candidate, dict)
            }  # fmt: skip
            if str(ids[position]) not in known:
                others = ", ".join(list(known)[:5]) or "nothing"
                raise self._error(f"position {position}: it was sent token {ids[position]}, and answers of {others}")
            values = {self._token(position, token): self._value(position, v) for token, v in known.items()}
            if len(values) < k:
                raise self._error(f"position {position}: {len(values)} tokens for top_k = {k}")
            likeliest = sorted(values, key=lambda token: (-values[token], token))[:k]
            yield values[ids[position]], [values[token] for token in likeliest], likeliest

    def _token(self, position: int, text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) >= self._vocabulary:
            raise self._error(f"position {position}: {text[:20]!r} is not a token of the policy's")
        return int(text)

    def _value(self, position: int, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._error(f"position {position}: {json.dumps(value)[:40]} is not a log-prob")
        if value > ABOVE_ZERO:
            raise self._error(f"position {position}: {value} is not a log-prob: it is above 0")
        return min(float(value), 0.0)

    def _error(self, text: str) -> TeacherError:
        return TeacherError(f"teacher {self.teacher.name} ({self.teacher.url}): {text}")


def _distrust(error: BaseException | None) -> str | None:
    """Why a certificate is not trusted; None: something else is wrong."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return error.verify_message or str(error)
        error = error.__cause__ or error.__context__
    return None


async def _as_coroutine(call: Awaitable[None]) -> None:
    await call


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
