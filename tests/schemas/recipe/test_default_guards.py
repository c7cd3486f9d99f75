"""The page of the guards lists the defaults as they are."""

from pathlib import Path

from vantage.schemas.recipe.default_guards import DEFAULTS

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
