"""Which tags of a run name what it was made from."""

import pytest

from vantage.review.audit.mlflow_tags import is_parent, is_pointer


@pytest.mark.parametrize(
    ("tag", "parent", "pointer"),
    [
        ("vantage.parent.model", True, False),
        ("vantage.parent.model.run", False, True),
        ("vantage.status", False, False),
        ("somebody.run", False, False),
    ],
)
def test_a_parent_has_a_digest_and_a_pointer_to_its_run(tag: str, parent: bool, pointer: bool) -> None:
    assert (is_parent(tag), is_pointer(tag)) == (parent, pointer)
