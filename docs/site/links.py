"""Follow links from pages to files outside docs/, and show those files as pages of the site."""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
OUTSIDE = "repository"
"""Folder of the site that shows files of the repository outside docs/."""
FENCED = re.compile(r"^(?:```|~~~).*?^(?:```|~~~)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(\]\()(?!\w+:|#)([^)#\s]+)(#[^)\s]+)?(\))")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".toml": "toml", ".sh": "bash"}


def place_in_site(file: str) -> str:
    """Return the path in the site of a file or folder of the repository (``docs/a.md`` → ``a.md``)."""
    path = ROOT / file
    if path.is_dir():
        readme = posixpath.join(file, "README.md")
        return place_in_site(readme) if (ROOT / readme).exists() else f"{_inside(file)}/index.md"
    if file.startswith("docs/"):
        return _inside(file)
    return _inside(file) if file.endswith(".md") else f"{_inside(file)}.md"


def _inside(file: str) -> str:
    return file.removeprefix("docs/") if file.startswith("docs/") else f"{OUTSIDE}/{file}"


def place_in_repository(page: str) -> str:
    """Return the file of the repository that a page of the site shows."""
    return page.removeprefix(f"{OUTSIDE}/") if page.startswith(f"{OUTSIDE}/") else f"docs/{page}"


def with_links_in_site(text: str, page: str) -> str:
    """Return the text of a page, with links that lead out of docs/, or to a folder, replaced by links within the site."""
    folder = posixpath.dirname(place_in_repository(page))

    def replaced(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        if not (ROOT / target).exists():
            return match[0]  # a generated page, or one that the strict build refuses
        leads_to = posixpath.relpath(place_in_site(target), posixpath.dirname(page) or ".")
        return f"{match[1]}{leads_to}{match[3] or ''}{match[4]}"

    return "".join(part if is_code else LINK.sub(replaced, part) for part, is_code in _divided_by_code(text))


def _divided_by_code(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a page, and whether each is a block of code."""
    last = 0
    for match in FENCED.finditer(text):
        yield text[last : match.start()], False
        yield match[0], True
        last = match.end()
    yield text[last:], False


def outside_pages() -> dict[str, str]:
    """Return path in the site → text of each file outside docs/ that a page links to, directly or by another one."""
    waiting = [(file, file.read_text(encoding="utf-8")) for file in sorted((ROOT / "docs").rglob("*.md"))]
    found: dict[str, str] = {}
    while waiting:
        file, text = waiting.pop()
        for part, is_code in _divided_by_code(text):
            for match in () if is_code else LINK.finditer(part):
                target = Path(posixpath.normpath(posixpath.join(file.parent.as_posix(), match[2])))
                name = target.relative_to(ROOT).as_posix() if target.is_relative_to(ROOT) else ""
                if not name or not target.exists() or (name.startswith("docs/") and not target.is_dir()):
                    continue
                place = place_in_site(name)
                if place in found or (
                    place_in_repository(place).startswith("docs/") and target.name != "decisions"
                ):
                    continue
                shown = _shown(target, name)
                found[place] = shown
                if place.endswith("README.md"):
                    readme = target / "README.md" if target.is_dir() else target
                    waiting.append((readme, shown))
                elif target.suffix == ".md":
                    waiting.append((target, shown))
    return found


def _shown(target: Path, name: str) -> str:
    """Return a file as a page; of a folder its README, or the list of its files."""
    if target.is_dir():
        if (target / "README.md").exists():
            return (target / "README.md").read_text(encoding="utf-8")
        files = sorted(each.name for each in target.iterdir() if each.is_file())
        return "\n".join([f"# {name}/", "", *(f"- {each}" for each in files), ""])
    text = target.read_text(encoding="utf-8")
    if target.suffix == ".md":
        return text
    return f"# {name}\n\n~~~~{LANGUAGES.get(target.suffix, 'text')}\n{text}~~~~\n"
