"""From the outbox into MLflow: the only place that imports it, which takes about a second."""
