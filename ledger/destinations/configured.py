"""The destinations that the environment names."""

import os
from pathlib import Path

from vantage.ledger.destination_settings import TENSORBOARD, is_installed, openlineage_url
from vantage.ledger.destinations.destination import Destination


def configured_destinations() -> list[Destination]:
    """Return the places that get the records of this process's runs, besides MLflow."""
    found: list[Destination] = []
    if (folder := os.environ.get(TENSORBOARD)) and is_installed("tensorboard"):
        from vantage.ledger.destinations.tensorboard import EventFiles

        found.append(EventFiles(Path(folder).absolute()))
    if (url := openlineage_url()) and is_installed("openlineage.client"):
        from vantage.ledger.destinations.openlineage import LineageServer

        server = LineageServer(
            url,
            endpoint=os.environ.get("OPENLINEAGE_ENDPOINT") or "api/v1/lineage",
            api_key=os.environ.get("OPENLINEAGE_API_KEY"),
            namespace=os.environ.get("OPENLINEAGE_NAMESPACE") or "vantage",
        )
        found.append(server)
    return found
