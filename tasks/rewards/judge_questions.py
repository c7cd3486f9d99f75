"""The questions to a judge, and the scores in its answers."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from vantage.schemas.recipe.served_scores import SCORE, JudgeServer

_NUMBER = r"[+-]?(?:\d+(?:\.\d+)?|\.\d+)"
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


def read_number(answer: str, name: str, bounds: tuple[float, float]) -> float:
    """Return the number that an answer gives under a name: ``name: 7``, ``"name": 7``, ``**name**: 7/10``.

    What comes before the end of a ``<think>`` block is not read.

    Raises:
        Unreadable: there is none, there are two different ones, or it is beyond the bounds.
    """
    low, high = bounds
    top = re.escape(f"{high:g}")
    value = rf"({_NUMBER})(?:[ \t]*(?:/|out of)[ \t]*{top}(?:\.0+)?)?(?!\.?\w|[ \t]*(?:[/%–…]|-[ \t]*\d|to\b|or\b|out of\b))"
    number = float(_only_value(answer, name, value))
    if not low <= number <= high:
        raise Unreadable(f"{name} is {number:g}, and the scale is {low:g} to {high:g}")
    return number


def read_preference(answer: str, name: str) -> float:
    """Return the preference that an answer gives under a name: 1 for A, 0 for B, ½ for a tie.

    Raises:
        Unreadable: there is none, or there are two different ones.
    """
    value = r"(?:response[ \t]+)?(a|b|tie)\b(?![ \t]*(?:[/&]|or\b|and\b))"
    return _PREFERRED[_only_value(answer, name, value).lower()]


def _only_value(answer: str, name: str, value: str) -> str:
    """Return the one value that a pattern finds after a name and a colon or an equals sign.

    Raises:
        Unreadable: it finds none, or two different ones, or the name is there once more without a value.
    """
    text = answer.rpartition("</think>")[2]
    # Quotation marks and asterisks may precede the name. To match them too would take the square of the length of a row of them.
    label = rf"(?<!\w)_*{re.escape(name).replace('_', '[ _]')}[\"'*_`]*[ \t]*[:=][ \t]*[\"'*_`]*"
    found = [match[1] for match in re.finditer(label + value, text, re.IGNORECASE)]
    labels = len(re.findall(label, text, re.IGNORECASE))
    if not found or labels > len(found):
        raise Unreadable(f"it gives no readable {name}")
    different = {one if one.lower() in _PREFERRED else str(float(one)) for one in found}
    if len({each.lower() for each in different}) > 1:
        raise Unreadable(f"it gives {name} twice, as {' and as '.join(dict.fromkeys(found))}")
    return found[0]


def _request(judge: JudgeServer, texts: Mapping[str, str]) -> dict[str, Any]:
    content = filled(judge.template, {**texts, "criteria": _criteria(judge)})
    sampling = {} if judge.temperature is None else {"temperature": judge.temperature}
    return {
        **judge.request,
        **sampling,
        "model": judge.model,
        "max_tokens": judge.max_answer_tokens,
        "messages": [{"role": "user", "content": content}],
    }


def _criteria(judge: JudgeServer) -> str:
    low, high = judge.bounds
    scale = f" ({low:g} to {high:g})" if judge.against is None else ""
    whole = "how good the response is" if judge.against is None else "which response is better"
    described = judge.criteria or {SCORE: whole}
    return "".join(f"- {name}{scale}: {text}\n" for name, text in described.items())
