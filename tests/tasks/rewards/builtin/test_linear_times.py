"""Reading a response or a row takes time that grows no faster than the text: a quadratic reader needs minutes here."""

import json
import random
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from vantage.models.rendered_responses import _BEGIN_OF_THINKING
from vantage.review.audit.card_texts import compare_cards
from vantage.schemas.recipe.builtin_verifiers import ROW_OF
from vantage.tasks.data.conversations import _NUMPY_LIST
from vantage.tasks.rewards.builtin.code import _FENCE, program_in
from vantage.tasks.rewards.builtin.judge import load_builtin
from vantage.tasks.rewards.builtin.mathematics import written_out
from vantage.tasks.rewards.judge_questions import Unreadable, read_number, read_preference
from vantage.tasks.rewards.verifier_file import VerifierFunction

LONG = 30_000
SECONDS = 2.0
"""A hundred times what linear time needs."""


def loaded(source: str, **fields: Any) -> VerifierFunction:
    return load_builtin(ROW_OF[source].verifier(source=source, **fields), name="mine")


def judged(read: Callable[..., float], *arguments: Any) -> Callable[[str], object]:
    def judge(text: str) -> object:
        with pytest.raises(Unreadable):
            read(text, *arguments)
        return None

    return judge


UNIQUE = loaded("builtin:json_schema", matches={"type": "array", "uniqueItems": True})


def unique(text: str) -> object:
    return UNIQUE("prompt", text, None)


NUMBER = judged(read_number, "score", (0, 10))
CASES: dict[str, tuple[Callable[[str], object], str]] = {
    "a fence with a long name": (program_in, "```" + "a" * LONG + "`"),
    "a fence with many blanks": (program_in, "```" + " " * LONG + "`"),
    "a fence with blanks and a name": (program_in, "```" + " " * LONG + "a" * LONG + "`"),
    "different objects": (unique, json.dumps([{"a": n} for n in range(LONG)])),
    "different lists": (unique, json.dumps([[[n], None] for n in range(LONG)])),
    "apostrophes before a name": (NUMBER, "'" * LONG),
    "apostrophes before another name": (NUMBER, "`" * LONG + "scores"),
    "all that may precede a name": (NUMBER, "\"*'`" * LONG),
    "digits before no fraction": (written_out, "1" * LONG + "é"),
    "thousands before no fraction": (written_out, "1" + ",000" * LONG + "é"),
    "small digits before no slash": (written_out, "¹" * LONG),
    "small digits after a slash": (written_out, "¹⁄" * LONG),
    "underscores": (NUMBER, "_" * LONG),
    "marks before a preference": (judged(read_preference, "preferred"), "*" * LONG),
    "white space before a thought": (_BEGIN_OF_THINKING.search, " " * LONG + "x"),
    "lines before a thought": (_BEGIN_OF_THINKING.search, "\n\t" * LONG + "<"),
    "links that never end": (lambda text: compare_cards(text, text), "[x](" * LONG),
    "links to machines that never end": (lambda text: compare_cards(text, text), "[x](//[" * LONG),
    "lines after an object": (_NUMPY_LIST.search, "}" + "\n" * LONG),
}


@pytest.mark.parametrize("case", CASES)
def test_a_long_text_takes_no_time(case: str) -> None:
    read, text = CASES[case]
    began = time.process_time()
    read(text)
    assert time.process_time() - began < SECONDS


LABEL = r"a:[*_]*([0-9])"
PLAIN: list[tuple[str, re.Pattern[str], str, int | None]] = [
    (r"^ {0,3}```[ \t]*([A-Za-z0-9+.-]*)[^\n`]*$", _FENCE, "```` \tab\n~", None),
    (r"\s*(<[\w:]+>|\[\w+\]|<\|START_\w+\|>)\s*", _BEGIN_OF_THINKING, "  \n<a>[a]", 1),
    (r"\}\s*\n\s*\{\s*'(role|from|content|value)':", _NUMPY_LIST, "}} \t\n\n\r{{", None),
    (rf"(?<!\w)[\"'*_`]*{LABEL}", re.compile(rf"(?<!\w)_*{LABEL}"), "*_'aa::77x ", None),
]


@pytest.mark.parametrize(("plain", "fast", "alphabet", "matches"), PLAIN)
def test_a_fast_expression_finds_what_the_plain_one_finds(
    plain: str, fast: re.Pattern[str], alphabet: str, matches: int | None
) -> None:
    """Groups and ends of all matches are equal, or of the first one where only that is read."""
    slow, chance, found = re.compile(plain, fast.flags), random.Random(33), 0
    for _ in range(8_000):
        text = "".join(chance.choice(alphabet) for _ in range(chance.randrange(14)))
        if fast is _NUMPY_LIST:
            text += "{'role':"
        expected = [(match.groups(), match.end()) for match in slow.finditer(text)]
        same = [(match.groups(), match.end()) for match in fast.finditer(text)]
        assert same[:matches] == expected[:matches], text
        found += bool(expected)
    assert found > 50


ITEMS = (
    None,
    True,
    False,
    0,
    1,
    1.0,
    -0.0,
    2**70,
    "",
    "1",
    "true",
    [],
    {},
    [1],
    [True],
    {"a": 1},
    {"a": True},
    {"a": 1.0, "b": []},
)


def test_what_is_unique_is_what_the_library_finds_unique() -> None:
    """The library compares each item with each where it cannot sort them; an object among the items makes it do so."""
    library, chance = Draft202012Validator({"uniqueItems": True}), random.Random(33)
    for _ in range(1000):
        items = [{"k": "k"}, *(chance.choice(ITEMS) for _ in range(chance.randrange(5)))]
        if chance.random() < 0.5:
            items = [[each] for each in items]
            items.append({"k": "k"})
        assert unique(json.dumps(items)) is library.is_valid(items), items


def test_equal_lists_that_true_separates_are_found() -> None:
    """The library sorts these lists, and compares only neighbours: it misses two equal lists that `true`, which sorts as 1, separates."""
    assert unique("[[1], [true], [1]]") is False
    assert unique("[[1], [true], [0], [false]]") is True
