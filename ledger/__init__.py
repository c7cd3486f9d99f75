"""The ledger of a run: its records, kept in an outbox on disk and sent from there to MLflow."""
