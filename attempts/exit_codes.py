"""The exit codes of stage processes and of the command line."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes, with the numbers of ``sysexits.h`` if it has a code of the same meaning."""

    OK = 0
    AUDIT_FAILED = 1
    """An audit found an error, or ``vantage diff`` found a difference."""
    USAGE = 2
    """The command line was not understood (the shells' and Typer's own code)."""
    BAD_INPUT = 65
    """A recipe, data or a model was refused; the same input will be refused again."""
    UNAVAILABLE = 69
    """A named server does not answer."""
    INTERNAL = 70
    """An error of ours, or an unexpected one; the log has the traceback."""
    STORAGE = 74
    """A disk is full, read-only or broken (committed artifacts are intact); or a stored artifact is damaged."""
    RESUME = 75
    """Stopped before the end with its state saved: run the same command again."""
    WAITING_APPROVAL = 77
    """A person has to approve a gate or an alias: ``vantage approve`` (``sysexits.h``: no permission)."""
    GATE_CLOSED = 78
    """A gate did not pass, or a guard stopped a stage; the verdict or the firing is recorded."""
    HUNG = 124
    """No progress for too long, twice; the log has the stacks of all threads (124 is also the code of ``timeout``)."""
    INTERRUPTED = 130
    """Ctrl-C, before anything could be saved."""
    OUT_OF_MEMORY = 137
    """Memory of the machine or of an accelerator ran out (also the exit code of SIGKILL)."""


MEANINGS: dict[ExitCode, str] = {
    ExitCode.OK: "done",
    ExitCode.AUDIT_FAILED: "an audit failed",
    ExitCode.USAGE: "the command line was not understood",
    ExitCode.BAD_INPUT: "bad recipe or data",
    ExitCode.UNAVAILABLE: "a server does not answer",
    ExitCode.INTERNAL: "a fault in Vantage (the log says where)",
    ExitCode.STORAGE: "a disk is full or fails",
    ExitCode.RESUME: "run the same command again",
    ExitCode.WAITING_APPROVAL: "waits for a person (vantage approve)",
    ExitCode.GATE_CLOSED: "a gate is closed, or a guard stopped a stage",
    ExitCode.HUNG: "a stage hung twice",
    ExitCode.INTERRUPTED: "interrupted before anything could be saved",
    ExitCode.OUT_OF_MEMORY: "out of memory",
}
"""Exit code → its meaning in ``--help`` and in docs/commands.md."""


def may_be_retried(code: int) -> bool:
    """Return whether another attempt can succeed without changes: only after an interruption."""
    return code == ExitCode.RESUME


def may_be_retried_once(code: int) -> bool:
    """Return whether one more attempt may help, with less memory or in a new process."""
    return code in (ExitCode.OUT_OF_MEMORY, ExitCode.HUNG)


def code_of_signal(number: int) -> int:
    """Return the exit code that shells report for a process that signal ``number`` ended."""
    return 128 + number
