"""The ledger of a run: what is told of it, kept in an outbox on disk, and sent from there to MLflow."""
