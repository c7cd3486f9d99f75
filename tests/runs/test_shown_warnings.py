"""Warnings of our loggers reach the process that shows a run, once, whatever Prefect does with the root logger."""

import io
import logging
from collections.abc import Iterator

import pytest

from vantage.runs.shown_warnings import warnings_shown

OF_FLOWS = logging.getLogger("vantage.flows.anything")
OF_STORAGE = logging.getLogger("vantage.storage.anything")


@pytest.fixture
def root_output() -> Iterator[io.StringIO]:
    """Yield what the root logger's handler prints, as Prefect's with ``--verbose``."""
    printed = io.StringIO()
    handler = logging.StreamHandler(printed)
    logging.getLogger().addHandler(handler)
    yield printed
    logging.getLogger().removeHandler(handler)


def test_a_warning_is_said_once_and_by_nobody_else(root_output: io.StringIO) -> None:
    said: list[str] = []
    with warnings_shown(said.append):
        OF_STORAGE.warning("the lease of %s could not be renewed", "a")
        OF_STORAGE.warning("the lease of %s could not be renewed", "a")
        OF_FLOWS.warning("the server does not answer")
        OF_FLOWS.info("nothing to warn of")
    assert said == ["the lease of a could not be renewed", "the server does not answer"]
    assert root_output.getvalue() == ""


def test_the_last_that_began_shows_and_afterwards_the_one_before(root_output: io.StringIO) -> None:
    command, run = [], []  # type: list[str], list[str]
    with warnings_shown(command.append):
        with warnings_shown(run.append):
            OF_FLOWS.warning("during the run")
        OF_FLOWS.warning("after the run")
    OF_FLOWS.warning("after the command")
    assert (command, run) == (["after the run"], ["during the run"])
    assert root_output.getvalue() == "after the command\n"


def test_runs_that_overlap_and_end_in_another_order_each_leave_the_other(root_output: io.StringIO) -> None:
    first, second = [], []  # type: list[str], list[str]
    one, two = warnings_shown(first.append), warnings_shown(second.append)
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    OF_FLOWS.warning("of the second")
    two.__exit__(None, None, None)
    OF_FLOWS.warning("of none")
    assert (first, second) == ([], ["of the second"])
    assert root_output.getvalue() == "of none\n"


def test_a_warning_that_cannot_be_shown_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(_: str) -> None:
        raise OSError("the terminal has gone")

    with warnings_shown(broken):
        OF_FLOWS.warning("anything")
    assert "the terminal has gone" in capsys.readouterr().err
