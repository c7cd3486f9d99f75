"""Prefect's server, and what Prefect shows of a run."""
