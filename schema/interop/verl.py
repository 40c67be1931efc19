"""verl: RL, SFT and evaluation configurations."""

from __future__ import annotations

from schema.interop.rows import Reader, Row, number
from schema.interop.source import Source


def _detect(source: Source) -> str | None:
    return "rl" if source.has("actor_rollout_ref") else None


def _rows(kind: str) -> tuple[Row, ...]:
    return (Row("actor_rollout_ref.actor.optim.lr", number("train.optm_lr"), default=1e-6),)


READER = Reader("verl", "verl", {"rl": "reinforcement learning"}, _detect, ("actor_rollout_ref",), _rows)
