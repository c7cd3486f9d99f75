"""Backup and restore of the three stores: Prefect's database, MLflow's database with its artifacts, and the workspace."""
