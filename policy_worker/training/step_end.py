"""Why an algorithm made no step."""

from __future__ import annotations

from enum import Enum, auto


class End(Enum):
    """ASKED: this replica was asked to leave. NO_DATA: no step follows, the data has ended early. SAVE: there is no
    batch yet, and a checkpoint was asked for: save, then ask again. PUBLISH: likewise, a version has to be
    published, or publishing has failed."""

    ASKED = auto()
    NO_DATA = auto()
    SAVE = auto()
    PUBLISH = auto()
