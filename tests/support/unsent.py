"""Make runs that send nothing to MLflow, for tests of their own records alone: two thirds of a run of fake stages are writing to it."""

from vantage.ledger.sender import Sender

VARIABLE = "SENDS_NOTHING_TO_MLFLOW"
"""Name of the variable with which processes of fake stages send nothing, too."""
SENDS_NOTHING = {"warm_up": lambda self: None, "flush": lambda self, timeout_seconds: True}
"""Methods of ``Sender`` that keep the outboxes as they are; the end of a run takes them for sent."""


def send_nothing() -> None:
    """Have this process send nothing to MLflow."""
    for name, method in SENDS_NOTHING.items():
        setattr(Sender, name, method)
