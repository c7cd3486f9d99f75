"""The order of work: pipeline, orchestrator, recording, publishing, work pools, Prefect's server, and sweeps."""
