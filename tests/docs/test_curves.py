"""The page about reading curves shows numbers of the runs that it draws."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorial" / "curves.md").read_text(encoding="utf-8")


def curves() -> dict[tuple[str, str], list[float]]:
    """Return (trial, metric) → values by iteration, as the picture has them."""
    spec = importlib.util.spec_from_file_location("curves", ROOT / "docs" / "tutorial" / "curves.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {key: [value for _, value in sorted(points)] for key, points in module.read().items()}


def test_the_numbers_of_the_page_are_those_of_the_runs() -> None:
    found = curves()
    kl = [found[trial, "kl_to_reference"] for trial in ("vapo", "length", "rate_x100")]
    ends = f"ends at {kl[0][-1]:.1f} nats per response, the reward for length at {kl[1][-1]:.0f}"
    assert f"{ends}, the large rate at {kl[2][-1]:.0f} after {max(kl[2]):.0f}" in PAGE
    healthy, hacked = (found[trial, "validation_watch_score"] for trial in ("vapo", "length"))
    assert f"rise from {healthy[0]:.2f} to {healthy[-1]:.2f} in the healthy run" in PAGE
    assert f"fall from {hacked[0]:.2f} to {hacked[-1]:.2f}" in PAGE
    explained = found["vapo", "explained_variance"]
    assert f"between {min(explained):.2f} and {max(explained):.2f}" in PAGE
    nll = found["vapo", "reference_nll"]
    assert f"{min(nll):.2f} to {max(nll):.2f} nats per token in the healthy run" in PAGE
