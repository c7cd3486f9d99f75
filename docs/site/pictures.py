"""Take the pictures of the README from a real run, with headless Chromium.

    python -m docs.site.pictures REPORT.html PREFECT_FLOW_RUN_PAGE

writes report.png and prefect.png into docs/site/pictures. The first is the report of a run of the README's recipe, the second is the page of
its flow run in a Prefect server: http://127.0.0.1:4200/runs/flow-run/ID.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from tests.support.needs import chromium

FOLDER = Path(__file__).parent / "pictures"
MAX_BYTES = 150_000
GRAPH = (260, 0, 1280, 500)
"""The part of Prefect's page with the name, the state and the graph of a run."""
WAIT_MS = 20_000
"""Time of the page's own clock until the picture is taken: Prefect draws its graph after it has asked its server."""


def take(
    address: str, file: Path, *, width: int, height: int, shown: tuple[int, int, int, int] | None = None
) -> None:
    """Write the picture of a page: its first ``height`` pixels, or the part ``shown`` (left, top, right, bottom) of it.

    Raises:
        ValueError: there is no Chromium, or the picture is larger than the README may show.
    """
    program = chromium()
    if program is None:
        raise ValueError("no Chromium was found; install it, or set VANTAGE_CHROMIUM to its file")
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "raw.png"
        options = (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/profile",
        )
        size = (f"--window-size={width},{height}", f"--virtual-time-budget={WAIT_MS}", f"--screenshot={raw}")
        subprocess.run([program, *options, *size, address], check=True, capture_output=True, timeout=120)
        with Image.open(raw) as image:
            part = image.convert("RGB").crop(shown or (0, 0, width, height))
            part.quantize(128).save(file, optimize=True)
    if (written := file.stat().st_size) > MAX_BYTES:
        raise ValueError(
            f"{file.name} has {written} bytes, and at most {MAX_BYTES} are shown; take a smaller part"
        )


def main(report: str, flow_run_page: str) -> None:
    """Take both pictures."""
    FOLDER.mkdir(exist_ok=True)
    take(Path(report).resolve().as_uri(), FOLDER / "report.png", width=1280, height=900)
    take(flow_run_page, FOLDER / "prefect.png", width=1280, height=760, shown=GRAPH)


if __name__ == "__main__":
    main(*sys.argv[1:])
