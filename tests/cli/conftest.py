"""Make a run of real stages once, for the tests of commands that use its models."""

import pytest

from tests.support.made_once import made_once
from tests.support.small_chat_run import make_small_chat_run
from vantage.runs.workspace import Workspace


@pytest.fixture(scope="session")
def small_chat_run(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Return the workspace of a finished run with a ledger of its own. Tests may only read it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("MLFLOW_TRACKING_URI", raising=False)
        return Workspace(made_once(tmp_path_factory, "small-chat", make_small_chat_run) / "workspace")
