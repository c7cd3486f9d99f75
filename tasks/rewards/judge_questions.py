"""The questions to a judge, and the scores in its answers."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vantage.schemas.recipe.served_scores import COMPLETION_TOKENS, SCORE, JudgeServer

_NUMBER = r"[+-]?(?:\d+(?:\.\d+)?|\.\d+)"
_PREFERENCE = r"(?:response[ \t]+|a[ \t]+(?=tie\b))?(a|b|tie)\b"
_ANOTHER_PREFERENCE = r"(?:response[ \t]+)?(?:(?-i:[AB])\b|(?:a[ \t]+)?tie\b|[ab][ \t]*(?:$|[.,;)]))"
"""A preference within a sentence; a small ``a`` is an article unless the sentence ends there."""
# Repetitions have bounds or no way back, so that an answer of any length takes time linear in it.
_MARKS = r"[\"'*_`]{0,6}+"
_CLOSED = r"[\"'*_`\])}]{0,6}+"
_REASON = r"(?:because|since|as)\b"
_UNIT = r"(?:percent|stars?|marks?)\b"
_CORRECTED = (
    r"(?:or|no|wait|well|hm{1,9}|maybe|perhaps|rather|actually|correction|i[ \t]+mean|make[ \t]+it)\b[ \t,:]{1,6}"
    r"(?:(?:rather|perhaps|maybe|it[ \t]+is|it's|make[ \t]+it)[ \t,:]{1,6})?"
)
"""Words before a value that corrects the value before it: ``7. No, it is 8``."""
_OPPOSITE = r"(?<![^\W\d]-)(?<!\bnot[ _])(?<!\bnon[ _])"
"""Prefixes that negate a name are excluded: neither ``un-clear: 7`` nor ``not clear: 7`` is a score of ``clear``."""
_THINKING_ENDS = re.compile(r"</think(?:ing)?>", re.IGNORECASE)
_THINKING = re.compile(r"<think(?:ing)?>", re.IGNORECASE)
_PREFERRED = {"a": 1.0, "tie": 0.5, "b": 0.0}
"""Preferred response → score of the one that was shown first."""


class Unreadable(ValueError):
    """An answer from which the scores cannot be read."""


def questions(judge: JudgeServer, prompt: str, response: str, answer: str | None) -> Iterator[dict[str, Any]]:
    """Yield the requests about a response: one, or with ``against`` one for each order of the two responses."""
    if judge.against is None:
        yield _request(judge, {"prompt": prompt, "response": response, "answer": answer or ""})
        return
    assert answer is not None  # prompts without an answer were refused
    for first, second in ((response, answer), (answer, response)):
        yield _request(judge, {"prompt": prompt, "first": first, "second": second, "answer": answer})


def filled(template: str, texts: Mapping[str, str]) -> str:
    """Return a question with the texts in their places, all at once: a response that contains ``{answer}`` is shown as it is."""
    return re.sub(r"\{(" + "|".join(texts) + r")\}", lambda place: texts[place[1]], template)


def read_number(answer: str, name: str, bounds: tuple[float, float], *, names: Sequence[str] = ()) -> float:
    """Return the number that an answer gives under a name: ``name: 7``, ``"name": 7``, ``**name**: 7/10``.

    What comes before the end of a ``<think>`` block is not read. The end of the line, another name, or a reason may follow the
    number, but no unit and no second number.

    Args:
        names: all names of the judge's scores; a longer name that ends in ``name`` is a different score.

    Raises:
        Unreadable: there is no number, there are two different ones, or the number is beyond the bounds.
    """
    low, high = bounds
    top = re.escape(f"{high:g}")
    number = rf"({_NUMBER})(?:[ \t]*\(?(?:/|out of)[ \t]*{top}(?:\.0+)?\)?)?"
    found = float(_only_value(answer, name, number + _ends(r"out of\b|[+-]?\.?[\d½¼¾]", names), names))
    if not low <= found <= high:
        raise Unreadable(f"{name} is {found:g}, and the scale is {low:g} to {high:g}")
    return found


def read_preference(answer: str, name: str, *, names: Sequence[str] = ()) -> float:
    """Return the preference that an answer gives under a name: 1 for A, 0 for B, ½ for a tie; ``names`` as for ``read_number``.

    Raises:
        Unreadable: there is no preference, or there are two different ones.
    """
    return _PREFERRED[
        _only_value(answer, name, _PREFERENCE + _ends(_ANOTHER_PREFERENCE, names), names).lower()
    ]


def _ends(another: str, names: Sequence[str]) -> str:
    """Return an expression for what may follow a value: the line's end, another name, or a reason without ``another`` value.

    A name directly after the value must be one of the judge's, or a single word: several words may be a unit or a range
    (``7 to 8 clear: 3``).
    """
    known = "".join(f"{_in_words(each)}|" for each in names)
    label = rf"{_MARKS}(?:{known}(?!{_UNIT})[^\W\d]\w{{0,62}}){_MARKS}[ \t]*+[:=：]"
    reason = rf"(?:{_REASON}|(?!(?:\w{{1,62}}[ \t]+|{_CORRECTED})?(?:{another})))"
    begun = rf"(?:[.,;!?]{_CLOSED}[ \t]+|[.,;]?[ \t]*\(|[ \t]+[-–—|][ \t]+|[,;][ \t]*(?=[\"'*{{]))"
    follows = rf"[.,;!?]?{_CLOSED}[ \t\r]*$|{begun}{reason}|[ \t]+(?:points?\b[ \t]*(?:$|{label})|{_REASON}|{label})"
    return rf"(?={_CLOSED}(?:{follows}))"


def _only_value(answer: str, name: str, value: str, names: Sequence[str]) -> str:
    """Return the one value that a pattern finds after a name and a colon or an equals sign.

    Raises:
        Unreadable: there is no value, there are two different ones, or the name occurs once more without a value.
    """
    text = _THINKING_ENDS.split(answer)[-1]
    if _THINKING.search(text):
        raise Unreadable("its thinking has no end")
    longer = [other.removesuffix(f"_{name}") for other in names if other.endswith(f"_{name}")]
    alone = "".join(rf"(?<!{_in_words(before)}[ _])" for before in longer)
    label = rf"(?<!\w){_OPPOSITE}{alone}{_MARKS}{_in_words(name)}{_MARKS}[ \t]*[:=：][ \t\"'*_`]*"
    flags = re.IGNORECASE | re.MULTILINE
    found = [match[1] for match in re.finditer(label + value, text, flags)]
    labels = len(re.findall(label, text, flags))
    if not found or labels > len(found):
        raise Unreadable(f"it gives no readable {name}")
    different = {one if one.lower() in _PREFERRED else str(float(one)) for one in found}
    if len({each.lower() for each in different}) > 1:
        raise Unreadable(f"it gives {name} twice, as {' and as '.join(dict.fromkeys(found))}")
    return found[0]


def _in_words(name: str) -> str:
    return re.escape(name).replace("_", "[ _]")


def _request(judge: JudgeServer, texts: Mapping[str, str]) -> dict[str, Any]:
    content = filled(judge.template, {**texts, "criteria": _criteria(judge)})
    sampling = {} if judge.temperature is None else {"temperature": judge.temperature}
    limit = {} if COMPLETION_TOKENS in judge.request else {"max_tokens": judge.max_answer_tokens}
    return {
        **judge.request,
        **sampling,
        "model": judge.model,
        **limit,
        "messages": [{"role": "user", "content": content}],
    }


def _criteria(judge: JudgeServer) -> str:
    low, high = judge.bounds
    scale = f" ({low:g} to {high:g})" if judge.against is None else ""
    whole = "how good the response is" if judge.against is None else "which response is better"
    described = judge.criteria or {SCORE: whole}
    return "".join(f"- {name}{scale}: {text}\n" for name, text in described.items())
