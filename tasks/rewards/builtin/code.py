"""``builtin:code``: does the response's Python program pass all tests of the row's answer?

The program is the last block between code fences (with ``python``, ``py`` or nothing after the first one); in a response without a
fence, the whole response; in one that was cut off in a block, all that follows the fence. An empty program is wrong.

The answer is JSON in the form of APPS and TACO: ``{"inputs": […], "outputs": […]}``. Each input is a text for standard input, and its
output the text that the program must print: compared line by line without white space at the ends of lines and of the text. With
``"fn_name": NAME``, each input is a list of arguments for that function (or that method of a class ``Solution``), and its output the
value that it must return, as JSON: a tuple counts as a list, and 1 as 1.0, but not as true. The datasets wrap many of these outputs
in a list (``[4700]`` for 4700), and do not say where; as in the checker of APPS, the first item of an output that is a list is right too.

Programs have the standard library alone. They know the inputs and never the outputs, which are compared outside of their process.
"""

import json
import re
from typing import Any

from vantage.schemas.recipe.builtin_verifiers import BuiltinVerifier, CodeVerifier
from vantage.tasks.rewards.builtin.json_values import comparable
from vantage.tasks.rewards.builtin.judge import Judge, UnusableAnswer
from vantage.tasks.rewards.sandbox import MAX_TESTS, run, why_not_isolated

_FENCE = re.compile(r"^ {0,3}```[ \t]*+([A-Za-z0-9+.-]*+)[^\n`]*+$", re.MULTILINE)
"""Possessive quantifiers: without them, a long line that ends in a backtick takes time quadratic in its length."""
_PYTHON = ("", "python", "python3", "py")


def load(verifier: BuiltinVerifier) -> Judge:
    """Return the judge of programs."""
    assert isinstance(verifier, CodeVerifier)
    isolated = verifier.isolation == "required" or why_not_isolated() is None

    def judge(response: str, answer: str | None) -> bool:
        tests, outputs, has_function = tests_of(answer)
        program = program_in(response)
        if not program.strip() or "\0" in program:
            return False
        ran = run(verifier, program, tests, isolated=isolated)
        right = _same_value if has_function else _same_lines
        return len(ran) == len(outputs) and all(
            each.status == "ended" and right(each.output, expected)
            for each, expected in zip(ran, outputs, strict=True)
        )

    return judge


def program_in(response: str) -> str:
    """Return the program of a response: its last block of Python, or the whole response if it has no fence."""
    fences = list(_FENCE.finditer(response))
    if not fences:
        return response
    program = ""
    for number in range(0, len(fences), 2):
        end = fences[number + 1].start() if number + 1 < len(fences) else len(response)
        if fences[number][1].lower() in _PYTHON:
            program = response[fences[number].end() : end]
    return program


def tests_of(answer: str | None) -> tuple[list[dict[str, Any]], list[Any], bool]:
    """Return the inputs, the outputs, and whether they are those of a function.

    Raises:
        UnusableAnswer: the answer contains no tests.
    """
    try:
        given = json.loads(answer or "")
        inputs, outputs, function = given["inputs"], given["outputs"], given.get("fn_name")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise UnusableAnswer(_described(answer, "is no JSON with inputs and outputs")) from None
    kind, word = (str, "texts") if function is None else (list, "lists of arguments")
    if not (isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs)):
        raise UnusableAnswer(_described(answer, "has not as many outputs as inputs"))
    if not 1 <= len(inputs) <= MAX_TESTS:
        raise UnusableAnswer(_described(answer, f"has {len(inputs)} tests; 1 to {MAX_TESTS} are possible"))
    if not all(isinstance(each, kind) for each in inputs) or (
        function is None and not all(isinstance(each, str) for each in outputs)
    ):
        raise UnusableAnswer(_described(answer, f"has inputs or outputs that are no {word}"))
    if function is None:
        return [{"stdin": each} for each in inputs], outputs, False
    if not (isinstance(function, str) and function.isidentifier()):
        raise UnusableAnswer(_described(answer, f"has fn_name={function!r}, which is no name of a function"))
    return [{"function": function, "arguments": each} for each in inputs], outputs, True


def _described(answer: str | None, what: str) -> str:
    return (
        f"the answer {(answer or '')[:100]!r} {what}; give tests as "
        '{"inputs": [TEXT, …], "outputs": [TEXT, …]}, or with "fn_name" and lists of arguments'
    )


def _same_lines(printed: str, expected: str) -> bool:
    return [line.rstrip() for line in printed.rstrip().splitlines()] == [
        line.rstrip() for line in expected.rstrip().splitlines()
    ]


def _same_value(printed: str, expected: Any) -> bool:
    """Return whether a returned value is the expected one, or the one that the dataset has wrapped in a list."""
    wrapped = expected[:1] if isinstance(expected, list) else []
    try:
        found = comparable(json.loads(printed))
        return any(found == comparable(each) for each in (expected, *wrapped))
    except (ValueError, RecursionError):
        return False
