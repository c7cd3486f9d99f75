"""The name of one variable. Servers import it from here, and nothing else of ours: more imports would take a tenth of their start."""

PUBLIC_ADDRESS = "VANTAGE_PREFECT_ADDRESS"
"""Name of the variable with the address at which a proxy serves a guarded server to other machines; unset: there is none."""
