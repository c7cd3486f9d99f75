"""PostgreSQL, Prefect and MLflow on this machine, for ``make servers``: authenticated, on loopback only."""
