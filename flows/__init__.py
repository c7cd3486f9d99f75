"""Execution: the pipeline, attempts, launchers, runs, sweeps and the command line."""
