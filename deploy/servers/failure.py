"""The error that is shown without a traceback."""


class ServersFailure(Exception):
    """A server cannot be started or stopped; the message says which, why, and what to do."""
