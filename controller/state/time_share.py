"""How the trainer shares its devices with rollout replicas (`placement.share = "time"`). Pure.

    trainer     has or wants them ────────────────▶ gives them ──────────────────▶ wants them …
    rollouts    told to sleep ─▶ say that they do ─▶ may wake, and count as awake ─▶ told to sleep …
                                  └▶ the trainer is let in when all have

It is a lock with preference for the trainer. A trainer has the devices from its registration on, until it gives them;
before the first one has registered nobody else may. A rollout replica counts as awake unless it has said that it
sleeps and was not let in since. Whoever is gone (its process has ended, it has left or was silent for too long) has
nothing and waits for nothing, so no wait outlasts `controller.heartbeat_timeout` of a replica that died.

Stored is `given` alone: what is not known of rollout replicas after a restart they say again with their next call,
and until then they count as awake. A store that lost `given` takes the devices to be the trainer's.
"""

from __future__ import annotations

from collections.abc import Collection


class TimeShare:
    """See the module's docstring. given: policy epoch whose trainer has given the devices; 0: none has."""

    def __init__(self, given: int = 0) -> None:
        self.given = given
        self._asleep: set[str] = set()
        self._heard: dict[str, int] = {}

    def of_policy(self, policy_epoch: int, trainer_present: bool) -> bool:
        """Whether rollout replicas are to sleep. epoch: the trainers' present one."""
        return policy_epoch == 0 or (trainer_present and self.given != policy_epoch)

    def hears(self, replica_id: str, sequence: int) -> bool:
        """Whether a call is newer than all of this replica that were heard: another one changes nothing."""
        newest = self._heard.get(replica_id, -1)
        self._heard[replica_id] = max(newest, sequence)
        return sequence > newest

    def is_old(self, replica_id: str, sequence: int) -> bool:
        """Whether the replica has said something else since."""
        return sequence < self._heard.get(replica_id, -1)

    def sleeps(self, replica_id: str) -> None:
        """A rollout replica has released its memory."""
        self._asleep.add(replica_id)

    def wakes(self, replica_id: str) -> None:
        """A rollout replica has memory, or is let in."""
        self._asleep.discard(replica_id)

    def awake(self, rollouts: Collection[str]) -> list[str]:
        """Return the present rollout replicas for which the trainer has to wait."""
        return sorted(set(rollouts) - self._asleep)

    def forget(self, known: Collection[str]) -> None:
        """Keep what is known of these replicas alone."""
        self._asleep &= set(known)
        self._heard = {name: self._heard[name] for name in self._heard if name in known}
