"""Links between MLflow's pages, in Markdown."""

from dataclasses import dataclass

from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.safe_text import markdown_text


@dataclass(frozen=True)
class Link:
    """An artifact in MLflow: the pages of the run that made it and of its model."""

    run: str | None = None
    run_name: str | None = None
    model: str | None = None


ArtifactKey = tuple[str, str]
"""Digest and stage key of an artifact: two stages may make equal artifacts."""


def artifact_key(artifact: Artifact) -> ArtifactKey:
    """Return the artifact's digest and stage key."""
    return artifact.digest, artifact.stage_key


def linked_run(link: Link) -> str:
    """Return the run that made an artifact, as a link."""
    return linked(link.run_name or "run", link.run) if link.run else "a run that this server does not know"


def linked(text: str, page: str | None) -> str:
    """Return the text, as a link if there is a page."""
    return f"[{markdown_text(text)}]({page})" if page else markdown_text(text)


def words(name: str) -> str:
    """Return a name of the program as words."""
    return name.replace("_", " ")
