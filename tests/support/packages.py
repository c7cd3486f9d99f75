"""The packages of Vantage, as the tree has them: a folder each, and a link to it in ``vantage``."""

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]

PACKAGES = tuple(sorted(link.name for link in (ROOT / "vantage").iterdir() if link.is_symlink()))


def copy_packages(target: Path) -> None:
    """Copy ``vantage``, its links, and what they lead to."""
    for name in ("vantage", *PACKAGES):
        shutil.copytree(
            ROOT / name, target / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
