"""The page of the guards lists the defaults as they are."""

from pathlib import Path

import pytest

from vantage.schemas.recipe.default_guards import DEFAULTS, default_guards
from vantage.schemas.recipe.stages_on_data import DirectPreferenceOptimization

PAGE = Path(__file__).parents[3] / "docs" / "guards.md"
BEGIN, END = "<!-- defaults -->\n", "<!-- end of defaults -->"


def table() -> str:
    lines = ["| guard | stages | source of the bound |", "|---|---|---|"]
    for default in DEFAULTS:
        kinds = ", ".join(f"`{kind}`" for kind in default.kinds)
        needs = f" with {default.needs}" if default.needs else ""
        lines.append(f"| {default.guard.condition} | {kinds}{needs} | {default.source} |")
    return "\n".join(lines) + "\n"


def test_the_page_lists_the_defaults() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0] == table(), (
        f"put this between the marks of {PAGE.name}:\n{table()}"
    )


def test_no_default_is_there_twice_for_a_kind() -> None:
    pairs = [(kind, default.guard) for default in DEFAULTS for kind in default.kinds]
    assert len(set(pairs)) == len(pairs)


@pytest.mark.parametrize(("loss", "is_watched"), [("dpo", True), ("orpo", True), ("ipo", False)])
def test_a_squared_loss_has_no_bound_in_nats(loss: str, is_watched: bool) -> None:
    """IPO's loss begins at 1/(4β²), 25 for a β of 0.1, and moves by more than 0.7 while it falls."""
    work = DirectPreferenceOptimization.model_validate(
        {"kind": "dpo", "init": "sft", "data": "pairs", "loss": loss}
    )
    assert ("loss" in {guard.metric for guard in default_guards(work)}) == is_watched
