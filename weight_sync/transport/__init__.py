"""Weights from the trainer's host straight to those of rollout replicas; the store is what they fall back to.

    trainer                                   a replica (the one of its host that fetches)
    ───────                                   ────────────────────────────────────────────
    offer = sender.offer(piece)
    publication with offer ───controller────▶ store.expect(publication); host_copy.advance(publication)
    a thread per connection ◀─token, file──── store.read / store.download
                            ────bytes───────▶ (proven by hashes, as whatever comes from a store)
                                              store.outcome() ─▶ report

`Sender` hands out the files of the newest publication, `DirectStore` is a `weight_sync.stores.Store` that asks the
sender for them and the real store for everything else, so all that fetches, proves and applies is the same for both
transports. Every host is served by itself: who joins, dies or stalls changes nothing for the others.

Invariant: every wait ends within the time-out. Nothing that comes is trusted: the token proves who speaks, the
hashes of the publication what was said.
"""

from weight_sync.transport.direct import DirectStore, TransferOutcome
from weight_sync.transport.sender import Sender, Served, own_address
from weight_sync.transport.wire import TransferError

__all__ = ["DirectStore", "Sender", "Served", "TransferError", "TransferOutcome", "own_address"]
