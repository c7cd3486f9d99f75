"""A run records the state of the code that made it; the digest and the revision have tests of their own."""

import getpass

import pytest

from tests.support.version import PROJECT_VERSION
from vantage.attempts.identity.package import package_digest
from vantage.attempts.identity.revision import Revision
from vantage.runs import origin as subject

COMMIT = "c" * 40


@pytest.mark.parametrize(
    "revision, told",
    [
        (Revision("unknown", "unknown"), {}),
        (Revision(COMMIT, "unknown"), {"mlflow.source.git.commit": COMMIT}),
        (Revision(COMMIT, "no"), {"mlflow.source.git.commit": COMMIT, "vantage.git.dirty": "false"}),
        (Revision(COMMIT, "yes"), {"mlflow.source.git.commit": COMMIT, "vantage.git.dirty": "true"}),
    ],
)
def test_what_is_known_of_the_code_is_told(
    revision: Revision, told: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "revision", lambda: revision)
    always = {
        "mlflow.user": getpass.getuser(),
        "vantage.version": PROJECT_VERSION,
        "vantage.code_sha256": package_digest(),
    }
    assert subject.origin() == always | told
