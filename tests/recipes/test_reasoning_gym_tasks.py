"""Tasks of Reasoning Gym become rows whose answers are right; without the package, a message says what to install."""

import json
import subprocess
import sys
from pathlib import Path

from vantage.recipes.reasoning_gym_tasks import TASKS, rows
from vantage.schemas.recipe.builtin_verifiers import ReasoningGymVerifier
from vantage.tasks.rewards.builtin import reasoning

ROOT = Path(__file__).parents[2]


def without_the_package(code: str) -> str:
    """Return the last line of Python's message where the package cannot be imported."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules['reasoning_gym'] = None\n{code}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode
    return done.stderr.strip().splitlines()[-1]


def test_without_the_package_the_file_says_what_to_install() -> None:
    remedy = "pip install 'vantage-rlhf[recipes]'"
    assert remedy in without_the_package("from vantage.recipes.reasoning_gym_tasks import rows; rows(3, 1)")


def test_tasks_differ_and_are_the_same_every_time() -> None:
    made = rows(60, 7)
    assert made == rows(60, 7)
    assert made != rows(60, 8)
    assert len({row["question"] for row in made}) == len(made) == 60
    kinds = [json.loads(row["entry"])["metadata"]["source_dataset"] for row in made]
    assert {kind: kinds.count(kind) for kind in TASKS} == dict.fromkeys(TASKS, 20)


def test_the_answer_is_right_and_others_are_not() -> None:
    judge = reasoning.load(ReasoningGymVerifier(source="builtin:reasoning_gym"))
    for row in rows(60, 7):
        answer, entry = row["answer"], row["entry"]
        assert judge(f" {answer}\n", entry)
        assert not judge(f"{answer}9", entry)
        assert not judge(f"it is {answer}", entry), "nearly right is not right"
        assert not judge("", entry)
