"""What the README shows of a rule of one's own works as it is shown."""

import re
from pathlib import Path

import pytest

from schemas.loading.recipe_file import parse_recipe
from tasks.rewards.exact_match import exact_match
from tasks.rewards.verifier_file import load_function

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
SECTION = README.partition("### A rule of your own")[2].partition("\n## ")[0]
STAGES = """
recipe: rule
model: {source: "builtin:tiny"}
stages:
  policy: {kind: policy_optimization, algorithm: grpo, init: model, reward: main, prompts: tasks}
  evaluation: {kind: evaluation, candidate: policy, baseline: model, judge: {verifier: gsm8k}, prompts: tasks}
"""


def block(language: str) -> str:
    [text] = re.findall(rf"```{language}\n(.*?)```", SECTION, re.DOTALL)
    return str(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the files that the README's recipe names."""
    (tmp_path / "gsm8k.py").write_text(block("python"))
    (tmp_path / "gsm8k.jsonl").write_text("")
    return tmp_path


def test_the_rule_as_shown_tells_right_from_wrong(folder: Path) -> None:
    verify = load_function(folder / "gsm8k.py", "verify", name="gsm8k")
    assert verify("How many?", "48 + 24 = 72\n#### 72", "72") is True
    assert verify("How many?", "48 + 24 = 71\n#### 71", "72") is False


def test_the_recipe_as_shown_loads_and_extracts(folder: Path) -> None:
    recipe = parse_recipe(STAGES + block("yaml"), folder=folder)
    assert [term.verifier for term in recipe.rewards["main"].terms] == ["gsm8k", "boxed"]
    extract = recipe.verifiers["boxed"].extract
    assert exact_match(r"so it is \boxed{1,000}.", "1000.0", extract=extract)
    assert not exact_match("so it is 1,000.", "1000.0", extract=extract)
