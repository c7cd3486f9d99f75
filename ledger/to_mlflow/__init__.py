"""Sends the outbox to MLflow; the only package that imports it, which takes about a second."""
