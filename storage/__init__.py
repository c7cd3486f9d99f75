"""Artifacts on disk: sealed, named by their content, found by stage key."""
