"""Every built-in verifier judges right and wrong, empty, cut-off, foreign, doubtful and huge responses as it documents."""

import json
import math
import signal
import time
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
import reasoning_gym
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from reasoning_gym.factory import get_score_answer_fn

from vantage.schemas.recipe.builtin_verifiers import (
    BUILTIN,
    AnyVerifier,
    BuiltinVerifier,
    JsonSchemaVerifier,
)
from vantage.tasks.rewards import verifier_process
from vantage.tasks.rewards.builtin import code, regex
from vantage.tasks.rewards.builtin.code import program_in
from vantage.tasks.rewards.builtin.judge import MAX_CHARACTERS, load_builtin
from vantage.tasks.rewards.builtin.measures import repeated_share
from vantage.tasks.rewards.builtin.number import number_in
from vantage.tasks.rewards.verifier_file import BrokenVerifier, VerifierFunction
from vantage.tasks.rewards.verifier_process import VerifierOutOfMemory, VerifierProcess
from vantage.tasks.rewards.verifiers import builtin_process

REVERSED = {
    "entry": json.dumps(
        {"question": "Reverse: ab", "answer": "ba", "metadata": {"source_dataset": "spell_backward"}}
    )
}
GRID = json.dumps({"answer": "1 2", "metadata": {"source_dataset": "arc_agi", "output": [[1, 2]]}})
"""An entry whose scoring compares with tuples, which JSON does not have."""
SUM = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]})
SUMS = "a, b = map(int, input().split())\nprint(a + b)"


def loaded(source: str, **fields: Any) -> VerifierFunction:
    verifier = TypeAdapter(AnyVerifier).validate_python({"source": f"builtin:{source}", **fields})
    assert isinstance(verifier, BuiltinVerifier)
    return load_builtin(verifier, name="mine")


Cases = list[tuple[str, str | None, bool]]

NUMBERS: Cases = [
    ("42", "42", True),
    (" 42.0\n", "42", True),
    ("1,234.5", "1234.5", True),
    ("+.5", "1/2", True),
    ("1/3", "2/6", True),
    ("5e-1", "0.5", True),
    ("4.2E1", "42", True),
    ("-3", "−3", True),
    ("１２", "12", True),  # full-width
    ("٤٢", "42", True),  # Arabic-Indic, which is written from right to left
    ("\u200f42", "42", False),  # with a mark of direction
    ("0.1", "0.10000000000000001", False),  # equal as binary fractions
    ("43", "42", False),
    ("", "42", False),
    ("42 or 43", "42", False),
    ("about 42", "42", False),
    ("1,23", "123", False),
    ("4", "42", False),  # cut off
    ("nan", "42", False),
    ("inf", "42", False),
    ("1/0", "42", False),
    ("1e99999", "42", False),
    ("1e999999999999", "42", False),
    ("１，２３４．５", "1234.5", True),  # full-width signs
    ("－3", "−3", True),
    ("–3", "-3", True),
    ("𝟒𝟐", "42", True),  # mathematical digits
    ("²", "2", False),  # an exponent
    ("10³", "103", False),
    ("5₂", "52", False),
    ("①", "1", False),
    ("½", "1/2", False),
    ("9" * 1001, "42", False),
]
MATHS: Cases = [
    (r"$\frac{1}{2}$", "0.5", True),
    (r"so it is \boxed{1/2}", r"$\frac{1}{2}$", True),
    (r"$1 + x^2$", "x^2+1", True),
    (r"$(x+1)^2$", "$x^2 + 2x + 1$", True),
    ("3, no, 4", "4", True),
    (r"\boxed{3} and \boxed{4}", "4", False),  # boxes side by side are a set
    (r"\boxed{3} and \boxed{4}", r"$\{3, 4\}$", True),
    (r"\boxed{3}. After more thought, it is \boxed{4}", "4", False),  # a comma between them is enough
    (r"\boxed{3}. After more thought it is \boxed{4}", "4", True),
    (r"\boxed{3}, " + 70 * "x" + r" \boxed{4}", "4", True),
    (r"\boxed{3}, then $4$", "3", True),
    ("the answer is 3. No, 4", "3", True),
    ("the answer is 3. No, 4", "4", False),
    ("x₁", "x_1", False),  # no LaTeX
    ("１２", "12", True),
    ("٤٢", "42", True),
    ("−3", "-3", True),
    ("𝑥² − ２", "x^2-2", False),  # no LaTeX: only numbers are read
    ("$𝑥² − ２$", "x^2-2", True),
    ("10³", "1000", True),
    ("10³", "103", False),
    ("10³", "10", False),
    ("so 10³. Or not", "1000", True),
    ("$10³$", "1000", True),
    (r"\boxed{10³.}", "1000", True),
    ("1000", "10³", True),
    ("103", "10³", False),
    ("$10⁻³$", "0.001", True),
    ("$2³⁻¹$", "4", True),
    ("$e^{2x}$", "$e²ˣ$", True),
    ("$x^{n(n+1)}$", "$xⁿ⁽ⁿ⁺¹⁾$", True),
    ("5₂", "52", False),
    ("$x₁+x₂$", "$x_2+x_1$", True),
    ("$x₁+x₂$", "$2x$", False),
    ("①", "1", False),
    ("½", "0.5", True),
    ("½", "1", False),
    ("It is ½.", "0.5", True),
    ("0.5", "½", True),
    ("$x^½$", r"$\sqrt{x}$", True),
    ("$½x$", r"$\frac{x}{2}$", True),
    ("1½", "1.5", True),
    ("1½", "1", False),
    ("1½", "0.5", False),
    ("−1 ½.", "-1.5", True),
    ("1,000½", "1000.5", True),
    ("12\u202f345", "12345", True),  # thin and narrow spaces divide thousands
    ("3\u2009000", "3000", True),
    (r"\boxed{2¾}", r"$\frac{11}{4}$", True),
    ("¹⁄₂", "0.5", True),
    ("1⁄2", "0.5", True),
    ("1⁄2", "1", False),
    ("$ℝ$", r"$\mathbb{R}$", True),
    ("$x^2$", "x^2+1", False),
    ("", "12", False),
    ("no number", "12", False),
    (r"\boxed{1", "12", False),
    (r"\frac{", "12", False),
]
PATTERN: Cases = [
    ("abab", None, True),
    ("ab", None, True),
    ("", None, False),
    ("aba", None, False),
    ("ab\n", None, False),
]
JSONS: Cases = [
    ('{"a": 1}', None, True),
    (' {"a": 1, "b": "é"}\n', None, True),
    ('{"a": "1"}', None, False),
    ('{"a": NaN}', None, False),
    ('{"a": 1, "b": NaN}', None, False),
    ('{"a": 1, "a": 1}', None, False),
    ('{"a": 1', None, False),
    ('{"a": 1}{"a": 1}', None, False),
    ('```json\n{"a": 1}\n```', None, False),
    ("", None, False),
    ('{"a": １}', None, False),
    ('{"a": ' + "9" * 5000 + "}", None, False),
    ("[" * 100_000, None, False),
]
LANGUAGES: Cases = [
    ("Das ist ein ganz gewöhnlicher Satz in deutscher Sprache.", None, True),
    ("This is a plain sentence that is written in English.", None, False),
    ("هذه جملة عادية مكتوبة باللغة العربية.", None, False),
    ("", None, False),
    ("42 + 17 = 59", None, False),
    ("🙂🙂🙂", None, False),
    ("\ud800", None, False),
]
LENGTHS: Cases = [
    ("abc", None, True),
    ("abcde", None, True),
    ("ab", None, False),
    ("abcdef", None, False),
    ("é🙂ｘ", None, True),
    ("", None, False),
]
REPEATED: Cases = [
    ("a b c d e f", None, True),
    ("a b a b a b a b", None, False),
    ("the same word " * 1000, None, False),
    ("one two", None, True),
    ("", None, True),
]
SECTIONS: Cases = [
    ("<think>a</think><answer>b</answer>", None, True),
    ("\n<think>\na\n</think>\n\n<answer>٤２</answer> ", None, True),
    ("<think>a</think><answer>b", None, False),
    ("<think>a</think>", None, False),
    ("<answer>b</answer><think>a</think>", None, False),
    ("<think>a<answer>b</answer></think>", None, False),
    ("<think>a</think> so <answer>b</answer>", None, False),
    ("<think>a</think><answer>b</answer>!", None, False),
    ("<think> </think><answer>b</answer>", None, False),
    ("<think>a</think><answer>b</answer><answer>c</answer>", None, False),
    ("<THINK>a</THINK><answer>b</answer>", None, False),
    ("", None, False),
]
GYM: Cases = [
    (" ba\n", REVERSED["entry"], True),
    ("ab", REVERSED["entry"], False),
    ("", REVERSED["entry"], False),
]
PROGRAMS: Cases = [
    (SUMS, SUM, True),
    (f"Here it is:\n```python\n{SUMS}\n```\nDone.", SUM, True),
    (f"```python\nprint(0)\n```\nor better\n```py\n{SUMS}\n```", SUM, True),  # the last of several
    (f"```python\n{SUMS}\n```\n```text\n3\n```", SUM, True),
    (f"```python\n{SUMS}", SUM, True),  # cut off after the program
    (f"```python\n{SUMS[:-3]}", SUM, False),
    ("print(3)", SUM, False),
    (f"{SUMS}\nimport sys; sys.exit(1)", SUM, False),
    # right in its only test, so its result is there
    ("print(7)\nimport sys; sys.exit(1)", json.dumps({"inputs": ["3 4"], "outputs": ["7"]}), False),
    ("print('３')\nprint('７')", SUM, False),
    ("x = '\ud800'\n" + SUMS, SUM, False),  # no Python file can contain it
    ("", SUM, False),
    ("```python\n```", SUM, False),
    ("I do not know.", SUM, False),
    ("\0" + SUMS, SUM, False),
    (
        "def f(a): return (a, [1.0])",
        json.dumps({"fn_name": "f", "inputs": [[2]], "outputs": [[2, [1]]]}),
        True,
    ),
    ("def f(a): return a", json.dumps({"fn_name": "f", "inputs": [[2]], "outputs": [3]}), False),
    ("def g(a): return a", json.dumps({"fn_name": "f", "inputs": [[2]], "outputs": [2]}), False),
    ("def f(a): return object()", json.dumps({"fn_name": "f", "inputs": [[2]], "outputs": [2]}), False),
    # APPS wraps outputs of functions in a list, and does not say which
    (
        "def f(a, b): return 4700",
        json.dumps({"fn_name": "f", "inputs": [[5750, 0]], "outputs": [[4700]]}),
        True,
    ),
    ("def f(a): return [4700]", json.dumps({"fn_name": "f", "inputs": [[0]], "outputs": [[4700]]}), True),
    ("def f(a): return [1, 2]", json.dumps({"fn_name": "f", "inputs": [[0]], "outputs": [[[1, 2]]]}), True),
    ("def f(a): return []", json.dumps({"fn_name": "f", "inputs": [[0]], "outputs": [[]]}), True),
    ("def f(a): return None", json.dumps({"fn_name": "f", "inputs": [[0]], "outputs": [[]]}), False),
    ("def f(a): return 2", json.dumps({"fn_name": "f", "inputs": [[0]], "outputs": [[1, 2]]}), False),
    ("def f(a): return [[4700]]", json.dumps({"fn_name": "f", "inputs": [[0]], "outputs": [[4700]]}), False),
    ("def f(a): return 4700", json.dumps({"fn_name": "f", "inputs": [[0]], "outputs": [[[4700]]]}), False),
    ("def f(a): return 'a'", json.dumps({"fn_name": "f", "inputs": [[0]], "outputs": ["ab"]}), False),
    # true is not 1
    ("def f(a): return True", json.dumps({"fn_name": "f", "inputs": [[0]], "outputs": [1]}), False),
    ("def f(a): return 0", json.dumps({"fn_name": "f", "inputs": [[0]], "outputs": [False]}), False),
    (
        "def f(a): return {'a': [True]}",
        json.dumps({"fn_name": "f", "inputs": [[0]], "outputs": [{"a": [1]}]}),
        False,
    ),
    ("def f(a): return True", json.dumps({"fn_name": "f", "inputs": [[0]], "outputs": [[True]]}), True),
    (
        "def f(a): return {'a': [True]}",
        json.dumps({"fn_name": "f", "inputs": [[0]], "outputs": [[{"a": [True]}]]}),
        True,
    ),
]

ALL: list[tuple[str, dict[str, Any], Cases]] = [
    ("number", {}, NUMBERS),
    ("math_verify", {}, MATHS),
    ("regex", {"pattern": "(ab)+"}, PATTERN),
    (
        "json_schema",
        {
            "matches": {
                "type": "object",
                "properties": {"a": {"type": "integer", "maximum": 1000}},
                "required": ["a"],
            }
        },
        JSONS,
    ),
    ("language", {"language": "de"}, LANGUAGES),
    ("length", {"at_least": 3, "at_most": 5}, LENGTHS),
    ("repetition", {"at_most": 0.3, "ngram": 2}, REPEATED),
    ("format", {"tags": ["think", "answer"]}, SECTIONS),
    ("reasoning_gym", {}, GYM),
    ("code", {}, PROGRAMS),
]


def test_every_built_in_verifier_is_tried() -> None:
    assert {f"builtin:{source}" for source, _, _ in ALL} == {row.source for row in BUILTIN}


@pytest.mark.parametrize(("source", "fields", "cases"), ALL, ids=[source for source, _, _ in ALL])
def test_what_is_right_and_what_is_wrong(source: str, fields: dict[str, Any], cases: Cases) -> None:
    verify = loaded(source, **fields)
    assert [(response, answer, verify("prompt", response, answer)) for response, answer, _ in cases] == cases


@pytest.mark.parametrize(("source", "fields", "cases"), ALL, ids=[source for source, _, _ in ALL])
def test_a_huge_response_is_wrong_and_takes_no_time(
    source: str, fields: dict[str, Any], cases: Cases
) -> None:
    if source in ("regex", "repetition", "length"):  # this verifier would find it right
        fields = {"regex": {"pattern": "a*"}, "repetition": {"at_most": 1.0}, "length": {"at_least": 1}}[
            source
        ]
    verify, answer = loaded(source, **fields), cases[0][1]
    assert verify("prompt", "a" * (MAX_CHARACTERS + 1), answer) is False
    if source in ("regex", "repetition", "length"):
        assert verify("prompt", "a" * MAX_CHARACTERS, answer) is True


@pytest.mark.parametrize(
    ("source", "answers", "told"),
    [
        ("number", ["twelve", "", None, "1 2"], "is no number; correct the row's answer, or leave the row out"),
        ("math_verify", ["", None, " "], "math-verify reads nothing in the answer"),
        ("reasoning_gym", ["", None, "3", "{}", '{"metadata": {}}'], "is no entry of Reasoning Gym as JSON"),
        ("reasoning_gym", ['{"metadata": {"source_dataset": "none"}}'], "Reasoning Gym cannot score the entry's own answer (ValueError: "),
        ("reasoning_gym", [GRID], "Reasoning Gym scores the entry's own answer 0.05, which is below at_least=1; entries of some"),
        ("code", ["", None, "3", "[]", "{}", '{"inputs": []}', "[" * 100_000], "is no JSON with inputs and outputs"),
        ("code", ['{"inputs": ["a"], "outputs": []}', '{"inputs": "a", "outputs": "b"}'], "has not as many outputs as inputs"),
        ("code", ['{"inputs": [], "outputs": []}'], "has 0 tests; 1 to 200 are possible"),
        ("code", [json.dumps({"inputs": ["a"] * 201, "outputs": ["a"] * 201})], "has 201 tests"),
        ("code", ['{"inputs": [1], "outputs": ["a"]}', '{"inputs": ["a"], "outputs": [1]}'], "inputs or outputs that are no texts"),
        ("code", ['{"fn_name": "f", "inputs": ["a"], "outputs": [1]}'], "inputs or outputs that are no lists of arguments"),
        ("code", ['{"fn_name": "f()", "inputs": [[]], "outputs": [1]}'], "fn_name='f()', which is no name of a function"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("response", ["", "5", "x" * (MAX_CHARACTERS + 1)], ids=["empty", "short", "huge"])
def test_an_answer_that_cannot_be_compared_with_is_refused_for_every_response(
    source: str, answers: list[str | None], told: str, response: str
) -> None:
    verify = loaded(source)
    for answer in answers:
        with pytest.raises(BrokenVerifier) as broken:
            verify("prompt", response, answer)
        assert str(broken.value).startswith("verifiers.mine: prompt 'prompt': ") and told in str(broken.value)
        assert len(str(broken.value)) < 1000


@pytest.mark.parametrize(
    ("source", "fields", "told"),
    [
        ("regex", {"pattern": "(?=a)"}, "verifiers.mine.pattern='(?=a)' is no expression of RE2 (invalid perl operator: (?=)"),
        ("regex", {"pattern": r"(a)\1"}, "is no expression of RE2"),
        ("number", {"extract": "(?<=#)([0-9])"}, "verifiers.mine.extract='(?<=#)([0-9])' is no expression of RE2"),
        ("json_schema", {"matches": {"type": "thing"}}, "verifiers.mine.matches is no JSON schema ("),
        ("json_schema", {"matches": {"$ref": "http://127.0.0.1:1/x"}}, "verifiers.mine.matches refers to 'http://127.0.0.1:1/x'"),
        ("language", {"language": "xx"}, "verifiers.mine.language=xx is not known to py3langid; name one of"),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_be_used_is_refused(source: str, fields: dict[str, Any], told: str) -> None:
    with pytest.raises(BrokenVerifier) as broken:
        loaded(source, **fields)
    assert str(broken.value).startswith(told) or told in str(broken.value)


def test_a_response_over_which_a_task_raises_is_wrong() -> None:
    """The task's scoring reads a field that the response, as JSON, does not have."""
    entry = reasoning_gym.create_dataset("game_of_life", size=1, seed=3)[0]
    written = json.dumps(entry)
    with pytest.raises(KeyError):
        get_score_answer_fn("game_of_life")(answer="{}", entry=json.loads(written))
    verify = loaded("reasoning_gym")
    assert [verify("p", response, written) for response in ("{}", "[[", entry["answer"])] == [
        False,
        False,
        True,
    ]


# -- extract


def test_the_last_match_is_judged_and_none_is_wrong() -> None:
    boxed = loaded("number", extract=r"\\boxed\{([^}]*)\}")
    responses = [r"\boxed{3} then \boxed{４}", r"\boxed{4} then \boxed{3}", "4", "", r"\boxed{4"]
    assert [boxed("p", response, "4") for response in responses] == [True, False, False, False, False]
    short = loaded("length", extract="<answer>(.*)</answer>", at_most=3)
    assert [short("p", response, None) for response in ("<answer>a</answer>", "<answer></answer>", "a")] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|aa)+b", "(.*)*x.*y.*z", "(a?){40}(a){40}b"])
def test_no_expression_takes_more_than_linear_time(pattern: str) -> None:
    """Each expression takes exponential time, or one of a high power, in Python's own engine."""
    verify = loaded("regex", pattern=pattern, whole=False)
    began = time.process_time()
    assert verify("p", "a" * 100_000, None) is False
    assert time.process_time() - began < 5


def test_part_of_a_response_may_match() -> None:
    assert loaded("regex", pattern="b", whole=False)("p", "abc", None) is True
    assert loaded("regex", pattern="b")("p", "abc", None) is False
    assert loaded("regex", pattern=r"\p{Arabic}+")("p", "مرحبا", None) is True
    assert loaded("regex", pattern=r"\d")("p", "４", None) is False, "the classes of ASCII"


# -- numbers


def test_a_number_has_a_bounded_exponent() -> None:
    assert number_in("1e1000") == 10**1000 and number_in("1e1001") is None and number_in("1e-1001") is None


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12, places=6))
def test_a_number_is_exact(value: Decimal) -> None:
    numerator, denominator = value.as_integer_ratio()
    for written in (f"{value:f}", f"{value:,f}", f"{value:e}", f"{numerator}/{denominator}"):
        assert number_in(written) == Fraction(value)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"absolute": 0.1}, [True, True, False]),  # |x − 100| ≤ 0.1: 100.1 is, exactly
        ({"relative": 0.001}, [True, True, False]),
        # the larger of both tolerances, which is 1
        ({"absolute": 0.1, "relative": 0.01}, [True, True, True]),
        ({"absolute": 0.01, "relative": 0.0001}, [True, False, False]),
    ],
)
def test_the_larger_tolerance_counts_and_its_bound_is_within(
    fields: dict[str, float], expected: list[bool]
) -> None:
    verify = loaded("number", **fields)
    assert [verify("p", response, "100") for response in ("99.99", "100.1", "100.5")] == expected
    assert verify("p", "101.05", "100") is False, "tolerances do not add up"
    assert loaded("number", absolute=0.3)("p", "100.3", "100") is True, (
        "0.3 as it is written, not its binary fraction"
    )
    negative = loaded("number", relative=0.1)
    assert [negative("p", response, "-10") for response in ("-11", "-9", "-8.9", "-11.1")] == [
        True,
        True,
        False,
        False,
    ]
    assert math.isclose(0.1 + 0.2, 0.3) and loaded("number")("p", str(0.1 + 0.2), "0.3") is False


# -- measures


def test_the_share_of_repeated_sequences_by_hand() -> None:
    # a b, b a, a b, b c: four sequences, three different ones
    assert repeated_share(["a", "b", "a", "b", "c"], n=2) == 1 - 3 / 4
    assert repeated_share("aaaa", n=2) == pytest.approx(2 / 3)
    assert repeated_share("ab", n=3) == 0.0
    verify = loaded("repetition", at_most=0.25, ngram=2)
    assert verify("p", "a b a b c", None) is True, "the bound is within"
    assert loaded("repetition", at_most=0.24, ngram=2)("p", "a b a b c", None) is False
    assert loaded("repetition", at_most=0.5, ngram=2, unit="characters")("p", "哈哈哈哈哈", None) is False


def test_words_stand_between_white_space() -> None:
    verify = loaded("length", at_most=2, unit="words")
    assert [verify("p", text, None) for text in ("one  two\n", "one two three", "二 \u3000 三", "")] == [
        True,
        False,
        True,
        True,
    ]


# -- programs


def test_the_expected_outputs_are_never_where_the_program_is() -> None:
    """The program prints the right answer only if it finds it among all objects and frames of its process."""
    program = """
import gc, sys
frame, seen = sys._getframe(), []
while frame is not None:
    seen.append(repr(frame.f_locals)); frame = frame.f_back
seen += [repr(each) for each in gc.get_objects() if isinstance(each, (dict, list, tuple)) and len(each) < 100]
found = [each[each.index('canary-'):][:12] for each in seen if 'canary' + '-' in each and 'canary-' + "'" not in each]
print(found[0] if found else 'nothing')
"""
    answer = json.dumps({"inputs": [""], "outputs": ["canary-12345"]})
    assert loaded("code")("p", program, answer) is False
    assert loaded("code")("p", "print('canary-12345')", answer) is True


def test_a_program_never_runs_without_the_isolation_that_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the check of the machine found, the process that runs programs refuses to run them without isolation."""
    asked = []

    def run(*_: Any, isolated: bool) -> list[Any]:
        asked.append(isolated)
        return []

    monkeypatch.setattr(code, "run", run)
    monkeypatch.setattr(code, "why_not_isolated", lambda: "a test forbids it")
    loaded("code")("p", SUMS, SUM)
    loaded("code", isolation="optional")("p", SUMS, SUM)
    assert asked == [True, False]


def test_the_program_of_a_response() -> None:
    assert program_in("a\n```\nx = 1\n```\nb") == "\nx = 1\n"
    assert program_in("```rust\nfn\n```") == "", "no block of Python"
    assert program_in("print('```')") == "print('```')", "no fence: it does not begin its line"


# -- in the process of a stage


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[VerifierProcess]:
    """Yield the process of a schema whose expression takes exponential time."""
    monkeypatch.setattr(verifier_process, "CALL_SECONDS", 2.0)
    verifier = JsonSchemaVerifier(source="builtin:json_schema", matches={"pattern": "^(a+)+$"})
    process = builtin_process(verifier, name="mine")
    yield process
    process.close()


HANGS = ("p", '"' + "a" * 60 + 'b"', None)
RIGHT, WRONG = ("p", '"aaa"', None), ("p", '"b"', None)


@pytest.mark.slow
def test_a_response_over_which_the_library_hangs_is_wrong_and_the_others_are_judged(
    process: VerifierProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert process.verdicts([RIGHT, HANGS, RIGHT, WRONG]) == [True, False, True, False]
    told = "vantage: the response is wrong: verifiers.mine: builtin:json_schema did not end within 2 s for prompt 'p'"
    assert capsys.readouterr().err.count(told) == 1
    process.begin([HANGS, RIGHT])
    assert process.verdicts([RIGHT, WRONG, HANGS]) == [True, False, False]


@pytest.mark.parametrize(
    ("status", "is_wrong"), [(-signal.SIGSEGV, True), (-signal.SIGKILL, True), (1, False), (0, False)]
)
def test_a_crash_in_a_library_is_the_responses_and_an_exit_is_not(
    process: VerifierProcess, status: int, is_wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier_process._Running, "reply", replied(status))
    if is_wrong:
        assert process.verdicts([RIGHT, RIGHT]) == [False, True]
        return
    with pytest.raises(
        BrokenVerifier, match=rf"mine: builtin:json_schema ended its process \(exit code {status}\)"
    ):
        process.verdicts([RIGHT, RIGHT])


def replied(status: int) -> Any:
    """Return the replies: the process is ready, ends with this status over the first case, and answers the second after a new start."""
    replies = iter([b"ready\n", verifier_process._NoReply(status=status), b"ready\n", b"1\n"])
    return lambda *_: next(replies)


def test_memory_that_the_kernel_refuses_is_no_fault_of_the_response(
    process: VerifierProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier_process._Running, "reply", replied(-signal.SIGKILL))
    monkeypatch.setattr(verifier_process._Running, "is_out_of_memory", lambda _: True)
    with pytest.raises(VerifierOutOfMemory):
        process.verdicts([RIGHT])


def test_an_error_of_a_library_is_never_a_wrong_response(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(verifier: BuiltinVerifier) -> Any:
        def judge(response: str, answer: str | None) -> bool:
            raise {"deep": RecursionError, "large": MemoryError, "odd": TypeError}[response]

        return judge

    monkeypatch.setattr(regex, "load", load)
    verify = loaded("regex", pattern="a")
    assert verify("p", "deep", None) is verify("p", "large", None) is False
    with pytest.raises(
        BrokenVerifier,
        match=r"^verifiers.mine: builtin:regex raised TypeError:  for prompt 'p', response 'odd'",
    ):
        verify("p", "odd", None)
