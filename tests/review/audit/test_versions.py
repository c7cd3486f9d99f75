"""An audit compares a version with the run of MLflow that it names, if MLflow answers about that run."""

from types import SimpleNamespace
from typing import Any

from vantage.review.audit.versions import _tag_problems
from vantage.runs.view import Missing


def problems(answer: object) -> list[str]:
    """Return the problems of a version's tags where MLflow answers this about the run that it names."""
    evidence: Any = SimpleNamespace(
        refs_of={}, ask=lambda question: answer, once=lambda key, make: Missing("it was not asked")
    )
    version: Any = SimpleNamespace(
        name="chat", version="1", run_id="r", tags={"vantage.digest": "a" * 64}, model_tags={}
    )
    return list(_tag_problems(evidence, version, []))


def test_a_run_about_which_mlflow_does_not_answer_is_no_other_run() -> None:
    """MLflow answered about the version. That it does not any longer is another check's finding."""
    assert problems({"vantage.digest": "b" * 64}) == [f"the run of MLflow that it names made {'b' * 12}"]
    assert problems(None) == ["MLflow has no run r, which it names as the one that made it"]
    assert problems(Missing("it does not answer")) == []
