"""Sweeps: variants of one recipe over paired seeds."""
