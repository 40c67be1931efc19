"""The REST API: one small router per concern, each made for one controller."""

from __future__ import annotations
