"""Records of stages, runs and gates: artifacts, metrics, verdicts, keys."""
