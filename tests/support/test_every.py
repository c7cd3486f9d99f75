"""One test over many items checks all of them, and names those that fail."""

from pathlib import Path

import pytest

from tests.support.every import every


def test_every_item_is_checked_and_each_that_fails_is_named() -> None:
    seen = []

    @every("left, right", [(1, 1), (2, 3), pytest.param(4, 4), pytest.param(5, 6, id="the last")])
    def are_equal(left: int, right: int) -> None:
        seen.append((left, right))
        assert left == right

    with pytest.raises(pytest.fail.Exception) as failed:
        are_equal()
    assert seen == [(1, 1), (2, 3), (4, 4), (5, 6)]
    message = str(failed.value)
    assert message.startswith("2 of 4 fail:\n- 2, 3\n") and "\n- the last\n" in message
    assert "1, 1" not in message and "assert 2 == 3" in message and f"{Path(__file__).name}" in message


def test_an_error_that_was_expected_and_did_not_come_is_a_failure() -> None:
    @every("text", ["1", "one"])
    def is_refused(text: str) -> None:
        with pytest.raises(ValueError, match="invalid literal"):
            int(text)

    with pytest.raises(pytest.fail.Exception, match="^1 of 2 fail:\n- '1'\n"):
        is_refused()


def test_no_items_are_refused() -> None:
    with pytest.raises(AssertionError, match="no items"):
        every("text", [])(lambda text: None)


@every("number", [1, 2])
def test_no_item_sees_what_another_has_changed(
    number: int, plain: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plain == {} and not list(tmp_path.iterdir()), "as the fixture made them"
    assert not hasattr(Path, "changed")
    plain["changed"] = number
    (tmp_path / "changed").touch()
    monkeypatch.setattr(Path, "changed", number, raising=False)


@pytest.fixture
def plain() -> dict[str, int]:
    return {}
