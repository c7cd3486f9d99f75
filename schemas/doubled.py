"""Find texts that occur more than once."""

from collections import Counter
from collections.abc import Iterable


def doubled(texts: Iterable[str]) -> list[str]:
    """Return each text that occurs more than once, in the order of their first occurrences, in time linear in their number."""
    return [text for text, count in Counter(texts).items() if count > 1]
