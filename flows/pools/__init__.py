"""Attempts on the workers of Prefect's work pools."""
