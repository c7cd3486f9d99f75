"""The recipe of cheerful stories has the prompts that its script writes, and rewards of a few steps."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vantage.recipes.story_openings import openings

ROOT = Path(__file__).parents[2]


def test_the_file_of_prompts_is_what_the_script_writes() -> None:
    lines = (ROOT / "recipes" / "story_openings.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == openings()
    assert len(set(lines)) == len(lines) == 384


@pytest.mark.parametrize("score, steps", [(0.8, 3), (0.79, 2), (0.5, 2), (0.49, 1), (0.05, 1), (0.04, 0)])
def test_a_bound_belongs_to_its_step(score: float, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from vantage.recipes import sentiment_verifier as verifiers

    monkeypatch.setattr(verifiers, "compound", lambda text: score)
    each = (verifiers.positive, verifiers.clearly_positive, verifiers.very_positive)
    assert [verify("a prompt", "a response", None) for verify in each] == [
        place < steps for place in range(3)
    ]


def test_without_the_package_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['vaderSentiment'] = None; import vantage.recipes.sentiment_verifier"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "pip install 'vantage-rlhf[recipes]'" in done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "response, steps",
    [
        ("", 0),
        ("It was a table.", 0),
        ("He was sad and he cried.", 0),
        ("It was a good day.", 1),
        ("She was happy.", 2),
        ("They laughed, they loved it, and they were happy friends. What a great, wonderful day!", 3),
    ],
)
def test_steps_of_the_reward(response: str, steps: int) -> None:
    from vantage.recipes.sentiment_verifier import clearly_positive, positive, very_positive

    cheerful = "I love you, happy friend!"  # the prompt is not judged
    verdicts = [judge(cheerful, response, None) for judge in (positive, clearly_positive, very_positive)]
    assert verdicts == [number < steps for number in range(3)]
