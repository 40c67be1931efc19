"""What holds for all tests."""

from __future__ import annotations

import signal

# Started in the background of a script, SIGINT is ignored, here and in every process that a test starts. With a
# handler it has its default in those, as in those that the launcher starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
