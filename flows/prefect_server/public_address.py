"""The name of one variable, for servers that import nothing else of ours: what they import is a tenth of their start."""

PUBLIC_ADDRESS = "VANTAGE_PREFECT_ADDRESS"
"""Name of the variable with the address at which a proxy serves a guarded server to other machines; unset: there is none."""
