"""A server of a teacher for tests: completions as vLLM's HTTP server answers them, of a model of transformers.

It speaks real HTTP on a port of its own. `fault` makes it misbehave from the next request on.
"""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from transformers import PreTrainedModel

from tests.support.ports import free_port
from tests.support.waiting import until

SERVED = "tiny"


class TeacherServer:
    """fault: "", "500" (out of order), "slow" (answers after `delay`), "other tokens", "fewer tokens", "above zero",
    "nan", "refuses", "no log-probs", "endless", "compressed", "deep". seen: the bodies and authorization headers of
    completions.
    """

    def __init__(
        self, lm: PreTrainedModel, tokenizer: Any = None, *, longest: int = 4096, certificates: Any = None
    ) -> None:
        self._lm, self._tokenizer, self._longest = lm.eval(), tokenizer, longest
        self._certificates = certificates
        self.fault, self.delay = "", 0.0
        self.seen: list[tuple[dict[str, Any], str | None]] = []
        self.port = free_port()
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self._certificates else 'http'}://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Begin to serve, again on the same port."""
        keys = {}
        if self._certificates:
            keys = {"ssl_certfile": str(self._certificates.cert), "ssl_keyfile": str(self._certificates.key)}
        options = uvicorn.Config(self._app(), host="127.0.0.1", port=self.port, log_level="error", **keys)
        server = self._server = uvicorn.Server(options)
        self._thread = threading.Thread(target=server.run, daemon=True)
        self._thread.start()
        until(lambda: server.started, "the teacher's server")

    def stop(self) -> None:
        """Go away."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = self._server.force_exit = True
            self._thread.join()
            self._server = None

    def _app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/v1/models")
        def models() -> Any:
            if self.fault == "500":
                return JSONResponse({"error": "out of order"}, 500)
            return {"object": "list", "data": [{"id": SERVED, "max_model_len": self._longest}]}

        if self._tokenizer is not None:

            @app.post("/tokenize")
            async def tokenize(request: Request) -> Any:
                body = await request.json()
                ids = self._tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"])
                return {"count": len(ids), "max_model_len": self._longest, "tokens": ids}

        @app.post("/v1/completions")
        def completions(request: Request, body: dict[str, Any]) -> Any:
            self.seen.append((body, request.headers.get("authorization")))
            if self.fault == "500":  # a gateway compresses its page, whatever it was asked
                page = gzip.compress(b"out of order")
                return PlainTextResponse(page, 500, headers={"content-encoding": "gzip"})
            if self.fault == "refuses":
                return JSONResponse({"error": {"message": "prompt_logprobs is larger than --max-logprobs"}}, 400)
            if self.fault == "deep":
                return PlainTextResponse("[" * 100_000)
            if self.fault == "endless":
                return PlainTextResponse("[" * 2**24)
            if self.fault == "compressed":
                return PlainTextResponse(gzip.compress(b"[" * 2**20), headers={"content-encoding": "gzip"})
            if self.fault == "slow":
                time.sleep(self.delay)
            return {"choices": [{"text": "", "prompt_logprobs": self._entries(body)}]}

        return app

    @torch.no_grad()
    def _entries(self, body: dict[str, Any]) -> Any:
        """One entry for each token of the prompt but the first: it and the k likeliest ones."""
        ids, k, fault = body["prompt"], body["prompt_logprobs"], self.fault
        log_p = torch.log_softmax(self._lm(input_ids=torch.tensor([ids])).logits[0].float(), 1)
        entries: list[Any] = [None]
        for i in range(1, len(ids)):
            chosen = log_p[i - 1].topk(k).indices.tolist() if k else []
            entry = {str(v): {"logprob": float(log_p[i - 1, v])} for v in dict.fromkeys([ids[i], *chosen])}
            if fault == "other tokens":
                entry = {str((ids[i] + 1) % 50): {"logprob": -1.0}}
            if fault in ("above zero", "nan"):
                entry[str(ids[i])]["logprob"] = 0.5 if fault == "above zero" else None
            entries.append(entry)
        return {"fewer tokens": entries[:-1], "no log-probs": None}.get(fault, entries)


@contextmanager
def teacher_server(lm: PreTrainedModel, tokenizer: Any = None, **rest: Any) -> Iterator[TeacherServer]:
    """A server while the block runs."""
    server = TeacherServer(lm, tokenizer, **rest)
    server.start()
    try:
        yield server
    finally:
        server.stop()
