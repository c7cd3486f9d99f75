"""The Python interface: what the commands do, as functions with typed results. ``vantage`` has its names (docs/python.md)."""
