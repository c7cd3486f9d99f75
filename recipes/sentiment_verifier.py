"""Whether a text is cheerful, by VADER's lexicon and rules (Hutto and Gilbert, ICWSM 2014): no network, no GPU.

VADER's compound score is between −1 and 1. Verifiers say right or wrong, so a graded reward is a sum of steps: a term of the
recipe for each of the functions below.
"""

try:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
except ImportError as error:
    raise ImportError(f"{error}; vaderSentiment is needed: pip install 'vantage-rlhf[recipes]'") from None

_ANALYZER = SentimentIntensityAnalyzer()


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
