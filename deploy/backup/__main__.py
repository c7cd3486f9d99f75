"""``python -m deploy.backup save | restore``: save Prefect's and MLflow's databases and a workspace, or put them back.

deploy/backup/README.md describes the order, what is lost, and the steps by hand for servers in containers.
"""

import argparse
import sys
import time
from pathlib import Path

from deploy.backup.restoring import restore
from deploy.backup.saving import save
from deploy.backup.stores import Stores
from deploy.servers.failure import ServersFailure
from deploy.servers.lifecycle import say


def main() -> int:
    """Save or restore; return the exit code: 69 if something cannot be saved or restored."""
    parser = argparse.ArgumentParser(prog="python -m deploy.backup", description=__doc__)
    parser.add_argument("action", choices=["save", "restore"])
    parser.add_argument(
        "--to", type=Path, help="with save: the folder of the backup, which does not exist yet"
    )
    parser.add_argument(
        "--dated",
        action="store_true",
        help="with save: write into a new folder inside --to, named after the time",
    )
    parser.add_argument("--from", type=Path, dest="source", help="with restore: the folder of the backup")
    parser.add_argument("--workspace", type=Path, help="a workspace in a folder")
    parser.add_argument(
        "--servers", type=Path, metavar="DIR", help="the folder of `make servers`, with both databases"
    )
    options = parser.parse_args()
    if options.workspace is None and options.servers is None:
        parser.error("nothing is named; give --workspace, --servers, or both")
    stores = Stores(
        workspace=None if options.workspace is None else options.workspace.absolute(),
        servers=None if options.servers is None else options.servers.absolute(),
    )
    try:
        if options.action == "save":
            if options.to is None or options.source is not None:
                parser.error("save needs --to FOLDER, and no --from")
            to: Path = options.to.absolute()
            save(stores, to / time.strftime("%Y-%m-%dT%H%M%SZ", time.gmtime()) if options.dated else to)
        else:
            if options.source is None or options.to is not None:
                parser.error("restore needs --from FOLDER, and no --to")
            restore(options.source.absolute(), stores)
    except ServersFailure as failure:
        say(str(failure))
        return 69
    except OSError as error:
        say(f"{error.filename or 'a file'}: {error.strerror}; nothing is kept of this call")
        return 69
    return 0


if __name__ == "__main__":
    sys.exit(main())
