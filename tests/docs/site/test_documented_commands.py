"""Every command of Vantage in the pages exists, with the options that the pages show."""

from pathlib import Path

import pytest

from tests.docs.site.documented_commands import ROOT, commands, pages, refusal


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_documented_command_is_one_that_the_parser_takes(page: Path) -> None:
    found = [
        (command, refusal(command, is_whole=whole))
        for command, whole in commands(page.read_text(encoding="utf-8"))
    ]
    assert [(command, reason) for command, reason in found if reason] == []


def test_commands_are_found() -> None:
    """Many commands are found in the pages, so the search for them works."""
    assert sum(len(list(commands(page.read_text(encoding="utf-8")))) for page in pages()) > 200


@pytest.mark.parametrize(
    "command, reason",
    [
        ("rum quickstart", "there is no command rum"),
        ("run quickstart --unitl sft", "--unitl"),
        ("run quickstart twice", "unexpected extra argument"),
        ("keys old FILE", "there is no command keys old"),
        ("plan", None),
    ],
)
def test_a_wrong_command_is_found(command: str, reason: str | None) -> None:
    found = refusal(command, is_whole=False)
    assert found is None if reason is None else reason in str(found)


def test_a_whole_command_needs_its_arguments() -> None:
    assert refusal("audit --json", is_whole=True) is not None
    assert refusal("audit --json", is_whole=False) is None


def test_lines_that_go_on_comments_and_mentions_are_read() -> None:
    text = "```\n$ .venv/bin/vantage run a.yaml \\\n    --set b=1   # why\nvantage 0.1\n```\nSee `vantage plan a.yaml`.\n"
    assert list(commands(text)) == [("run a.yaml      --set b=1", True), ("plan a.yaml", False)]
