"""Places beside MLflow that get a run's records from its outbox: TensorBoard's files, and a server of OpenLineage."""
