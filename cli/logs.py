"""``vantage logs``: print the output of a run's stages."""

import sys
import time
from typing import Annotated

import typer

from vantage.cli.app import DEFAULT_WORKSPACE, RUN_HELP, Place, Verbose, complete_run
from vantage.cli.output import explained, workspace_at

SECONDS_BETWEEN_LOOKS = 1.0


def logs(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP, autocompletion=complete_run)],
    step: Annotated[
        str | None,
        typer.Argument(metavar="[STAGE]", help="A stage or step of the run; without it, all of them."),
    ] = None,
    workspace: Place = DEFAULT_WORKSPACE,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on printing until the run has ended or is interrupted.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Print the logs of a run's stages, wherever they were or are computed."""
    with explained(verbose):
        from vantage.attempts.launchers.safe_stream import SafeStream
        from vantage.runs.logs import read_log
        from vantage.runs.names import named_run
        from vantage.runs.run import is_active, read_run

        place = workspace_at(workspace)
        found = named_run(place, run_id, "logs")
        record = read_run(place, found)
        if step is not None and step not in record.stages:
            raise ValueError(f"{step} is no step of run {found}; it has {', '.join(record.stages)}")
        printed: dict[str, int] = {}
        shown = SafeStream(sys.stdout)
        while True:
            ended = not follow or not is_active(place, found)
            record = read_run(place, found)
            for name in [step] if step else record.stages:
                log = read_log(place, record, name)
                new = log[printed.get(name, 0) if len(log) >= printed.get(name, 0) else 0 :]
                printed[name] = len(log)
                for line in new.decode(errors="replace").splitlines():
                    print(line if step else f"{name} | {line}", file=shown)
            shown.flush()
            if ended:
                return
            time.sleep(SECONDS_BETWEEN_LOOKS)
