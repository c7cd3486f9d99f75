"""A stage's function fits on a screen, so that its loop can be read from top to bottom."""

import ast
from pathlib import Path

from vantage.tasks import stages

TASKS = Path(stages.__file__).parent
LINES, IMPORTS = 70, 25
LONGER = {"best_of_n": 73, "distillation": 74}
"""Lines of the two that are longer."""


def test_stages_have_at_most_seventy_lines_but_for_the_two_that_are_listed() -> None:
    lengths = {}
    for file in TASKS.glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name == "run":
                lengths[file.stem] = (node.end_lineno or 0) - node.lineno + 1
    assert len(lengths) >= 15
    assert {name: lines for name, lines in lengths.items() if lines > LONGER.get(name, LINES)} == {}


def test_the_stages_with_a_rollout_and_a_critic_import_from_few_modules() -> None:
    for name in ("policy_optimization", "value_pretraining"):
        imports = [
            node
            for node in ast.parse((TASKS / f"{name}.py").read_text()).body
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        assert len(imports) <= IMPORTS, name
