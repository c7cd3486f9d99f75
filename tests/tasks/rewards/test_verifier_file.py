"""A user's file becomes a verifier, or one message that says where and what to mend."""

import sys
from pathlib import Path
from typing import Any

import pytest

from vantage.tasks.rewards.verifier_file import BrokenVerifier, VerifierFunction, load_user_function


def load(folder: Path, text: str | bytes, *, function: str = "verify") -> VerifierFunction:
    file = folder / "verifier.py"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_user_function(file, function, name="gsm8k").judge


def refusal(folder: Path, text: str | bytes, **options: Any) -> str:
    with pytest.raises(BrokenVerifier) as caught:
        load(folder, text, **options)("1+1?", "2", "2")
    return str(caught.value)


def returning(expression: str) -> str:
    return f"import numpy\nimport torch\ndef verify(prompt, response, answer):\n    return {expression}\n"


def test_it_is_called_with_prompt_response_and_answer(tmp_path: Path) -> None:
    """The user's function is called with prompt, response and answer."""
    verify = load(tmp_path, returning("(prompt, response, answer) == ('p', 'r', None) or answer == 'yes'"))
    assert verify("p", "r", None) is True
    assert verify("x", "r", "yes") is True
    assert verify("x", "r", "no") is False


@pytest.mark.parametrize(
    ("verdict", "meant"),
    [
        ("True", True),
        ("False", False),
        ("1", True),
        ("0", False),
        ("numpy.bool_(True)", True),
        ("numpy.array([1, 2]).sum() == 4", False),
    ],
)
def test_right_and_wrong_in_the_forms_that_people_use(tmp_path: Path, verdict: str, meant: bool) -> None:
    assert load(tmp_path, returning(verdict))("p", "r", "a") is meant


@pytest.mark.parametrize(
    ("verdict", "told"),
    [
        ("None", "returned None (a NoneType)"),
        ("'True'", "returned 'True' (a str)"),
        ("torch.tensor(True)", "returned tensor(True) (a Tensor)"),
        ("'x' * 1000", f"returned '{'x' * 199}… (a str)"),
    ],
)
def test_anything_else_is_refused_with_the_case(tmp_path: Path, verdict: str, told: str) -> None:
    message = refusal(tmp_path, returning(verdict))
    assert message.startswith("verifiers.gsm8k: verify returned ")
    assert told in message
    assert "for prompt '1+1?', response '2', answer '2'; " in message
    assert message.endswith("; return True or False, a number, or numbers by name ({'style': 0.5})")


@pytest.mark.parametrize(
    ("verdict", "meant"),
    [("1.0", 1.0), ("numpy.float32(0.5)", 0.5), ("2", 2.0), ("{'a': True, 'b': 2}", {"a": 1.0, "b": 2.0})],
)
def test_graded_and_named_scores(tmp_path: Path, verdict: str, meant: float | dict[str, float]) -> None:
    found = load(tmp_path, returning(verdict))("p", "r", "a")
    assert found == meant and type(found) is type(meant)


@pytest.mark.parametrize(
    "verdict", ["float('nan')", "float('-inf')", "{'a': 1.0, 'b': float('inf')}", "10 ** 400"]
)
def test_a_score_that_is_not_finite_is_refused_with_the_case(tmp_path: Path, verdict: str) -> None:
    message = refusal(tmp_path, returning(verdict))
    assert "for prompt '1+1?', response '2', answer '2'; " in message
    assert message.endswith(" is not finite; return a finite number, for a failed measurement too")


# -- what cannot be loaded


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def verify(prompt, response, answer)\n    return True\n", "the file is not Python (line 1: expected ':')"),
        ("x = 1\n  y = 2\n", "the file is not Python (line 2: unexpected indent)"),
        (b"x = '\xff'\n", "the file is not Python ("),
        (b"\0", "the file is not Python ("),
        ("{}", "verifiers.gsm8k.function='verify': the file has no such function (it has none); "
         "define def verify(prompt, response, answer), or name another as function"),
        ("def check(p, r, a): ...\ndef helper(): ...\n", "(it has check, helper)"),
        ("verify = 3\n", "the file has no such function (it has none)"),
        ("import nothing_of_the_kind\n", "verifiers.gsm8k.source: running the file raised ModuleNotFoundError: No module "
         "named 'nothing_of_the_kind' (line 1: import nothing_of_the_kind); a verifier is one file, which may import "
         "installed packages alone"),
        ("limit = 1\nshare = limit / 0\n", "running the file raised ZeroDivisionError: division by zero "
         "(line 2: share = limit / 0)"),
        ("import sys\nsys.exit(3)\n", "running the file raised SystemExit: 3 (line 2: sys.exit(3))"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_verifier(tmp_path: Path, text: str | bytes, told: str) -> None:
    message = refusal(tmp_path, text)
    assert message.startswith("verifiers.gsm8k.")
    assert told in message


@pytest.mark.parametrize(
    "definition",
    [
        "def verify(prompt, response, answer): return True",
        "def verify(prompt, response, answer=None): return True",
        "def verify(response, prompt, answer): return (prompt, response, answer) == ('p', 'r', None)",
        "def verify(answer, *, response, prompt): return (prompt, response, answer) == ('p', 'r', None)",
        "def verify(prompt, response, answer, strict=False): return not strict",
        "def verify(**case): return list(case.values()) == ['p', 'r', None]",
        "verify = lambda prompt, response, answer: True",
        "import functools\n@functools.cache\ndef verify(prompt, response, answer): return True",
    ],
)
def test_arguments_come_by_name_in_whatever_order_they_are_defined(tmp_path: Path, definition: str) -> None:
    assert load(tmp_path, definition)("p", "r", None) is True


@pytest.mark.parametrize(
    ("signature", "why"),
    [
        ("(prompt, response)", "got an unexpected keyword argument 'answer'"),
        ("()", "got an unexpected keyword argument 'prompt'"),
        ("(p, r, a)", "missing a required argument: 'p'"),
        ("(*case)", "got an unexpected keyword argument 'prompt'"),
        ("(prompt, response, answer, tolerance)", "missing a required argument: 'tolerance'"),
        ("(question, response, answer)", "missing a required argument: 'question'"),
    ],
)
def test_what_cannot_is_refused_before_it_is(tmp_path: Path, signature: str, why: str) -> None:
    with pytest.raises(BrokenVerifier) as caught:
        load(tmp_path, f"def verify{signature}: ...\n")
    assert str(caught.value) == (
        f"verifiers.gsm8k.function='verify' cannot be called with prompt, response and answer by these names: {why}; "
        "define def verify(prompt, response, answer)"
    )


# -- what raises


def test_an_error_is_told_with_the_users_line_and_the_case(tmp_path: Path) -> None:
    text = "def first(text):\n    return text.split()[0]\n\ndef verify(prompt, response, answer):\n    return first(answer) == response\n"
    verify = load(tmp_path, text)
    with pytest.raises(BrokenVerifier) as caught:
        verify("1+1?", "so " * 200, "")
    assert str(caught.value) == (
        "verifiers.gsm8k: verify raised IndexError: list index out of range (line 2: return text.split()[0]) for prompt "
        f"'1+1?', response '{('so ' * 200)[:199]}…, answer ''"
    )
    with pytest.raises(BrokenVerifier) as caught:
        verify("1+1?", "2", None)
    assert str(caught.value) == (
        "verifiers.gsm8k: verify raised AttributeError: 'NoneType' object has no attribute 'split' (line 2: return "
        "text.split()[0]) for prompt '1+1?', response '2', answer None (data.*.columns.answer maps answers)"
    )


def test_an_error_deep_in_a_library_is_told_with_the_users_line(tmp_path: Path) -> None:
    text = "import json\ndef verify(prompt, response, answer):\n    return json.loads(response) == answer\n"
    with pytest.raises(
        BrokenVerifier, match=r"JSONDecodeError: .* \(line 3: return json.loads\(response\) == answer\)"
    ):
        load(tmp_path, text)("p", "{", "a")


def test_a_long_error_is_one_short_line(tmp_path: Path) -> None:
    text = "def verify(prompt, response, answer):\n    raise ValueError('many\\nlines ' * 1000)\n"
    message = refusal(tmp_path, text)
    assert "\n" not in message
    assert len(message) < 600


def test_leaving_the_process_is_an_error_too(tmp_path: Path) -> None:
    text = "import sys\ndef verify(prompt, response, answer):\n    sys.exit()\n"
    assert "verify raised SystemExit" in refusal(tmp_path, text)


# -- where the fault is


def test_a_file_has_a_name_of_its_own_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """A dataclass looks its module up by name, where annotations are texts."""
    text = (
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Case:\n"
        "    prompt: str\n"
        "def verify(prompt, response, answer):\n"
        "    return Case(prompt).prompt == response and __name__ == '_verifier_gsm8k'\n"
    )
    path = list(sys.path)
    assert load(tmp_path, text)("p", "p", None) is True
    assert sys.path == path
    assert [file.name for file in tmp_path.iterdir()] == ["verifier.py"], "no bytecode in the store"


def test_what_is_called_like_one_of_our_packages_does_no_harm(tmp_path: Path) -> None:
    import vantage.schemas.recipe
    import vantage.tasks.rewards.verifiers

    (tmp_path / "schemas.py").write_text("raise AssertionError('imported in the place of ours')\n")
    file = tmp_path / "tasks.py"
    file.write_text(
        "from vantage import schemas\ndef verify(prompt, response, answer):\n    return hasattr(schemas, 'recipe')\n"
    )
    assert load_user_function(file, "verify", name="tasks").judge("p", "r", None) is True
    assert sys.modules["vantage.tasks.rewards.verifiers"] is vantage.tasks.rewards.verifiers
    assert sys.modules["vantage.schemas.recipe"] is vantage.schemas.recipe
