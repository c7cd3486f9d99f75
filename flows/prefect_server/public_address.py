"""The name of one variable. Servers import only this module of ours: more imports would make their start a tenth
longer."""

PUBLIC_ADDRESS = "VANTAGE_PREFECT_ADDRESS"
"""Name of the variable with the address at which a proxy serves a guarded server to other machines; unset: there is none."""
