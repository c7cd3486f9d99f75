"""What every command says on the terminal: errors in a sentence, warnings, JSON."""

import json
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from flows.exit_codes import ExitCode
from flows.launchers.disk_faults import is_disk_fault
from schemas.safe_text import safe_text

if TYPE_CHECKING:
    from flows.runs.run import Workspace


@contextmanager
def explained(verbose: bool) -> Iterator[None]:
    """Errors as one sentence for a person and an exit code for a program; the traceback only with ``-v``."""
    try:
        yield
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except Exception as error:
        if verbose:
            traceback.print_exc()
        code = _code_of(error)
        if code == ExitCode.UNAVAILABLE:
            # Prefect's loggers complain too, and leave their last line without its end.
            print(file=sys.stderr)
        print(f"vantage: {_told(error, code)}", file=sys.stderr)
        if code == ExitCode.UNAVAILABLE:
            # Prefect's own threads would go on for minutes to reach a server that has gone.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        raise typer.Exit(code) from None


def warn(messages: Iterable[str], *, skip: str | None = None) -> None:
    """What is no reason to stop, on standard error; not of run ``but``, whose own error says so."""
    for message in messages:
        if skip is None or f"/{skip}/" not in message:
            print(f"vantage: warning: {message}", file=sys.stderr)


def _told(error: Exception, code: int) -> str:
    """What a person reads of an error."""
    if code != ExitCode.INTERNAL:
        return str(error)
    return f"{type(error).__name__}: {error} (this should not happen; -v shows the traceback)"


def _code_of(error: Exception) -> ExitCode:
    """The exit code of an error that no stage reported."""
    if is_disk_fault(error):
        return ExitCode.STORAGE
    if isinstance(
        error, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError | ValueError
    ):
        return ExitCode.BAD_INPUT
    if isinstance(error, ConnectionError | TimeoutError) or type(error).__name__ == "ServerUnavailable":
        return ExitCode.UNAVAILABLE
    return ExitCode.STORAGE if isinstance(error, OSError) else ExitCode.INTERNAL


def warn_of_damage(run_id: str, what: str, problems: Iterable[str]) -> None:
    """A line for each fault, and what can be done."""
    for problem in problems:
        print(f"vantage: run {run_id}: {what} is damaged: {problem}", file=sys.stderr)
    print(f"vantage: {what}: run the same recipe again, which makes it anew", file=sys.stderr)


def workspace_at(folder: Path) -> "Workspace":
    """The workspace in a folder."""
    from flows.runs.run import Workspace

    return Workspace(folder.absolute())


def print_json(value: Any, *, indent: int | None = None) -> None:
    """One JSON value on standard output, without what would steer a terminal."""
    try:
        print(safe_text(json.dumps(value, ensure_ascii=False, indent=indent)), flush=True)
    except BrokenPipeError:  # `| head` has seen enough, which is no reason to fail
        from flows.commands.console import forget_reader

        forget_reader(sys.stdout)
