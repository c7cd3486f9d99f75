"""Links between the README and the pages of docs/ and deploy/ lead to files and headings that are there."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from docs.site import hooks

ROOT = Path(__file__).parents[1]
GENERATED = ROOT / "docs"
"""Folder of the pages that are made when the site is built; `make docs` checks links to them, with their anchors."""
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!\w+://|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


def pages() -> list[Path]:
    return [
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "deploy").rglob("*.md"),
    ]


def anchors(page: Path) -> set[str]:
    """Return the anchor of each heading, as GitHub names it."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def is_generated(file: Path) -> bool:
    """Return whether the site has a page of this path that is made from code."""
    path = Path(os.path.normpath(file))
    return path.is_relative_to(GENERATED) and path.relative_to(GENERATED).as_posix() in hooks.GENERATED


def broken_links(page: Path) -> Iterator[str]:
    for target, anchor in LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
        file = page.parent / target if target else page
        if page.is_relative_to(GENERATED) and is_generated(file):
            continue
        if not file.exists() or (anchor and anchor not in anchors(file)):
            yield f"{page.name}: {target}#{anchor}"


def test_every_link_leads_somewhere() -> None:
    assert len(pages()) > 50
    assert [link for page in pages() for link in broken_links(page)] == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Two words, and more\n[a](page.md#two-words-and-more) [b](#none) [c](gone.md)\n")
    assert list(broken_links(page)) == ["page.md: #none", "page.md: gone.md#"]


def test_the_log_lists_each_of_its_pages_once_and_they_are_in_the_order_of_time() -> None:
    log = ROOT / "docs" / "log"
    listed = re.findall(r"\(log/(\w+\.md)\)", (ROOT / "docs" / "LOG.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(page.name for page in log.glob("*.md"))
    for page in log.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        dates = re.findall(r"^## (\d{4}-\d\d-\d\d) · \S", text, re.MULTILINE)
        assert len(dates) == text.count("\n## ") > 0, page.name
        assert dates == sorted(dates), page.name
