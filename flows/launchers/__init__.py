"""Where a stage's computation runs: a child process of this machine."""
