"""Tasks of Reasoning Gym, and their verifier: with the package, its own scoring; without it, plain words."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def without_the_package(code: str) -> str:
    """What Python says last, where the package cannot be imported."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules['reasoning_gym'] = None\n{code}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode
    return done.stderr.strip().splitlines()[-1]


def test_without_the_package_both_files_say_what_to_install() -> None:
    remedy = "pip install 'vantage-rlhf[recipes]'"
    assert remedy in without_the_package("import vantage.recipes.reasoning_gym_verifier")
    assert remedy in without_the_package("from vantage.recipes.reasoning_gym_tasks import rows; rows(3, 1)")


def test_tasks_differ_and_are_the_same_every_time() -> None:
    from vantage.recipes.reasoning_gym_tasks import TASKS, rows

    made = rows(60, 7)
    assert made == rows(60, 7)
    assert made != rows(60, 8)
    assert len({row["question"] for row in made}) == len(made) == 60
    kinds = [json.loads(row["entry"])["metadata"]["source_dataset"] for row in made]
    assert {kind: kinds.count(kind) for kind in TASKS} == dict.fromkeys(TASKS, 20)


def test_the_answer_is_right_and_others_are_not() -> None:
    from vantage.recipes.reasoning_gym_tasks import rows
    from vantage.recipes.reasoning_gym_verifier import verify

    for row in rows(60, 7):
        question, answer, entry = row["question"], row["answer"], row["entry"]
        assert verify(question, f" {answer}\n", entry)
        assert not verify(question, f"{answer}9", entry)
        assert not verify(question, f"it is {answer}", entry), "nearly right is not right"
        assert not verify(question, "", entry)


@pytest.mark.parametrize("answer", [None, "5", "[]", "{}", '{"metadata": {}}'])
def test_what_is_no_entry_is_refused(answer: str | None) -> None:
    from vantage.recipes.reasoning_gym_verifier import verify

    with pytest.raises(ValueError, match="columns: {prompt: question, answer: entry}"):
        verify("1 + 1", "2", answer)


def test_a_response_at_which_the_scoring_raises_is_wrong() -> None:
    from reasoning_gym.factory import create_dataset, get_score_answer_fn

    from vantage.recipes.reasoning_gym_verifier import verify

    entry = create_dataset("prime_factorization", seed=1, size=1)[0]
    with pytest.raises(ValueError, match="invalid literal"):
        get_score_answer_fn("prime_factorization")(answer="no number", entry=entry)
    assert not verify("", "no number", json.dumps(entry))
    assert verify("", entry["answer"], json.dumps(entry))
