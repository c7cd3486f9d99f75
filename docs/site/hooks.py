"""Hooks of MkDocs: add generated pages to the site, list the decisions, and keep links within the site."""

import re
from pathlib import Path
from typing import Any

from docs.site import commands, links, recipe_fields, refusals

DOCS = Path(__file__).parents[1]
DECISIONS_PAGE = "decisions/index.md"
GENERATED = (
    recipe_fields.RECIPE_PAGE,
    recipe_fields.STAGES_PAGE,
    recipe_fields.ALGORITHM_PAGE,
    recipe_fields.SWEEP_PAGE,
    commands.COMMANDS_PAGE,
    commands.EXIT_CODES_PAGE,
    refusals.REFUSALS_PAGE,
    DECISIONS_PAGE,
)
"""The pages that are made from code when the site is built."""


def generated_pages() -> dict[str, str]:
    """Return path in the site → text of each page that is made from code."""
    return {
        **recipe_fields.pages(),
        **commands.pages(),
        **refusals.pages(),
        DECISIONS_PAGE: decisions_page(),
    }


def decisions_page() -> str:
    """Return the list of all decisions, newest first."""
    lines = ["# Decisions", "", "One page for each choice of design, with its reasons and its price.", ""]
    for file in sorted((DOCS / "decisions").glob("*.md"), reverse=True):
        number = file.name.partition("-")[0]
        heading = re.findall(r"^# (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)[0]
        lines.append(f"- {number}: [{heading}]({file.name})")
    return "\n".join(lines) + "\n"


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages, and the files outside docs/ that pages link to."""
    from mkdocs.structure.files import File

    for place, text in {**links.outside_pages(), **generated_pages()}.items():
        if files.get_file_from_path(place) is None:
            files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Keep the links of a page within the site."""
    return links.with_links_in_site(markdown, page.file.src_uri)
