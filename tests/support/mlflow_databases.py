"""Let MLflow forget the databases that finished tests have left.

MLflow keeps a connection to each database that it was ever asked about, and what SQLAlchemy has compiled for it. Each
audit copies the database first, so this took 3 MB an audit, and a process of the tests grew to 3 GB.
"""

import shutil
import sys
import tempfile
from typing import ClassVar


class ReusedFolder:
    """Stand in for the temporary folder into which an audit copies a database; the next audit gets the same one.

    SQLite replaces the content of a copy that is there already. So SQLAlchemy goes on with its connection, and with all
    that it has compiled for it. MLflow opens the copy anew, and checks it as it checks any database. Two audits at a time
    have two folders.
    """

    free: ClassVar[list[str]] = []

    def __init__(self, prefix: str) -> None:
        self.name = self.free.pop() if self.free else tempfile.mkdtemp(prefix=prefix)

    def cleanup(self) -> None:
        """Leave the folder to the next audit."""
        _forget_stores()
        self.free.append(self.name)

    @classmethod
    def remove(cls) -> None:
        """Remove the folders; ``forget_databases`` must come first."""
        while cls.free:
            shutil.rmtree(cls.free.pop())


def forget_databases() -> None:
    """Close every connection of MLflow's stores in this process; a later use opens another."""
    for part in ("tracking", "model_registry"):
        store = sys.modules.get(f"mlflow.store.{part}.sqlalchemy_store")
        # A thread that still imports the module has opened nothing.
        stores = getattr(store, "SqlAlchemyStore", None)
        engines = {} if stores is None else stores._engine_map
        for engine in engines.values():
            engine.dispose()
        engines.clear()
    _forget_stores()


def _forget_stores() -> None:
    """Let MLflow open every database anew; the engines stay."""
    for part, name in (
        ("_tracking_service", "TrackingStoreRegistry"),
        ("_model_registry", "ModelRegistryStoreRegistry"),
    ):
        registry = sys.modules.get(f"mlflow.tracking.{part}.registry")
        if (kept := getattr(registry, name, None)) is not None:
            kept._get_store_with_resolved_uri.cache_clear()
