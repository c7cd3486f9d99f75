"""What stages, runs and gates leave behind: artifacts, metrics, verdicts, keys."""
