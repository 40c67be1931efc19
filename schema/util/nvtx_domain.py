"""The NVTX domain of the workers' ranges: `cosmos`. The workers alone have the package `nvtx`.

A tool is one that was attached when this module was imported: NVTX looks for it once, and without one it hands out a
domain that does nothing.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import nvtx

DOMAIN: Any = nvtx.get_domain("cosmos")
ATTACHED = hasattr(DOMAIN, "handle")
"""Whether a tool listens."""


@cache
def attributes(name: str) -> Any:
    """Return the attributes of a range with this name in the domain, made once."""
    return DOMAIN.get_event_attributes(message=name)
