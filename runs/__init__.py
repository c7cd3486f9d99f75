"""Runs: records, plans, execution and results."""
