"""Draw the picture of the pipeline in the README: `python -m docs.site.pipeline_picture` writes pictures/pipeline.svg."""

from dataclasses import dataclass
from html import escape
from pathlib import Path

FILE = Path(__file__).parent / "pictures" / "pipeline.svg"
WIDTH, HEIGHT = 895, 254
BOX_HEIGHT = 54


@dataclass(frozen=True)
class Box:
    """One box of the picture."""

    x: int
    y: int
    width: int
    title: str
    note: str = ""
    fill: str = "#eef2ff"

    @property
    def right(self) -> tuple[int, int]:
        """Return the middle of the right edge."""
        return self.x + self.width, self.y + BOX_HEIGHT // 2

    @property
    def left(self) -> tuple[int, int]:
        """Return the middle of the left edge."""
        return self.x, self.y + BOX_HEIGHT // 2


DATA, GATE = "#f1f5f9", "#ecfdf5"
DEMONSTRATIONS = Box(10, 20, 140, "demonstrations", fill=DATA)
PREFERENCES = Box(10, 100, 140, "preferences", fill=DATA)
PROMPTS = Box(10, 180, 140, "prompts", fill=DATA)
SFT = Box(180, 20, 110, "SFT")
REWARD = Box(180, 100, 150, "reward model", "gate: pair accuracy", GATE)
VALUE = Box(370, 100, 170, "value pretraining", "gate: explained variance", GATE)
POLICY = Box(575, 60, 135, "policy", "PPO … VAPO, GRPO")
EVALUATION = Box(745, 60, 140, "evaluation", "gate: gain over SFT", GATE)
PUBLISHED = Box(745, 180, 140, "published", "model@champion", DATA)
BOXES = (DEMONSTRATIONS, PREFERENCES, PROMPTS, SFT, REWARD, VALUE, POLICY, EVALUATION, PUBLISHED)
ARROWS = (
    (DEMONSTRATIONS, SFT), (PREFERENCES, REWARD), (REWARD, VALUE), (SFT, VALUE), (VALUE, POLICY), (SFT, POLICY),
    (POLICY, EVALUATION),
)  # fmt: skip


def picture() -> str:
    """Return the picture as SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" role="img">',
        "<title>The pipeline of Vantage</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#475569"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        *(_arrow(start.right, end.left) for start, end in ARROWS),
        _arrow(PROMPTS.right, (VALUE.x + 85, VALUE.y + BOX_HEIGHT), enters_below=True),
        _arrow((EVALUATION.x + 70, EVALUATION.y + BOX_HEIGHT), (PUBLISHED.x + 70, PUBLISHED.y)),
        *(_box(box) for box in BOXES),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _arrow(start: tuple[int, int], end: tuple[int, int], *, enters_below: bool = False) -> str:
    (x1, y1), (x2, y2) = start, end
    bend = (x1 + x2) // 2
    if enters_below:
        way = f"M{x1} {y1}Q{x2} {y1} {x2} {y2}"
    elif x1 == x2:
        way = f"M{x1} {y1}L{x2} {y2}"
    else:
        way = f"M{x1} {y1}C{bend} {y1} {bend} {y2} {x2} {y2}"
    return f'<path d="{way}" fill="none" stroke="#475569" stroke-width="1.6" marker-end="url(#tip)"/>'


def _box(box: Box) -> str:
    middle = box.x + box.width / 2
    title_y = box.y + (24 if box.note else 32)
    note = (
        f'<text x="{middle}" y="{box.y + 42}" text-anchor="middle" font-size="12" fill="#334155">{escape(box.note)}</text>'
        if box.note
        else ""
    )
    return (
        f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{BOX_HEIGHT}" rx="8" fill="{box.fill}" stroke="#64748b"/>'
        f'<text x="{middle}" y="{title_y}" text-anchor="middle" font-size="15" font-weight="600" fill="#0f172a">{escape(box.title)}</text>{note}'
    )


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(picture(), encoding="utf-8")
