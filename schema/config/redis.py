"""`[redis]`: the store of the controller's state."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from schema.config.base import Section


class RedisConfig(Section):
    """`[redis]`: the store of the controller's state."""

    url: Annotated[str, Field(pattern=r"^$|^(redis|rediss|unix)://.+$")] = Field(
        default="",
        description="redis://, rediss:// or unix:// address of a Redis (7.2 or newer) or Valkey server. "
        "Empty: an embedded Valkey started with the job. The password may come from the environment as "
        "COSMOS_REDIS_PASSWORD.",
    )
    key_prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] = Field(
        default="cosmos", description="Every key starts with this prefix and the job's id."
    )
