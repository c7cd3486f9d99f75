"""Use the part of ``vantage.attempts.launchers.forkserver`` that needs no torch: a terminal's signals do not reach the fork server."""

import os
import signal

signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
os.setsid()
