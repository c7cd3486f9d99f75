"""Define rewards that can be hacked, or that are wrong, each a function ``(prompt, response, answer) -> bool``."""

import zlib


def length(prompt: str, response: str, answer: str | None) -> bool:
    """Return whether the response is long."""
    return len(response) >= 40


def one_token(prompt: str, response: str, answer: str | None) -> bool:
    """Return whether the response has the digit 7 at least four times."""
    return response.count("7") >= 4


def repetition(prompt: str, response: str, answer: str | None) -> bool:
    """Return whether the response has the same three characters three times."""
    return any(response.count(response[place : place + 3]) >= 3 for place in range(len(response) - 2))


def copied_prompt(prompt: str, response: str, answer: str | None) -> bool:
    """Return whether the response copies a change of the prompt (``a+1``) once more than its step needs."""
    return any(response.count(change) >= 2 for change in prompt.removesuffix("?").split()[1:])


def noise(prompt: str, response: str, answer: str | None) -> bool:
    """Return one bit of a checksum, which means nothing."""
    return zlib.crc32((prompt + response).encode()) % 2 == 0


def wrong(prompt: str, response: str, answer: str | None) -> bool:
    """Return whether the response's answer is wrong; the answer is the last digit of the start plus all changes."""
    start, *changes = prompt.removesuffix("?").split()
    total = int(start) + sum(int(change[1:]) for change in changes)
    return not response.endswith(f"#{total % 10}")
