"""The loop around an algorithm: train, commit, publish, save, and the orderly end.

    publish version t ─▶ ┌ train step t ─▶ commit t ─▶ publish version t + 1 ─▶ checkpoint ┐ ─▶ export ─▶ leave
                         └──────────────────── until the controller says finished ─────────┘

A step counts when it is committed: whatever happens before is done again from the last commit. Publishing comes
right after the commit, since rollout replicas wait for it; all of it but a copy of the weights runs beside the next
step. Supervised training publishes nothing, so its commits travel while the next step is trained.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Protocol

from policy_worker.checkpoints.export import export_model
from policy_worker.checkpoints.saver import Checkpointer
from policy_worker.commits import Commits
from policy_worker.process import ShutdownRequest
from policy_worker.session import Session
from policy_worker.trainer import Trainer
from policy_worker.training.step_end import End
from policy_worker.weights.publisher import Publisher
from schema.config import Config
from schema.wire import messages as m

log = logging.getLogger(__name__)

LEAVING_SHARE = 0.3
"""Of the grace in which a replica leaves: for a publication that is on its way."""


class Algorithm(Protocol):
    """What differs between reinforcement learning and supervised training."""

    def train(self, step: int) -> dict[str, float] | End:
        """One training step on all ranks; its metrics, the same on each, or why there was no step."""


class Loop:
    """See the module's docstring. `session` on rank 0 only."""

    def __init__(
        self,
        config: Config,
        reply: m.RegisterReply,
        trainer: Trainer,
        session: Session | None,
        shutdown: ShutdownRequest,
        checkpointer: Checkpointer,
    ) -> None:
        self._config, self._reply, self._trainer = config, reply, trainer
        self._session, self._shutdown, self._checkpointer = session, shutdown, checkpointer
        self.publisher: Publisher | None = None
        if reply.mode != "sft":  # where nobody would fetch
            self.publisher = Publisher(config, trainer, session, reply, shutdown)
        self._commits = Commits(trainer.group, session)
        self._overlaps = reply.mode == "sft"
        self._published = -1
        self._publish_seconds = 0.0

    def run(self, algorithm: Algorithm, step: int) -> str:
        """Train from `step` committed steps to the end; why this replica leaves ("finished", a signal, …).

        Raises:
            PolicyError, ControllerError, WeightError: training cannot go on.
        """
        self._publish(step)
        finished = step >= self._reply.total_steps
        while not finished:
            self._checkpointer.check()
            self._say(f"training step {step}")
            began = time.monotonic()
            metrics = algorithm.train(step)
            if metrics is End.SAVE:
                self._save(step)
                continue
            if metrics is End.PUBLISH:
                self._publish(step)
                continue
            if not isinstance(metrics, dict):
                self._commits.wait()
                if metrics is End.ASKED:
                    return self._leave_early(step)
                break
            if self.publisher is not None:
                metrics |= self.publisher.metrics
            metrics["publish_seconds"] = self._publish_seconds
            metrics["step_seconds"] = time.monotonic() - began + self._publish_seconds
            self._commits.send(step, metrics)
            log.info("step %d trained: %s", step, " ".join(f"{k}={v:.4g}" for k, v in metrics.items()))
            step += 1
            last = step >= self._reply.total_steps
            if self._overlaps:
                checkpoint = self._checkpointer.due(step, last=last)
                if not last and not checkpoint:
                    continue
                finished = self._after_commit(step).finished
            else:
                reply = self._after_commit(step)
                finished = reply.finished
                checkpoint = self._checkpointer.due(step, last=finished or last, epochs=reply.epochs)
            if checkpoint:
                self._save(step)
        if self._checkpointer.enabled:  # once: the data may have ended after the last commit
            self._save(step)
        if self.publisher is not None and self._published != step and self._settle():
            self._publish(step)
        return self._finish(step)

    def _save(self, step: int) -> None:
        self._say(f"saving checkpoint {step}")
        self._checkpointer.save(step)

    def _after_commit(self, step: int) -> m.CommitReply:
        """Wait until step `step` − 1 counts, and publish if it is due."""
        reply = self._commits.wait()
        assert reply is not None
        assert reply.committed_steps == step
        if reply.publish and self._published != step:
            self._publish(step)
        return reply

    def _publish(self, version: int) -> None:
        """Publish, or owe it while the version before is on its way; without publisher there is nothing to do."""
        if self.publisher is None:
            return
        began = time.monotonic()
        if self.publisher.publish(version):
            self._published = version
        self._publish_seconds = time.monotonic() - began

    def _settle(self) -> bool:
        """Wait for what is being published; False if this replica was asked to leave meanwhile."""
        return self.publisher is None or self.publisher.settle(LEAVING_SHARE * self._shutdown.grace)

    def _finish(self, step: int) -> str:
        if self._config.launcher.export_final:
            self._say("exporting the model")
            final = Path(self._reply.run_dir) / "final"
            export_model(self._trainer, self._config, final)
            self._checkpointer.offer_final(final, step)
        self._say("waiting for publications, checkpoints and uploads")
        published = self._settle()
        whole = self._checkpointer.finish()
        return "finished" if whole and published else self._shutdown.reason

    def _leave_early(self, step: int) -> str:
        if self._checkpointer.enabled:
            self._checkpointer.save(step)
        self._settle()
        self._checkpointer.finish()
        return self._shutdown.reason or "asked to leave on another rank"

    def _say(self, status: str) -> None:
        if self._session is not None:
            self._session.status = status
