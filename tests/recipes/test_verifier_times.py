"""Verifiers that are shipped read a hostile response in time that grows no faster than its length."""

import time
from collections.abc import Callable
from functools import partial

import pytest

from vantage.cli.recipe_draft import BOXED
from vantage.recipes import gsm8k_verifier, sentiment_verifier
from vantage.tasks.data import arithmetic
from vantage.tasks.rewards.exact_match import exact_match

pytestmark = pytest.mark.slow

Judge = Callable[[str], object]

PROBLEM = next(arithmetic.demonstrations(seed=0, count=1))["prompt"]
JUDGES: dict[str, Judge] = {
    "gsm8k": lambda response: gsm8k_verifier.verify("", response, "#### 72"),
    "sentiment": lambda response: sentiment_verifier.positive("", response, None),
    "dial": partial(arithmetic.verify, PROBLEM),
    "exact match": partial(exact_match, answer="1,072", extract=None),
    "exact match in a box": partial(exact_match, answer="72", extract=BOXED),
}

PHRASES = {
    "gsm8k": (
        *("the answer is ", "answer is x! ", "answer is. ", "answer: ", "answer =\n", "answer", "answer ", "answer is =1 "),
        *("####", "#### ", "#### x", "#### 1. ", "\\boxed{", "\\boxed {", "\\fboxed{{", "\\fbox{", "boxed", "{", "}", "{}"),
        *("\\frac{", "\\frac {1}", "\\frac{1}{", "\\frac", "<<", "<<a", "<<1>>", "\\", "\\,", "\\left", "*", "**", "`", "_", "~"),
        *("1", "1,", "1,234", "1.", ".", "1 ", "1 1/", "1/", "1 / ", "1e", "1^", "$", "$ ", "-", "- ", "=", "½", "\\$", "{,}"),
    ),
    "sentiment": (
        *("good ", "not good but ", "but ", "GOOD! ", "! ", "?", "😀", "😀 ", "kind of ", "the shit ", "never so good ", ":) ", "."),
        *("bad but good ", "least good ", "no good nor bad ", "very "),
    ),
    "dial": ("#", "# ", "#1", "a+2:345 ", "a ", "1"),
    "exact match": ("1", "1,", "1,072", ",072", ".", "1.", "+", "-1"),
    "exact match in a box": ("\\boxed{", "\\boxed{72", "\\boxed", "\\", "{", "\\boxed{}"),
}  # fmt: skip
"""The texts that the verifier's patterns begin with, and what they go on with."""
EVERYWHERE = (" ", "\n", "\t", "(", "[", "((", "[]", "a", "é", "0", "9 ", "\\(", "<")
REPEATS = {"sentiment": 1000, "gsm8k": 4000, "exact match in a box": 4000}
"""Repeats of the shorter text, where 8000 take more than a twentieth of a second: these take 20 ms."""
CASES = [(name, phrase) for name, phrases in PHRASES.items() for phrase in (*phrases, *EVERYWHERE)]


def seconds(judge: Judge, response: str) -> float:
    """Return the processor time of one verdict."""
    started = time.process_time()
    judge(response)
    return time.process_time() - started


def texts(phrase: str, repeats: int) -> tuple[str, str, str]:
    """Return the phrase repeated: alone, before a text that could be an answer, and after a beginning."""
    return phrase * repeats, phrase * repeats + " x 72", "the answer is \\boxed{" + phrase * repeats


@pytest.mark.parametrize("name", JUDGES)
def test_four_thousand_repeats_take_no_time(name: str) -> None:
    """A verifier in linear time takes 10 ms here. One in quadratic time took 8 s and more."""
    for phrase in (*PHRASES[name], *EVERYWHERE):
        for text in texts(phrase, 4000):
            assert seconds(JUDGES[name], text) < 1.0, phrase


def test_the_example_of_a_recipe_finds_a_box() -> None:
    assert exact_match("so \\boxed{7} or rather \\boxed{ 72 }.", "72", extract=BOXED)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "phrase"), CASES)
def test_time_grows_with_the_length(name: str, phrase: str) -> None:
    """If the time were a square, four times the length would take 16 times as long."""
    repeats = REPEATS.get(name, 8000)
    for short, long in zip(texts(phrase, repeats), texts(phrase, 4 * repeats), strict=True):
        before = min(seconds(JUDGES[name], short) for _ in range(3))
        after: list[float] = []
        while not after or after[-1] >= 8 * max(before, 0.01):
            assert len(after) < 3, (before, after)
            after.append(seconds(JUDGES[name], long))


def test_scores_of_vader_are_those_of_the_library() -> None:
    from random import Random

    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    plain, chance = SentimentIntensityAnalyzer(), Random(0)
    lexicon, emojis = list(plain.lexicon), list(plain.emojis)
    words = (
        *("but", "But", "not", "never", "so", "this", "without", "doubt", "least", "at", "very", "kind", "of", "no", "nor"),
        *("the", "shit", "bad", "ass", "GOOD", "nice!", ":)", "a", "house", "isn't", "yeah", "right", "to", "die", "for"),
    )  # fmt: skip
    for _ in range(1000):
        kinds = chance.choices((words, lexicon, emojis), (5, 4, 1), k=chance.choice((1, 2, 3, 5, 8, 20, 60)))
        text = " ".join(chance.choice(each) for each in kinds)
        assert sentiment_verifier.compound(text) == plain.polarity_scores(text)["compound"], text
