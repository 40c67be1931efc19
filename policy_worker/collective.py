"""The trainer's side of `weight_sync.transport = "collective"`: see `weight_sync.collective`.

Nothing here can fail a job: without an offer every replica takes the version from the store, and says so.
"""

from __future__ import annotations

import logging

from schema.config import Config
from weight_sync.collective import Sender, own_address
from weight_sync.stores import Store

log = logging.getLogger(__name__)


def open_sender(config: Config, store: Store, controller_url: str) -> Sender | None:
    """What hands publications out; None where the store alone does, by configuration or because it must."""
    if config.weight_sync.transport != "collective":
        return None
    try:
        address = own_address(controller_url, config.controller.host)
        sender = Sender(store, address, config.weight_sync.collective_timeout)
    except OSError as error:
        log.warning(
            "weights go through the store alone: no address of this machine to hand them out at (%s)", error
        )
        return None
    log.info("weights are handed out at %s:%d", sender.address, sender.port)
    return sender
