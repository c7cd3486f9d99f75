"""``builtin:length`` and ``builtin:repetition``: measures of the response's own text.

A character is a Unicode code point, so an emoji may count as several. Words are separated by white space. An empty
response has length 0. A response shorter than one sequence repeats nothing, so it is right for ``builtin:repetition``; combine it
with ``builtin:length`` if such a response must be wrong.
"""

from collections.abc import Sequence

from vantage.schemas.recipe.builtin_verifiers import BuiltinVerifier, LengthVerifier, RepetitionVerifier
from vantage.tasks.rewards.builtin.judge import Judge


def load(verifier: BuiltinVerifier) -> Judge:
    """Return the comparison of the measure with its bounds."""
    if isinstance(verifier, RepetitionVerifier):
        repetition = verifier
        return lambda response, _: (
            repeated_share(units(response, repetition.unit), n=repetition.ngram) <= repetition.at_most
        )
    assert isinstance(verifier, LengthVerifier)
    return lambda response, _: is_within(len(units(response, verifier.unit)), verifier)


def is_within(length: int, bounds: LengthVerifier) -> bool:
    """Return whether the length is within the bounds, both inclusive."""
    return bounds.at_least <= length and (bounds.at_most is None or length <= bounds.at_most)


def units(text: str, unit: str) -> Sequence[str]:
    """Return the text's characters or words."""
    return text if unit == "characters" else text.split()


def repeated_share(sequence: Sequence[str], *, n: int) -> float:
    """Return 1 − (number of different n-grams) / (number of all); 0 if there are none."""
    starts = range(len(sequence) - n + 1)
    ngrams = [
        sequence[i : i + n] if isinstance(sequence, str) else tuple(sequence[i : i + n]) for i in starts
    ]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
