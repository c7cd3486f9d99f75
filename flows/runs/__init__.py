"""Runs: their records, plans, execution, and how they end."""
