"""A stream that masks secrets, and can write out what would steer a terminal, in everything that is written to it."""

from collections.abc import Callable, Iterable
from typing import Any, TextIO

from schemas.safe_text import safe_text


class SafeStream:
    """Stands for a text stream: ``sys.stderr = SafeStream(sys.stderr)``."""

    def __init__(self, stream: TextIO, clean: Callable[[str], str] = safe_text) -> None:
        self.unguarded = stream
        """For who cleans each piece of text, and writes control codes of its own beside it."""
        self._clean = clean

    def write(self, text: str) -> int:
        """Write the text, cleaned; returns the length of the text as given."""
        self.unguarded.write(self._clean(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of the lines, cleaned."""
        for line in lines:
            self.write(line)

    def isatty(self) -> bool:
        """False: what asks would write control codes."""
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unguarded, name)
