"""The API keys of servers, from the variables that a recipe names."""

import os


def api_key(variable: str | None, field: str) -> str | None:
    """Return the API key in an environment variable; None without a variable: the server asks for none.

    Args:
        field: path of the field that names the variable, for messages. No message contains the key.

    Raises:
        ValueError: the variable is not set, or its value cannot be a key.
    """
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ValueError(
            f"{field}={variable} names a variable that is not set; set it to the server's API key"
        )
    if key != key.strip():
        raise ValueError(
            f"{field}={variable} names a variable whose value begins or ends with white space, which no API key does; set it to the "
            "key alone"
        )
    if not (key.isascii() and key.isprintable()):
        raise ValueError(
            f"{field}={variable} names a variable with characters that no API key has; set it to the key alone"
        )
    return key
