"""The verifier of grade-school problems (GSM8K, arXiv 2110.14168): is the response's final number the answer's?

The final number of a text is the first of these that it has:

1. what stands in the last ``\\boxed{…}`` or after the last ``####``, whichever comes later. ``#### Step 2`` and
   ``#### 1. Add up`` are headings and no answers;
2. what follows the last "answer is", "answer:" or "answer =";
3. the last number.

Of 1 and 2 the first number counts, or the one after the last ``=``. Numbers are compared exactly: ``1,234.50``, ``$-3``,
``3/4``, ``1 1/2``, ``\\frac{3}{4}``, ``1e3``, ``20%`` (which is 20). Words ("twelve", "2 million" for 2,000,000) are not read.
"""

import re
from bisect import bisect_left
from collections import deque
from fractions import Fraction

_DIGITS = r"[0-9]+(?:,[0-9]+)*(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(
    # A minus after a digit, a letter or a bracket subtracts
    rf"(?P<minus>(?<![\w).])-)?(?:\$\s?)?(?P<inner>(?<=\$)-)?"
    rf"(?:(?P<whole>[0-9]+)\s+(?=[0-9]+\s?/\s?[0-9]))?"
    rf"(?P<number>{_DIGITS})(?:[eE](?P<exponent>[+-]?[0-9]{{1,2}})(?![0-9A-Za-z]))?"
    rf"(?:\s?/\s?(?:\$\s?)?(?P<below>{_DIGITS}))?(?P<power>\s?(?:\^|\*\*))?"
)
_GROUPED = re.compile(r"[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?")
_MARK = re.compile(r"####(?P<line>[^\n#]*)|\\f?boxed\s*\{|\\fbox\s*\{")
_STARTS_WITH_NUMBER = re.compile(r"\s*(?:-\s?)?(?:\$\s?)?-?\.?[0-9]")
_SPACED_MINUS = re.compile(r"^\s*-\s+(?=[$.0-9])")
_HEADING = re.compile(r"\s*[0-9]+[.):]\s+\S")
_PHRASE = re.compile(r"\banswer\s*(?:is\s*:?|:|=)\s*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\n|[.!?](?=\s|$)")
_BRACE = re.compile(r"[{}]")
_DIGIT = re.compile(r"[0-9]")

_CALCULATION = re.compile(r"<<[^<>\n]*>>")
"""GSM8K's own annotations: ``48/2 = <<48/2=24>>24``."""
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_MARKUP = re.compile(
    r"\\[,!;: ]|\\(?:left|right|displaystyle|quad)\b|[*_`~]{2,}|(?<!\w)[*_`](?=[\w$\\-])|[`]"
)
_PLAIN = str.maketrans(
    {
        **dict(zip("０１２３４５６７８９．，－＄％＝／", "0123456789.,-$%=/", strict=True)),
        "−": "-",
        "–": "-",
        "⁄": "/",
        "½": " 1/2",
        "¼": " 1/4",
        "¾": " 3/4",
        "⅓": " 1/3",
        "⅔": " 2/3",
        **dict.fromkeys("€£¥", "$"),
    }
)


def verify(prompt: str, response: str, answer: str | None) -> bool:
    """Whether the response ends in the answer's number.

    Args:
        prompt: the problem; not read.
        answer: the row's reference: a worked answer that ends in ``#### N``, or the number alone. One without any number
            makes every response wrong.

    Raises:
        ValueError: the row has no answer.
    """
    if answer is None:
        raise ValueError(
            "the prompt has no reference answer; map it with columns: {prompt: question, answer: answer}"
        )
    expected = final_number(answer)
    return expected is not None and final_number(response) == expected


def final_number(text: str) -> Fraction | None:
    """The number that a worked answer ends in; None: it has none, or one that cannot be read."""
    text = _plain(text)
    marked = _marked(text)
    if marked is not None:
        return _stated(marked)
    sentence = _answering_sentence(text)
    if sentence is not None:
        return _stated(sentence)
    numbers = deque(_NUMBER.finditer(text), maxlen=1)
    return _value(numbers[0]) if numbers else None


def _plain(text: str) -> str:
    """The text without LaTeX's and markdown's ways of writing a number."""
    text = _CALCULATION.sub("", text.translate(_PLAIN))
    text = text.replace("{,}", ",").replace("\\$", "$").replace("\\%", "%").replace("\\#", "#")
    return _MARKUP.sub("", _FRACTION.sub(r" \1/\2", text))


def _answering_sentence(text: str) -> str | None:
    """The rest of the sentence after the last "answer is" that a number follows in it; None: there is none.

    Ends and digits are found once for all phrases: a text that repeats a phrase is read in time linear in its length.
    """
    ends = [*(end.start() for end in _SENTENCE_END.finditer(text)), len(text)]
    digits = [digit.start() for digit in _DIGIT.finditer(text)]
    for phrase in reversed(list(_PHRASE.finditer(text))):
        start = phrase.end()
        end = ends[bisect_left(ends, start)]
        digit = bisect_left(digits, start)
        if digit < len(digits) and digits[digit] < end:
            return text[start:end]
    return None


def _marked(text: str) -> str | None:
    """What stands in the last box or after the last ``####``; None: there is neither."""
    found = None
    for mark in _MARK.finditer(text):
        line = mark["line"]
        if line is None or (_STARTS_WITH_NUMBER.match(line) and not _HEADING.match(line)):
            found = mark
    if found is None or found["line"] is not None:
        return None if found is None else found["line"]
    return _inside(text, found.end())


def _inside(text: str, start: int) -> str:
    """The text up to the brace that closes the one before ``start``; up to the end where none does."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return text[start : brace.start()]
    return text[start:]


def _stated(words: str) -> Fraction | None:
    """The number of an answer in words: the first one, or the first after the last ``=``."""
    words = _SPACED_MINUS.sub("-", words.rpartition("=")[2])
    number = _NUMBER.search(words)
    return None if number is None else _value(number)


def _value(match: re.Match[str]) -> Fraction | None:
    """Exactly what the number is; None for wrong commas, a power, a division by 0, or thousands of digits."""
    below = match["below"]
    number, divisor, whole = (
        _decimal(digits) for digits in (match["number"], below or "1", match["whole"] or "0")
    )
    if match["power"] or number is None or divisor is None or whole is None or divisor == 0:
        return None
    value = whole + number * Fraction(10) ** int(match["exponent"] or 0) / divisor
    return -value if match["minus"] or match["inner"] else value


def _decimal(digits: str) -> Fraction | None:
    if len(digits) > 1000 or ("," in digits and not _GROUPED.fullmatch(digits)):
        return None
    return Fraction(digits.replace(",", ""))
