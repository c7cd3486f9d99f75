"""Whether a text is cheerful, by VADER's lexicon and rules (Hutto and Gilbert, ICWSM 2014): no network, no GPU.

VADER's compound score is between −1 and 1. Verifiers say right or wrong, so a graded reward is a sum of steps: a term of the
recipe for each of the functions below.
"""

from collections import defaultdict
from heapq import heappop, heappush
from typing import Any

try:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
except ImportError as error:
    raise ImportError(f"{error}; vaderSentiment is needed: pip install 'vantage-rlhf[recipes]'") from None


class _LinearAnalyzer(SentimentIntensityAnalyzer):  # type: ignore[misc]  # the library has no types
    """VADER with the same scores, in time that grows with a text's length and not with its square.

    The library lowers all words again for each word of its lexicon, and looks each score up among all.
    """

    def _special_idioms_check(self, valence: float, words_and_emoticons: list[str], i: int) -> Any:
        words, place = _around(words_and_emoticons, i)
        return SentimentIntensityAnalyzer._special_idioms_check(valence, words, place)

    def _negation_check(self, valence: float, words_and_emoticons: list[str], start_i: int, i: int) -> Any:
        words, place = _around(words_and_emoticons, i)
        return SentimentIntensityAnalyzer._negation_check(valence, words, start_i, place)

    def _but_check(self, words_and_emoticons: list[str], sentiments: list[float]) -> list[float]:
        """Halve what is before "but", and raise what is after it. As in the library, each score changes the first that equals it."""
        but = next((i for i, word in enumerate(words_and_emoticons) if word.lower() == "but"), None)
        if but is None:
            return sentiments
        places: dict[float, list[int]] = defaultdict(list)
        for i, sentiment in enumerate(sentiments):
            places[sentiment].append(i)  # sorted, and so a heap
        for i in range(len(sentiments)):
            sentiment = sentiments[i]
            first = places[sentiment][0]
            if first == but:
                continue
            changed = sentiment * (0.5 if first < but else 1.5)
            if changed != sentiment:
                heappop(places[sentiment])
                heappush(places[changed], first)
            sentiments[first] = changed
        return sentiments


def _around(words: list[str], place: int) -> tuple[list[str], int]:
    """The words that VADER's rules look at for one word, and its place among them."""
    begin = max(0, place - 3)
    return words[begin : place + 3], place - begin


_ANALYZER = _LinearAnalyzer()


def compound(text: str) -> float:
    """VADER's score of the whole text."""
    return float(_ANALYZER.polarity_scores(text)["compound"])


def positive(prompt: str, response: str, answer: str | None) -> bool:
    """At least 0.05, which VADER's authors call positive. The prompt is not judged."""
    return compound(response) >= 0.05


def clearly_positive(prompt: str, response: str, answer: str | None) -> bool:
    """At least 0.5."""
    return compound(response) >= 0.5


def very_positive(prompt: str, response: str, answer: str | None) -> bool:
    """At least 0.8."""
    return compound(response) >= 0.8
