"""A text stream that masks secrets and can escape control characters."""

from collections.abc import Callable, Iterable
from typing import Any, TextIO

from vantage.schemas.safe_text import safe_text


class SafeStream:
    """Wraps a text stream: ``sys.stderr = SafeStream(sys.stderr)``."""

    def __init__(self, stream: TextIO, clean: Callable[[str], str] = safe_text) -> None:
        self.wrapped = stream
        """The stream itself, for a writer that cleans its texts and also writes control codes."""
        self._clean = clean

    def write(self, text: str) -> int:
        """Write the text, cleaned; returns the length of the original text."""
        self.wrapped.write(self._clean(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of the lines, cleaned."""
        for line in lines:
            self.write(line)

    def isatty(self) -> bool:
        """Return False, so that callers write no control codes."""
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)
