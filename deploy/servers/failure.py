"""The error that users see without a traceback."""


class ServersFailure(Exception):
    """A server cannot be started or stopped; the message names the server, the reason and the remedy."""
