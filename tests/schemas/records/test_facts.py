"""Each fact of an attempt has its reader, and the documentation is printed from the rows."""

import re

import pytest

from tests.support.packages import ROOT
from vantage.attempts import facts as reading
from vantage.attempts.facts import READERS, read_facts
from vantage.schemas.records.facts import FACTS, TAG, docs_table, fact_tags


def test_every_fact_has_a_reader_and_a_sentence() -> None:
    names = [fact.name for fact in FACTS]
    assert set(READERS) == set(names) and len(set(names)) == len(names)
    assert all(fact.meaning.endswith(".") and fact.heading for fact in FACTS)


def test_the_load_is_that_of_the_last_minute_beside_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading.os, "getloadavg", lambda: (3.25, 9.0, 9.0))
    monkeypatch.setattr(reading.os, "cpu_count", lambda: 16)
    assert read_facts()["load"] == "3.2 of 16 CPUs"
    assert fact_tags({"load": "3.2 of 16 CPUs"}) == {"vantage.fact.load": "3.2 of 16 CPUs"}


def test_a_machine_that_does_not_know_a_fact_leaves_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> tuple[float, float, float]:
        raise OSError("the load average cannot be read")

    monkeypatch.setattr(reading.os, "getloadavg", unknown)
    assert "load" not in read_facts()


def test_the_documentation_has_the_table() -> None:
    page = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    assert docs_table() in page, "docs/report.md is old; put in vantage.schemas.records.facts.docs_table()"
    assert len(re.findall(re.escape(f"`{TAG}"), page)) == len(FACTS)
