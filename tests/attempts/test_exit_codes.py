import os
import signal

import pytest

from vantage.attempts.exit_codes import (
    ExitCode,
    code_of_signal,
    may_be_retried,
    may_be_retried_once,
)


def test_no_two_meanings_share_a_number_and_all_fit_in_a_byte() -> None:
    assert len(set(ExitCode.__members__.values())) == len(ExitCode.__members__)
    assert all(0 <= code <= 255 for code in ExitCode)


@pytest.mark.parametrize(
    ("name", "number"), [("EX_DATAERR", 65), ("EX_UNAVAILABLE", 69), ("EX_SOFTWARE", 70)]
)
def test_the_numbers_are_those_of_sysexits(name: str, number: int) -> None:
    assert getattr(os, name) == number
    assert number in list(ExitCode)


def test_what_the_design_names_has_its_number() -> None:
    assert (ExitCode.OK, ExitCode.STORAGE, ExitCode.RESUME, ExitCode.GATE_CLOSED) == (
        os.EX_OK,
        os.EX_IOERR,
        os.EX_TEMPFAIL,
        os.EX_CONFIG,
    )
    assert code_of_signal(signal.SIGKILL) == ExitCode.OUT_OF_MEMORY
    assert code_of_signal(signal.SIGINT) == ExitCode.INTERRUPTED


def test_only_what_was_interrupted_is_tried_again() -> None:
    assert [code for code in ExitCode if may_be_retried(code)] == [ExitCode.RESUME]


def test_what_can_be_tried_once_in_another_way() -> None:
    assert [code for code in ExitCode if may_be_retried_once(code)] == [ExitCode.HUNG, ExitCode.OUT_OF_MEMORY]
