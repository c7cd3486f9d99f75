"""A run of real stages, made once for the tests of commands that use its models."""

import pytest

from tests.support.small_chat_run import make_small_chat_run
from vantage.runs.workspace import Workspace


@pytest.fixture(scope="session")
def small_chat_run(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """The workspace of a finished run, whose ledger is its own; for reading only."""
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("MLFLOW_TRACKING_URI", raising=False)
        return make_small_chat_run(tmp_path_factory.mktemp("small-chat"))
