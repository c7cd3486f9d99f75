"""What MLflow must show of a run, as a pure function of the run's operations; nothing here imports MLflow.

``changes`` interprets one operation. The writer sends the changes of each operation that was not sent yet; the audit
compares what MLflow shows with ``expected_runs``, the sum of all changes.
"""
