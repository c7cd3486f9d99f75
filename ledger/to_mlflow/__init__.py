"""Send the outbox to MLflow. Only this package imports MLflow, which takes about a second."""
