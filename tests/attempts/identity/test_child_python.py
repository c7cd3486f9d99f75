"""A Python child of ours finds our package, and nothing else that its parent does not find."""

import json
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from vantage.attempts.identity import child_python as subject
from vantage.attempts.identity.child_python import python_environment
from vantage.attempts.identity.package import package_folder

ROOT = str(package_folder().parent)


@pytest.mark.parametrize(
    ("inherited", "is_installed", "path"),
    [
        (None, False, ROOT),
        ("", False, ROOT),
        ("/mine", False, f"/mine:{ROOT}"),
        (f"/mine:{ROOT}:/other", False, f"/mine:{ROOT}:/other"),
        (None, True, None),
        ("/mine", True, "/mine"),
    ],
    ids=["none", "empty", "another", "ours already", "none, installed", "another, installed"],
)
def test_our_folder_is_added_behind_the_users_where_it_is_needed(
    inherited: str | None, is_installed: bool, path: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if inherited is not None:
        monkeypatch.setenv("PYTHONPATH", inherited)
    monkeypatch.setattr(subject, "_is_installed", lambda: is_installed)
    expected = {"PYTHONSAFEPATH": "1"} if path is None else {"PYTHONSAFEPATH": "1", "PYTHONPATH": path}
    assert python_environment() == expected


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (None, False),
        ({"url": f"file://{ROOT}", "dir_info": {"editable": True}}, True),
        ({"url": f"file://{ROOT}", "dir_info": {}}, False),
        ({"url": "file:///elsewhere", "dir_info": {"editable": True}}, False),
        ({"url": "https://host/x.git", "vcs_info": {"vcs": "git", "commit_id": "b" * 40}}, False),
    ],
)
def test_an_installation_is_ours_where_it_leads_to_this_folder(
    origin: dict[str, object] | None, expected: bool, tmp_path: Path
) -> None:
    """A copy that was made of this checkout is another folder."""
    site = tmp_path / "vantage_rlhf-0.2.0.dist-info"
    site.mkdir()
    if origin is not None:
        (site / "direct_url.json").write_text(json.dumps(origin))
    assert subject._holds_ours(Distribution.at(site)) is expected


def test_an_installation_of_this_very_folder_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vantage").mkdir()
    monkeypatch.setattr(subject, "package_folder", lambda: tmp_path / "vantage")
    site = tmp_path / "vantage_rlhf-0.2.0.dist-info"
    site.mkdir()
    assert subject._holds_ours(Distribution.at(site))
