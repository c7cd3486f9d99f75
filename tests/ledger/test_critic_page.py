"""The page about critics is whole, safe, the same each time, and has every number of the diagnosis that has a table."""

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from tests.schemas.critic_samples import critic, diagnosis, estimated, of_slice
from vantage.ledger.critic_page.diagnosis_plots import diagnosis_plots
from vantage.ledger.critic_page.page import critic_page
from vantage.ledger.critic_page.tables import diagnosis_tables, drift_table
from vantage.schemas.records.critic_diagnosis import CriticDrift, DiagnosedAdvantages, DriftPoint

VOID = {"meta", "path", "rect", "use", "circle", "line"}


class Page(HTMLParser):
    """Tags, texts and references of a page, whose tags must be closed in the right order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.references: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [
            value or "" for name, value in attributes if name in ("src", "href", "xlink:href")
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [
            value or "" for name, value in attributes if name in ("src", "href", "xlink:href")
        ]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


DRIFT = CriticDrift(
    step="policy",
    points=tuple(
        DriftPoint(
            iteration=each,
            explained_variance=0.5 - each / 10,
            critic_weight=1.0,
            value_bias=0.1,
            value_loss=2.0,
        )
        for each in range(1, 9)
    ),
    is_switched=True,
)


@pytest.fixture(scope="module")
def text() -> str:
    return critic_page("Critics of run 0001-a-000000", [critic()], [DRIFT])


def test_the_page_is_whole_and_needs_no_other_file(text: str) -> None:
    page = Page(text)
    assert page.tags.count("svg") == 7 + 4
    assert all(reference.startswith("#") for reference in page.references)
    assert "script" not in page.tags and "@import" not in text and "url(http" not in text
    ids = re.findall(r'<(?:path|clipPath)[^>]* id="([^"]+)"', text)
    for used in re.findall(r'xlink:href="#([^"]+)"', text):
        assert used in ids


def test_what_to_do_comes_before_plots_and_tables(text: str) -> None:
    assert text.index("Use it: it explains 0.60") < text.index("<svg") < text.index("<table>")
    assert text.index("Explained variance ends at") > text.index("policy: the critic during")


def test_the_same_critics_give_the_same_page(text: str) -> None:
    assert critic_page("Critics of run 0001-a-000000", [critic()], [DRIFT]) == text


@pytest.mark.slow
def test_a_prompt_is_text_and_a_secret_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary-0123456789")
    [worst] = diagnosis().worst_prompts
    nasty = worst.model_copy(update={"prompt": "<script>alert(1)</script> canary-0123456789 \x1b[2J"})
    page = critic_page("run <i>", [critic(worst_prompts=(nasty,))])
    assert "script" not in Page(page).tags and "i" not in Page(page).tags
    assert "canary" not in page and "\x1b" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_light_and_dark_have_their_own_text_colour(text: str) -> None:
    assert "currentColor" in text and "#010203" not in text
    assert "color-scheme: light dark" in text


def cells_of(title: str, **changes: Any) -> tuple[tuple[str, ...], ...]:
    [rows] = [table.rows for table in diagnosis_tables(diagnosis(**changes)) if table.title == title]
    return rows


def test_tables_by_hand() -> None:
    """The tables of a diagnosis contain numbers that were worked out by hand."""
    whole = cells_of("Explained variance")
    assert whole[0] == ("all tokens", "0.60", "0.58 to 0.62", "100")
    assert cells_of("Baselines on the same responses")[2] == (
        "mean of the other responses to the prompt",
        "2.00",
        "1.98 to 2.02",
        "50 %",
    )
    assert cells_of("By length of the response")[1] == (
        "64 to 127 tokens",
        "0.30",
        "0.28 to 0.32",
        "0",
        "40 %",
    )
    assert cells_of("Calibration")[1] == ("1.00", "1.20", "-0.200", "-0.220 to -0.180", "500")
    assert cells_of("Order of responses to one prompt")[1] == ("half-way", "0.40", "0.34 to 0.43", "400")
    assert cells_of("Prompts with the largest error")[0] == ("3 a+4? <b>", "4", "1.00", "-2.00", "25.0 %")


@pytest.mark.slow
def test_what_was_not_measured_has_no_table_and_no_plot() -> None:
    alone = diagnosis(within_prompts=None, by_difficulty=(), orderings=(), worst_prompts=())
    titles = [table.title for table in diagnosis_tables(alone)]
    assert not {"By difficulty", "Order of responses to one prompt", "Prompts with the largest error"} & {
        *titles
    }
    assert len(diagnosis_plots(alone)) == 5


def test_undefined_numbers_are_dashes_and_draw_nothing() -> None:
    nothing = DiagnosedAdvantages(
        critic=estimated(1.0), batch_mean=estimated(0.0), others_mean=None, ratio=None
    )
    changes: dict[str, Any] = {
        "explained_variance": estimated(None, None),
        "by_tenth": (of_slice("1", None),),
        "advantages": nothing,
    }
    assert cells_of("Explained variance", **changes)[0][1:3] == ("–", "–")
    assert cells_of("Baselines on the same responses", **changes)[0][3] == "–"
    assert len(diagnosis_plots(diagnosis(**changes))) == 7


def test_a_long_course_is_thinned_and_keeps_its_ends() -> None:
    points = tuple(DriftPoint(iteration=each, explained_variance=0.5) for each in range(1, 1001))
    rows = drift_table(CriticDrift(step="policy", points=points, is_switched=False)).rows
    assert len(rows) == 24
    assert (rows[0][0], rows[-1][0]) == ("1", "1000")
    assert rows[0] == ("1", "0.50", "–", "–")


def test_the_critics_weight_is_shown_where_there_is_a_switch() -> None:
    assert drift_table(DRIFT).rows[0] == ("1", "0.40", "1.00", "0.100", "2.00")
