"""Let MLflow forget the databases that finished tests have left.

It keeps a connection, and what SQLAlchemy has compiled for it, of each database that it was ever asked about: 3 MB for each
audit, which copies the database first. A process of the tests grew to 3 GB.
"""

import sys


def forget_databases() -> None:
    """Close every connection of MLflow's stores in this process; a later use opens another."""
    for part in ("tracking", "model_registry"):
        store = sys.modules.get(f"mlflow.store.{part}.sqlalchemy_store")
        engines = {} if store is None else store.SqlAlchemyStore._engine_map
        for engine in engines.values():
            engine.dispose()
        engines.clear()
    for part, name in (
        ("_tracking_service", "TrackingStoreRegistry"),
        ("_model_registry", "ModelRegistryStoreRegistry"),
    ):
        registry = sys.modules.get(f"mlflow.tracking.{part}.registry")
        if registry is not None:
            getattr(registry, name)._get_store_with_resolved_uri.cache_clear()
