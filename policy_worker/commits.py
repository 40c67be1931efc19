"""Telling the controller that a step is trained.

Reinforcement waits for the answer: the next batch and the publication depend on it. Supervised training needs
neither, so there a commit is on its way while the next step is trained; commits stay in order, one at a time, and
each is awaited before the next is sent, so a crash loses at most the step whose commit nobody had seen answered.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from controller.client import calls as api
from policy_worker.parallel.group import Group
from policy_worker.session import Session
from schema.wire import messages as m

GAUGES = ("idle_fraction", "step_seconds")
"""Metrics that heartbeats carry for the display."""


class Commits:
    """All ranks call alike; `session` on rank 0 only."""

    def __init__(self, group: Group, session: Session | None) -> None:
        self._group, self._session = group, session
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="commit")
        self._sent: Future[m.CommitReply] | None = None

    def send(self, step: int, metrics: Mapping[str, float]) -> None:
        """Commit a step, without waiting for the answer. Metrics that are not finite stay here: they cannot travel.

        Raises:
            Whatever the commit before has raised, if it was not awaited.
        """
        self.wait()
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        session = self._session
        if session is not None:
            session.gauges = {name: finite[name] for name in GAUGES if name in finite}
            batch = session.history.applied(step, finite, time.time())
            request = m.CommitRequest(**session.identity(), metrics=finite, batch=batch)
            self._sent = self._pool.submit(_commit, session, step, request)

    def wait(self) -> m.CommitReply | None:
        """The answer to the last commit; None if it was had before. A collective.

        Raises:
            LeaveRequestedError, ReplacedError, Refused, ControllerLost: see `Session.call`.
        """
        sent, self._sent = self._sent, None
        answer = self._group.lead(lambda: None if sent is None else sent.result().model_dump())
        return None if answer is None else m.CommitReply.model_validate(answer)


def _commit(session: Session, step: int, request: m.CommitRequest) -> m.CommitReply:
    reply = session.call(api.commit(step, request))
    session.history.committed(reply)
    return reply
