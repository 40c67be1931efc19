"""The rival: what a first version of such a service looks like, `python -m benchmarks.controller.load.naive`.

FastAPI with pydantic models, samples as JSON lists of tokens and log-probs, each stored as JSON in Redis. It has
no leases that end, no staleness bound, no restart and no answer to a repeated request.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import uvicorn
from fastapi import FastAPI, Response
from pydantic import BaseModel
from redis.asyncio import Redis


class Lease(BaseModel):
    replica: str
    version: int
    n: int = 1


class Sample(BaseModel):
    index: int
    prompt_tokens: int
    response_tokens: int
    total_tokens: int
    segments: int
    oldest_version: int
    newest_version: int
    finish_reason: str
    rewards: dict[str, float]
    score: float | None
    error: str | None
    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    version_starts: list[int]
    version_values: list[int]


class Push(BaseModel):
    group: str
    samples: list[Sample]


class Batch(BaseModel):
    step: int
    groups: list[Push]


class Commit(BaseModel):
    step: int
    metrics: dict[str, float]


def create_app(prompts: list[list[int]], groups_per_step: int) -> FastAPI:
    """The service. A step's groups come from a Redis list in the order in which they were pushed."""
    app = FastAPI()
    redis: Redis = Redis.from_url(os.environ["COSMOS_REDIS_URL"])
    state = {"next": 0, "step": 0}

    @app.post("/leases")
    async def lease(request: Lease) -> dict[str, Any]:
        groups = []
        for _ in range(request.n):
            position = state["next"]
            state["next"] += 1
            groups.append({"group": f"g{position}", "prompt": prompts[position % len(prompts)]})
        await redis.hset("naive:leases", mapping={group["group"]: request.replica for group in groups})
        return {"groups": groups}

    @app.post("/groups")
    async def push(request: Push) -> dict[str, bool]:
        await redis.rpush("naive:ready", request.model_dump_json())
        await redis.hdel("naive:leases", request.group)
        return {"accepted": True}

    @app.get("/steps/{step}/batch", response_model=Batch)
    async def batch(step: int) -> Batch:
        while await redis.llen("naive:ready") < groups_per_step:  # noqa: ASYNC110 - as first versions do
            await asyncio.sleep(0.005)
        rows = await redis.lrange("naive:ready", 0, groups_per_step - 1)
        return Batch(step=step, groups=[Push.model_validate_json(row) for row in rows])

    @app.post("/steps/{step}/commit")
    async def commit(step: int, request: Commit) -> dict[str, int]:
        await redis.ltrim("naive:ready", groups_per_step, -1)
        await redis.set("naive:step", request.step + 1)
        return {"step": step + 1}

    @app.post("/heartbeats")
    async def heartbeat(request: Lease) -> Response:
        return Response(status_code=204)

    return app


def main() -> None:
    prompts = [[7] * int(os.environ["NAIVE_PROMPT"]) for _ in range(1000)]
    app = create_app(prompts, int(os.environ["NAIVE_GROUPS"]))
    uvicorn.run(app, host="127.0.0.1", port=int(os.environ["NAIVE_PORT"]), access_log=False, log_level="warning")


if __name__ == "__main__":
    main()
