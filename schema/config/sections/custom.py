"""`[custom]`: the user's own keys, handed to every user hook as they are."""

from __future__ import annotations

from schema.config.base import FreeTable

CustomConfig = FreeTable
