"""Print how far the tests are in lines, and each failure at once: a run that is ended from outside prints no summary."""

import time
from typing import Any

import psutil
import pytest

MANY = 500
"""Fewest tests whose progress is printed in lines, in place of a dot for each."""
LINES = 20


class Progress:
    """Printer of progress and failures in the process that prints."""

    def __init__(self, config: pytest.Config) -> None:
        """Remember the time, and what the processor has done so far."""
        self._config = config
        self._begun = time.monotonic()
        self._processor = psutil.cpu_times()
        self._ended = 0
        self._lines = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Print no dot for a test that has passed, where there are many."""
        has_passed = report.when == "call" and report.passed and not hasattr(report, "wasxfail")
        return ("passed", "", "") if has_passed and self._num_tests() >= MANY else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print a failure, and a line whenever a further share of the tests has ended."""
        if report.failed:
            self._write(f"\nfailed in its {report.when}: {report.nodeid}", red=True)
            self._write(report.longreprtext)
        self._ended += report.when == "teardown"
        num_tests = self._num_tests()
        if num_tests >= MANY and self._ended * LINES >= (self._lines + 1) * num_tests:
            self._lines = self._ended * LINES // num_tests
            self._write(progress_line(self._ended, num_tests, self._seconds(), self._shares()))

    def _num_tests(self) -> int:
        terminal: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        session: Any = getattr(terminal, "_session", None)
        return getattr(session, "testscollected", 0)

    def _seconds(self) -> float:
        return time.monotonic() - self._begun

    def _shares(self) -> dict[str, float]:
        """Return the shares of the processor's time that nothing used, and that other machines on the same host used."""
        now = psutil.cpu_times()
        spent = {name: getattr(now, name) - getattr(self._processor, name, 0.0) for name in now._fields}
        whole = sum(spent.values()) or 1.0
        return {name: spent[name] / whole for name in ("idle", "steal") if name in spent}

    def _write(self, line: str, **colours: bool) -> None:
        terminal: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None:
            terminal.write_line(line, **colours)


def progress_line(ended: int, num_tests: int, seconds: float, shares: dict[str, float]) -> str:
    """Return a line such as ``25 % of 13,000 tests after 600 s (processor: idle 3 %, steal 20 %)``."""
    processor = ", ".join(f"{name} {share:.0%}".replace("%", " %") for name, share in shares.items())
    return (
        f"{100 * ended // num_tests} % of {num_tests:,} tests after {seconds:,.0f} s (processor: {processor})"
    )
