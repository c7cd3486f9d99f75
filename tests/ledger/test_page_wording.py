"""The wording of the pages of runs and stages has a number: an audit holds a page of its own number to its own sentences.

Where this test fails, the text of a page has changed. Raise the number of ``PAGES`` in ``vantage/ledger/notes.py``, and write
the sum of the new text below. Then pages that were written before are not taken for forged ones.
"""

import hashlib
from dataclasses import replace

from tests.ledger.test_card_wording import rich  # noqa: F401
from tests.ledger.test_model_card import run  # noqa: F401
from vantage.ledger.entries import RunEntry
from vantage.ledger.model_card import written_by
from vantage.ledger.notes import PAGES, run_links, run_note, stage_note
from vantage.ledger.page_links import Link, artifact_key

SUMS = {1: "b332980d3e716f11fc16839e7a425d2cd70ffc712d5dc64751ffc76eed6f9528"}
"""Number → sha256 of the texts below."""


def texts(entry: RunEntry) -> list[str]:
    """Return pages of stages that were made, reused or failed, and of runs with and without report and publication."""
    policy = entry.stages["policy"]
    assert policy.artifact is not None
    links = {artifact_key(policy.artifact): Link(run="#/run", run_name="policy of run 0001", model="#/model")}
    reused = replace(policy, outcome="reused")
    failed = replace(policy, outcome="failed", artifact=None, reason="out of memory")
    pages = {"policy": "#/policy", "evaluation": "#/evaluation"}
    ended = replace(entry, conclusion="better", report="report.html", published={"r": "champion", "s": None})
    other = run_links(ended, all_runs="#/all", run_page="#/run", refused={"s"})
    return [
        *(stage_note(entry, name, "#/all", links, pages) for name in entry.stages),
        *(
            stage_note(replace(entry, stages=entry.stages | {"policy": each}), "policy", "", {}, {})
            for each in (reused, failed)
        ),
        stage_note(replace(entry, stages=entry.stages | {"policy": reused}), "policy", "#/all", links, {}),
        run_note(entry, pages, links),
        run_note(replace(ended, stages=entry.stages | {"policy": reused}), pages, links, other),
    ]


def test_the_wording_is_that_of_its_number(rich: RunEntry) -> None:  # noqa: F811
    whole = "\n".join(text.replace(written_by(PAGES), "") for text in texts(rich))
    for words in ("Loosened gate", "approved by ada", "bill of materials", "Reused:", "out of memory"):
        assert words in whole
    assert SUMS[PAGES.number] == hashlib.sha256(whole.encode()).hexdigest(), __doc__


def test_every_page_names_its_wording(rich: RunEntry) -> None:  # noqa: F811
    assert [text.count(written_by(PAGES)) for text in texts(rich)] == [1] * len(texts(rich))
