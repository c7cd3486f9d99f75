"""The contents that MLflow must have of a run: a pure function of the run's operations, without an import of MLflow.

``changes`` interprets one operation. The writer sends the changes of each operation that was not sent yet; the audit
compares what MLflow shows with ``expected_runs``, the sum of all changes.
"""
