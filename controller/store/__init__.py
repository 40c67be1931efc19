"""The controller's state in Redis: written before anybody is answered, read back at start.

`state` is the store itself (tables of JSON rows, one transaction per group commit), `fence` the connection that
cannot write once another controller has taken over, `payloads` the bulk, `server` what the server can promise.
"""

from __future__ import annotations

from controller.store.errors import Fenced, HistoryLost, StoreError, StoreUnavailable, UnsuitableServer
from controller.store.payloads import PayloadKey, PayloadStore, RedisPayloads
from controller.store.state import Saved, StateStore, Table

__all__ = [
    "Fenced",
    "HistoryLost",
    "PayloadKey",
    "PayloadStore",
    "RedisPayloads",
    "Saved",
    "StateStore",
    "StoreError",
    "StoreUnavailable",
    "Table",
    "UnsuitableServer",
]
