"""Run recipes from Python: in a process of its own, whose progress is printed here, and which an interrupt asks to save."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vantage.api.places import Place, overrides_of, workspace_of
from vantage.api.records import Run
from vantage.attempts.identity.child_python import python_environment
from vantage.runs.resolving import load_resolved
from vantage.runs.summary import reasons
from vantage.schemas.loading.part_of_recipe import part_named

COMMAND: tuple[str, ...] = (sys.executable, "-m", "vantage")
"""The command line of this installation."""
_FORCED = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE")


class RunFailed(RuntimeError):
    """A run that failed, or that could not begin."""

    def __init__(self, message: str, *, exit_code: int, run: Run | None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        """Exit code of ``vantage run`` (docs/faults.md)."""
        self.run = run
        """The run as it was recorded; None: it was refused before it began."""


def run(
    recipe: str | Path,
    *,
    set: Mapping[str, Any] | None = None,
    workspace: Place = None,
    until: str | None = None,
    only: str | None = None,
    strict: bool = False,
) -> Run:
    """Run a recipe, or go on with its unfinished run; what is already made is reused. The same as ``vantage run``.

    The run has a process of its own: what a notebook has loaded or changed cannot change it. It goes on if this process
    dies; ``vantage cancel`` then ends it. An interrupt (Ctrl-C, a notebook's stop button) has it save its state, and
    KeyboardInterrupt is raised when it has; the same call goes on with it.

    Args:
        recipe: a file, or the name of a built-in recipe.
        set: field → value in place of the recipe's, for example ``{"stages.policy.iterations": 20}``.
        workspace: a folder or a bucket.
        until: a stage; it and all that it reads are run, and nothing is published.
        only: a stage, which alone is run; what it reads has to be made already. Nothing is published.
        strict: refuse to reuse what was made with other code or libraries.

    Returns:
        The run. Its status may also be ``gate_closed`` or ``waiting_approval``, which are outcomes and no errors.

    Raises:
        ValueError: the recipe is invalid; nothing was started.
        RunFailed: a stage failed, or the run could not begin.
    """
    place, overrides = workspace_of(workspace), overrides_of(set)
    load_resolved(
        str(recipe), overrides, part=part_named(until, only), workspace=place
    )  # an invalid recipe is refused here, as an exception of its own
    command = [*COMMAND, "run", str(recipe), "--workspace", place.address, "--json"]
    command += [word for each in overrides for word in ("--set", each)]
    command += [
        f"--{extent}={stage}" for extent, stage in (("until", until), ("only", only)) if stage is not None
    ]
    command += ["--strict"] if strict else []
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=_environment(),
        start_new_session=True,  # a notebook's interrupt goes to its whole process group
    ) as process:
        assert process.stdout is not None and process.stderr is not None, "both are pipes"
        printed: list[str] = []
        reader = threading.Thread(target=lambda: printed.extend(process.stdout or ()), daemon=True)
        reader.start()
        last, interrupted = _follow(process, process.stderr)
        reader.join()
    found = _run_in(printed, place)
    if interrupted:
        raise KeyboardInterrupt(f"run {found.id} is {found.status}" if found else "the run was interrupted")
    if found is None or found.status in ("failed", "resumable", "running"):
        why = "; ".join(reasons(found.record)) if found else last
        name = f"run {found.id} is {found.status}" if found else "the run could not begin"
        raise RunFailed(
            f"{name}: {why or f'exit code {process.returncode}'}", exit_code=process.returncode, run=found
        )
    return found


def _environment() -> dict[str, str]:
    """Return the variables of the run; a notebook's kernel asks for the codes of a terminal, which no pipe understands."""
    inherited = {name: value for name, value in os.environ.items() if name not in _FORCED}
    return {**inherited, **python_environment()}


def _follow(process: "subprocess.Popen[str]", lines: Iterable[str]) -> tuple[str, bool]:
    """Print the lines of a run as they come; returns the last message of ``vantage``, and whether it was interrupted."""
    message, interrupted = "", False
    unread = iter(lines)
    while True:
        try:
            for line in unread:
                print(line, end="", flush=True)
                if line.startswith("vantage: "):
                    message = line.removeprefix("vantage: ").strip()
            process.wait()
            return message, interrupted
        except KeyboardInterrupt:
            interrupted = True
            process.send_signal(signal.SIGINT)


def _run_in(printed: list[str], place: Any) -> Run | None:
    """Return the run that the last line of ``run --json`` names."""
    try:
        return Run(place, json.loads(printed[-1])["run_id"])
    except (IndexError, ValueError, KeyError, TypeError):
        return None
