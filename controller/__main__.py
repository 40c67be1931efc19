"""`python -m controller --run-dir DIR --port N`: serve one job until SIGTERM.

While another controller is in charge of the job, this one stands by (see `controller.store.lock`).

Exit codes: 0 ended by SIGTERM or SIGINT, 1 the store failed (start again), 2 the config, the data or the
environment is wrong, 3 fenced: another controller took the job over.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from controller.server import ServerSettings, StartError, serve
from schema.util.text import configure_logging

log = logging.getLogger(__name__)

BAD_START = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, serve, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m controller", description="The controller of one job.")
    parser.add_argument("--run-dir", type=Path, required=True, help="directory of the run, with config.json")
    parser.add_argument("--port", type=int, help="port to listen on; 0: any free one (default: the config's)")
    parser.add_argument("--host", help="address to listen on (default: the config's)")
    parser.add_argument(
        "--replace",
        action="store_true",
        help="take the job over at once from the controller in charge of it, instead of waiting as its standby",
    )
    options = parser.parse_args(arguments)
    configure_logging(level=os.environ.get("COSMOS_LOG_LEVEL", "INFO").upper())
    try:
        settings = ServerSettings.read(
            options.run_dir.absolute(), options.host, options.port, os.environ, replace=options.replace
        )
        return uvloop.run(serve(settings))
    except StartError as error:
        log.error("%s", error)
        return BAD_START


if __name__ == "__main__":
    sys.exit(main())
