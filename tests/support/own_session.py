"""What of ``vantage.attempts.launchers.forkserver`` does not need torch: a terminal's signals are not for the fork server."""

import os
import signal

signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
os.setsid()
