"""One attempt at a stage: its request, key, job and provenance."""
