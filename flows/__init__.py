"""The order of work: the pipeline, one stage's life, launching, and the command line."""
