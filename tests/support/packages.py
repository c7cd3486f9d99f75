"""List the packages of Vantage as the tree has them: each is a folder, to which a link in ``vantage`` leads."""

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]

PACKAGES = tuple(sorted(link.name for link in (ROOT / "vantage").iterdir() if link.is_symlink()))


def copy_packages(target: Path, *, compiled: bool = False) -> None:
    """Copy ``vantage``, its links, and what they lead to.

    Args:
        compiled: copy bytecode too, so that processes need not compile unchanged files.
    """
    left_out = shutil.ignore_patterns(
        "*.pyc.*" if compiled else "__pycache__"
    )  # leave out packages that are being written
    for name in ("vantage", *PACKAGES):
        shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=left_out)
