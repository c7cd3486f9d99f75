"""``python -m deploy.servers up | down | watch``: start PostgreSQL, a Prefect server and an MLflow server, or stop them.

``up`` writes lines for a shell to standard output, and messages to standard error: ``eval "$(make --silent servers)"``.
``watch`` is for systemd: it starts the servers, restarts those that end, and stops all three when it gets SIGTERM.
"""

import argparse
import sys
from pathlib import Path

from deploy.servers.failure import ServersFailure
from deploy.servers.lifecycle import (
    alone,
    remember_addresses,
    say,
    start_all,
    stop_all,
    write_environments,
)
from deploy.servers.watching import watch


def main() -> int:
    """Start or stop the servers; return the exit code: 69 if a server cannot be started or stopped."""
    parser = argparse.ArgumentParser(prog="python -m deploy.servers", description=__doc__)
    parser.add_argument("action", choices=["up", "down", "watch"])
    parser.add_argument(
        "--data", type=Path, default=Path(".vantage-servers"), help="folder of all that they keep"
    )
    parser.add_argument("--delete", action="store_true", help="with down: delete what they kept, too")
    for server in ("prefect", "mlflow"):
        parser.add_argument(
            f"--{server}-address",
            metavar="https://NAME",
            help=f"where a proxy serves {server} to other machines; remembered; '' forgets it",
        )
    options = parser.parse_args()
    folder: Path = options.data.absolute()
    try:
        with alone(folder):
            remember_addresses(folder, prefect=options.prefect_address, mlflow=options.mlflow_address)
            if options.action == "up":
                _up(folder)
        if options.action == "watch":
            watch(folder)
        elif options.action == "down":
            with alone(folder):
                stop_all(folder, delete=options.delete)
    except ServersFailure as failure:
        say(str(failure))
        return 69
    return 0


def _up(folder: Path) -> None:
    settings = start_all(folder)
    write_environments(settings, folder)
    print(settings.exports(), end="")
    say(f"The same lines are in {folder / 'environment'}.")
    if settings.public:
        say(f"Those for other machines are in {folder / 'environment.elsewhere'}.")


if __name__ == "__main__":
    sys.exit(main())
