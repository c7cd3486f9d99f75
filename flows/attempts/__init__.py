"""One attempt at a stage: its key, its job, what it is made with."""
