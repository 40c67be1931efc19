"""`[custom]`: the user's own keys, handed to every user hook as they are."""

from __future__ import annotations

from typing import Any

CustomConfig = dict[str, Any]
