"""``python -m deploy.servers up | down``: start PostgreSQL, a Prefect server and an MLflow server, or stop them.

``up`` writes lines for a shell to standard output, and messages to standard error: ``eval "$(make --silent servers)"``.
"""

import argparse
import sys
from pathlib import Path

from deploy.servers.failure import ServersFailure
from deploy.servers.lifecycle import alone, say, start_all, stop_all
from deploy.servers.settings import write_private


def main() -> int:
    """Returns the exit code: 69 if a server cannot be started or stopped."""
    parser = argparse.ArgumentParser(prog="python -m deploy.servers", description=__doc__)
    parser.add_argument("action", choices=["up", "down"])
    parser.add_argument(
        "--data", type=Path, default=Path(".vantage-servers"), help="folder of all that they keep"
    )
    parser.add_argument("--delete", action="store_true", help="with down: delete what they kept, too")
    options = parser.parse_args()
    folder: Path = options.data.absolute()
    try:
        with alone(folder):
            if options.action == "up":
                settings = start_all(folder)
                write_private(folder / "environment", settings.exports())
                print(settings.exports(), end="")
                say(f"The same lines are in {folder / 'environment'}.")
            else:
                stop_all(folder, delete=options.delete)
    except ServersFailure as failure:
        say(str(failure))
        return 69
    return 0


if __name__ == "__main__":
    sys.exit(main())
