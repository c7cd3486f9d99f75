"""The destinations that the environment names."""

import os
from pathlib import Path

from vantage.ledger.destination_settings import TENSORBOARD, is_installed
from vantage.ledger.destinations.destination import Destination


def configured_destinations() -> list[Destination]:
    """Return the places that get the records of this process's runs, besides MLflow."""
    found: list[Destination] = []
    if (folder := os.environ.get(TENSORBOARD)) and is_installed("tensorboard"):
        from vantage.ledger.destinations.tensorboard import EventFiles

        found.append(EventFiles(Path(folder).absolute()))
    return found
