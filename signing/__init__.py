"""Signatures of artifacts: keys, statements, checks, and the policy on who may move an alias."""
