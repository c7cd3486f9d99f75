"""Output of all commands: errors as one sentence, warnings, JSON."""

import errno
import json
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from vantage.attempts.exit_codes import ExitCode
from vantage.attempts.launchers.disk_faults import is_bucket_fault, is_disk_fault
from vantage.schemas.safe_text import safe_text, without_secrets

if TYPE_CHECKING:
    from vantage.runs.workspace import Workspace

_SHOWN = 80
"""Most characters of a path in a message."""
_ROOM = "make room, and run the same command again"
_RIGHTS = "change who may use it, or name another"
_REMEDIES = {
    errno.ENOENT: "correct the path, or make its folder first",
    errno.ENOTDIR: "name a path without a file in place of a folder",
    errno.EISDIR: "name a file",
    errno.EEXIST: "name another",
    errno.ENOTEMPTY: "name another folder, or empty it",
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EROFS: _RIGHTS,
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: "raise the limit on the size of files (`ulimit -f`)",
    errno.EMFILE: "raise the limit on open files (`ulimit -n`)",
}
"""Error of the system → remedy."""


@contextmanager
def explained(verbose: bool) -> Iterator[None]:
    """Print errors as one sentence and exit with their code; the traceback only with ``-v``."""
    try:
        yield
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except Exception as error:  # the end of the command: every error becomes a sentence and a code
        if verbose:
            traceback.print_exc()
        code = _code_of(error)
        if code == ExitCode.UNAVAILABLE:
            # Prefect's loggers also print errors, and do not end their last line.
            print(file=sys.stderr)
        print(f"vantage: {_message(error, code)}", file=sys.stderr)
        if code == ExitCode.UNAVAILABLE:
            # Prefect's own threads would try for minutes to reach a dead server.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        raise typer.Exit(code) from None


def warn(messages: Iterable[str], *, skip: str | None = None) -> None:
    """Print warnings on standard error, except those about run ``skip``, whose own error reports them."""
    for message in messages:
        if skip is None or f"/{skip}/" not in message:
            print(f"vantage: warning: {message}", file=sys.stderr)


def _message(error: Exception, code: int) -> str:
    """Return the message of an error for the user."""
    if is_bucket_fault(error) and code == ExitCode.STORAGE:
        said = without_secrets((str(error).splitlines() or [""])[0])
        return (
            f"the bucket cannot be used: {said}; look at the bucket's address, its login and the network, and run "
            "the same command again"
        )
    if (fault := server_fault(error)) is not None:
        return fault
    settings = _refused_settings(error)
    if settings:
        return settings
    if _is_no_path(error):
        what = getattr(error, "strerror", None) or "its links lead to one another"
        if isinstance(error, OSError):
            named = _file_of(error) or "a name"
        else:
            named = str(error).rpartition("from ")[2].strip("'")
        return f"{_shown_path(named)} cannot be a file's path ({what}); name another"
    if isinstance(error, OSError) and str(error).startswith("[Errno"):  # the message is still Python's own
        return _file_message(error)
    if code != ExitCode.INTERNAL:
        return str(error)
    return f"{type(error).__name__}: {error} (this should not happen; -v shows the traceback)"


def _file_message(error: OSError) -> str:
    """Return the system's message about a file, with the file and the remedy."""
    file = _file_of(error)
    named = "" if file is None else f"{_shown_path(file)}: "
    remedy = _REMEDIES.get(error.errno or 0, "name another file, or look at the disk")
    return f"{named}{error.strerror}; {remedy}"


def _file_of(error: OSError) -> str | None:
    """Return the file that the error names; None: it names none, or only a descriptor."""
    named = error.filename
    return None if named is None or isinstance(named, int) else os.fsdecode(named)


def _refused_settings(error: Exception) -> str | None:
    """Return the message for settings that Prefect refuses, with their variables; None: it is another error."""
    kind, title = type(error).__name__, str(getattr(error, "title", ""))
    if kind == "SettingsError":  # a value is not JSON but must be
        field = re.search(r'field "(\w+)"', str(error))
        faults = [(field[1], None, "it is no valid value")] if field else []
    elif kind == "ValidationError" and title.endswith("Settings"):
        refused = error.errors()  # type: ignore[attr-defined]
        faults = [
            (str(each["loc"][-1]), each.get("input"), str(each["msg"])) for each in refused if each.get("loc")
        ]
    else:
        return None
    found = [
        f"{name}={safe_text(value)!r}: {safe_text(reason)}"
        for field_name, refused_value, reason in faults
        for name, value in _variables_of(field_name, refused_value).items()
    ]
    return f"Prefect refuses {'; '.join(found)}; correct or unset it" if found else None


def _variables_of(field: str, refused: object) -> dict[str, str]:
    """Return the variables of Prefect that end in the name of a field: those with the refused value, or all if none has it."""
    named = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("PREFECT_") and name.lower().endswith(f"_{field.lower()}")
    }
    same = {
        name: value for name, value in named.items() if value.strip().casefold() == str(refused).casefold()
    }
    return same or named


def _code_of(error: Exception) -> ExitCode:
    """Return the exit code of an error that no stage reported."""
    if is_disk_fault(error):
        return ExitCode.STORAGE
    if _is_no_path(error):
        return ExitCode.BAD_INPUT
    if isinstance(
        error, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError | ValueError
    ):
        return ExitCode.BAD_INPUT
    if is_bucket_fault(error):
        return ExitCode.STORAGE
    if isinstance(error, ConnectionError | TimeoutError) or type(error).__name__ == "ServerUnavailable":
        return ExitCode.UNAVAILABLE
    if server_fault(error) is not None:
        return ExitCode.UNAVAILABLE
    return ExitCode.STORAGE if isinstance(error, OSError) else ExitCode.INTERNAL


def _is_no_path(error: Exception) -> bool:
    """Return whether the path can name no file: it is too long, or its links form a ring."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENAMETOOLONG, errno.ELOOP)
    return type(error) is RuntimeError and str(error).startswith("Symlink loop")  # raised by pathlib


def _shown_path(path: str) -> str:
    """Return a path in one line, cut in its middle if it is long."""
    text = safe_text(path)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]}…{text[-_SHOWN // 2 :]}"


def server_fault(error: Exception) -> str | None:
    """Return the message that the Prefect server does not answer, fails or refuses the login, with the remedy; None:
    another error.
    """
    url = os.environ.get("PREFECT_API_URL")
    where = "the Prefect server" if url is None else f"PREFECT_API_URL={without_secrets(url)}"
    if _is_of_httpx(error, "TransportError"):
        return f"{where} does not answer ({error}); start that server, or correct the address"
    if not _is_of_httpx(error, "HTTPStatusError"):
        return None
    response = error.response  # type: ignore[attr-defined]
    answer = f"{response.status_code} {response.reason_phrase}"
    if response.status_code >= 500:
        return f"{where} fails ({answer}), as it does while its database is away; look at both, and run the same command again"
    if response.status_code in (401, 403):
        return f"{where} refuses this login ({answer}); correct PREFECT_API_AUTH_STRING"
    return None


def _is_of_httpx(error: Exception, name: str) -> bool:
    """Return whether the error is of this class of Prefect's HTTP library, recognised by name, so it need not be loaded."""
    kinds = type(error).__mro__
    return any(kind.__name__ == name and kind.__module__.startswith("httpx") for kind in kinds)


def print_damage(run_id: str, what: str, problems: Iterable[str]) -> None:
    """Print a line for each problem, with its remedy."""
    for problem in problems:
        print(f"vantage: run {run_id}: {what} is damaged: {problem}", file=sys.stderr)
    print(f"vantage: {what}: run the same recipe again, which makes it anew", file=sys.stderr)


def workspace_at(place: str) -> "Workspace":
    """Return the workspace in a folder or a bucket.

    Raises:
        RunError: the place is a file.
        ValueError: the place begins like the address of a bucket, but names none.
    """
    from vantage.runs.workspace import RunError, Workspace
    from vantage.storage.bucket import SCHEMES, address_forms

    scheme, _, rest = place.partition(":")
    if scheme in SCHEMES and not re.match("//[^/]", rest):
        raise ValueError(
            f"--workspace={place} names no bucket; write {', '.join(address_forms())}, or the path of a folder"
        )
    workspace = Workspace.at(place)
    if workspace.uri is None and workspace.root.is_file():
        raise RunError(f"workspace {workspace.root} is a file; name another with --workspace DIR")
    return workspace


def print_json(value: Any, *, indent: int | None = None) -> None:
    """Print one JSON value on standard output, without control characters."""
    try:
        print(safe_text(json.dumps(value, ensure_ascii=False, indent=indent)), flush=True)
    except BrokenPipeError:  # `| head` has closed the pipe, which is no error
        from vantage.runs.detached_streams import detach_reader

        detach_reader(sys.stdout)
