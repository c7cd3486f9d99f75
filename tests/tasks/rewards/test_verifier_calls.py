"""Functions that wait, and functions that take a whole batch, give the verdicts of one call after the other."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vantage.schemas.records.verdict_form import VerdictForm
from vantage.tasks.rewards import verifier_process
from vantage.tasks.rewards.verifier_calls import calls_of
from vantage.tasks.rewards.verifier_file import BrokenVerifier, load_user_function
from vantage.tasks.rewards.verifier_process import VerifierProcess

SCORE = VerdictForm(kind="score")
ASYNC = """\
import asyncio
ended = []
async def verify(prompt, response, answer):
    await asyncio.sleep(float(answer))
    ended.append(response)
    return {"number": float(response), "place": len(ended)}
"""
BATCH = """\
async def verify_batch(prompts, responses, answers):
    assert isinstance(prompts, list) and len(prompts) == len(answers)
    return [len(prompt) + len(response) / 100 + len(answer or "") / 10_000 for prompt, response, answer
            in zip(prompts, responses, answers)]
"""


@pytest.fixture
def process(tmp_path: Path) -> Iterator[VerifierProcess]:
    configuration = {"file": str(tmp_path / "verifier.py"), "function": "verify"}
    process = VerifierProcess(configuration, name="mine", function="verify", form=None)
    yield process
    process.close()


def write(folder: Path, text: str) -> None:
    (folder / "verifier.py").write_text(text)


def test_calls_that_wait_are_made_together_and_their_verdicts_put_back_in_order(
    tmp_path: Path, process: VerifierProcess
) -> None:
    write(tmp_path, ASYNC)
    # the later a case, the earlier its call ends: 0.6 s, 0.55 s, …
    cases = [("p", str(number), str(0.6 - number / 20)) for number in range(10)]
    process.begin(cases[:1])
    process.verdicts(cases[:1])
    start = time.monotonic()
    verdicts = process.verdicts(cases)
    assert [verdict["number"] for verdict in verdicts] == [float(number) for number in range(10)]  # type: ignore[index]
    places = [verdict["place"] for verdict in verdicts]  # type: ignore[index]
    assert places[0] > places[-1], "the calls did not run at the same time"
    assert time.monotonic() - start < sum(0.6 - number / 20 for number in range(10))


def test_no_more_calls_wait_at_once_than_allowed(tmp_path: Path) -> None:
    write(
        tmp_path,
        "import asyncio\nnow = most = 0\nasync def verify(prompt, response, answer):\n    global now, most\n    now += 1\n"
        "    most = max(most, now)\n    await asyncio.sleep(0.001)\n    now -= 1\n    return float(most)\n",
    )
    judge = calls_of(load_user_function(tmp_path / "verifier.py", "verify", name="mine"))
    assert list(judge([("p", "r", None)] * 200))[-1] == 64.0


def test_a_fault_of_one_call_among_many_names_its_row(tmp_path: Path, process: VerifierProcess) -> None:
    write(
        tmp_path,
        "import asyncio\nasync def verify(prompt, response, answer):\n    await asyncio.sleep(0)\n    return 1 / float(response)\n",
    )
    with pytest.raises(BrokenVerifier) as broken:
        process.verdicts([("p", "4", None), ("p", "0", None), ("p", "2", None)])
    assert (
        "verify raised ZeroDivisionError: float division by zero (line 4: return 1 / float(response))"
        in str(broken.value)
    )
    assert "for prompt 'p', response '0', answer None" in str(broken.value)
    assert process.verdicts([("p", "4", None), ("p", "2", None)]) == [0.25, 0.5]


def test_a_call_that_waits_for_ever_ends(
    tmp_path: Path, process: VerifierProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier_process, "CALL_SECONDS", 1.0)
    write(
        tmp_path,
        "import asyncio\nasync def verify(prompt, response, answer):\n    await asyncio.Event().wait()\n",
    )
    with pytest.raises(BrokenVerifier, match="verify did not end within 1 s"):
        process.verdicts([("p", "r", None)])


@settings(max_examples=30)
@given(
    cases=st.lists(
        st.tuples(st.text(max_size=3), st.text(max_size=3), st.none() | st.text(max_size=3)), min_size=1
    ),
    cuts=st.lists(st.integers(1, 5), min_size=1),
)
def test_verdicts_of_a_batch_do_not_depend_on_how_rows_are_batched(
    tmp_path_factory: pytest.TempPathFactory, cases: list[tuple[str, str, str | None]], cuts: list[int]
) -> None:
    file = tmp_path_factory.getbasetemp() / "batched.py"
    file.write_text(BATCH)
    judge = calls_of(load_user_function(file, "verify", name="mine"))
    whole, parts, start = list(judge(cases)), [], 0
    while start < len(cases):
        size = cuts[start % len(cuts)]
        parts += list(judge(cases[start : start + size]))
        start += size
    assert whole == parts
    assert whole == [len(p) + len(r) / 100 + len(a or "") / 10_000 for p, r, a in cases]


def test_a_function_for_batches_is_asked_once_about_all_cases(
    tmp_path: Path, process: VerifierProcess
) -> None:
    write(
        tmp_path,
        "calls = []\ndef verify_batch(prompts, responses, answers):\n    calls.append(len(responses))\n"
        "    return [len(calls) + len(response) / 10 for response in responses]\n",
    )
    cases = [("p", "x" * (number % 3), None) for number in range(200)]
    process.begin(cases[:50])  # sampled before the others
    assert process.takes_batch
    process.begin(cases[50:])
    assert process.verdicts(cases) == [1 + (number % 3) / 10 for number in range(200)], "one call, about all"
    assert process.verdicts(cases[:1]) == [2.0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "return [1.0]",
            "verify_batch returned 1 verdicts for 2 responses, the first with prompt 'p', response 'a'",
        ),
        ("return {'score': [1.0, 2.0]}", "returned a dict for 2 responses"),
        ("return (score for score in (1.0, 2.0))", "returned a generator for 2 responses"),
        (
            "return [1.0, float('nan')]",
            "returned nan (a float) for response 2 of 2: prompt 'p', response 'b'",
        ),
        ("return [1.0, None]", "returned None (a NoneType) for response 2 of 2: prompt 'p', response 'b'"),
        (
            "raise KeyError('k')",
            "verify_batch raised KeyError: 'k' (line 2: raise KeyError('k')) for 2 responses",
        ),
    ],
)
def test_what_a_function_for_batches_may_not_do(
    tmp_path: Path, process: VerifierProcess, body: str, message: str
) -> None:
    write(tmp_path, f"def verify_batch(prompts, responses, answers):\n    {body}\n")
    with pytest.raises(BrokenVerifier) as broken:
        process.verdicts([("p", "a", None), ("p", "b", None)])
    assert message in str(broken.value)


def test_arrays_are_verdicts_of_a_batch(tmp_path: Path, process: VerifierProcess) -> None:
    write(
        tmp_path,
        "import numpy\ndef verify_batch(prompts, responses, answers):\n    return numpy.array([len(r) for r in responses]) / 4\n",
    )
    assert process.verdicts([("p", "a", None), ("p", "bb", None)]) == [0.25, 0.5]


def test_both_functions_in_one_file_mean_the_one_that_is_named(tmp_path: Path) -> None:
    write(
        tmp_path,
        "def verify(prompt, response, answer):\n    return True\ndef verify_batch(prompts, responses, answers):\n    return [0.5]\n",
    )
    file = tmp_path / "verifier.py"
    assert not load_user_function(file, "verify", name="mine").takes_batch
    assert load_user_function(file, "verify_batch", name="mine").takes_batch
