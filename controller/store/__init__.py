"""The controller's state in Redis: written before anybody is answered, read back at start.

`state` is the store itself (tables of JSON rows, one transaction per group commit), `fence` the connection that
cannot write once another controller has taken over, `lock` who is in charge and how another one takes over,
`payloads` the bulk, `server` what the server can promise.
"""

from __future__ import annotations

from controller.store.errors import Fenced, Held, HistoryLost, StateStoreError, StoreUnavailable, UnsuitableServer
from controller.store.lock import LockHolder
from controller.store.payloads import PayloadKey
from controller.store.redis_state import Saved, StateStore, Table

__all__ = [
    "Fenced",
    "Held",
    "HistoryLost",
    "LockHolder",
    "PayloadKey",
    "Saved",
    "StateStore",
    "StateStoreError",
    "StoreUnavailable",
    "Table",
    "UnsuitableServer",
]
