"""The annex for the EU AI Act's Annex XI has the facts of the record, and calls everything else unknown."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.review.reports.samples import report
from vantage.review.reports.annex_facts import _architecture, _parameters
from vantage.review.reports.annex_section import annex_section
from vantage.review.reports.annex_xi import ModelFacts, Question, annex_xi
from vantage.review.reports.gathered import Report
from vantage.review.reports.page import report_page

POINTS = [
    *(f"Section 1, 1 ({letter})" for letter in "abcdef"),
    *(f"Section 1, 2 ({letter})" for letter in "abcde"),
    *(f"Section 2, {number}" for number in (1, 2, 3)),
]
"""The points of the annex as it was published."""
EMPTY = Report("0001-x-aaaaaa", "x", "x.yaml", (), "failed", "2026-01-01 00:00:00", 1, ())


def points(found: tuple[Question, ...]) -> dict[str, Question]:
    return {each.point: each for each in found}


def test_every_point_is_there_in_its_order() -> None:
    assert [each.point for each in annex_xi(report(2), ModelFacts())] == POINTS


def test_an_empty_record_answers_nothing() -> None:
    found = annex_xi(EMPTY, ModelFacts())
    assert [each.point for each in found if each.facts] == []
    assert all(each.unknown for each in found)
    assert annex_section(found).count('class="unknown"') == sum(len(each.unknown) for each in found)


def test_facts_name_their_place() -> None:
    model = ModelFacts("LlamaForCausalLM: layers 4", 472_704, "apache-2.0 (policy)", 48, 72, ("Registered",))
    found = points(annex_xi(report(2), model))
    assert found["Section 1, 1 (d)"].unknown == () and found["Section 1, 1 (f)"].unknown == ()
    assert [each.text for each in found["Section 1, 1 (d)"].facts] == [
        "Architecture: LlamaForCausalLM: layers 4",
        "Values in the weight files: 472,704",
    ]
    [policy_is_better, *_] = found["Section 2, 1"].facts
    assert policy_is_better.source == "run.json, evaluations"
    assert "95 % interval 0.25 to 0.35" in policy_is_better.text


def test_energy_of_some_attempts_leaves_the_rest_unknown() -> None:
    """One of a step's two attempts measured 7,200 J of GPUs (2 Wh), and the attempt at another step 90 J of the CPU."""
    energy = points(annex_xi(report(2), ModelFacts()))["Section 1, 2 (e)"]
    assert [each.text for each in energy.facts] == ["GPUs: 2 Wh", "Processor: at most 90 J"]
    assert energy.facts[0].source == "ledger, counters of the machine in 2 of 3 attempts"
    assert energy.unknown == ("the energy of what was not measured",)
    none = points(annex_xi(replace(report(2), costs=()), ModelFacts()))["Section 1, 2 (e)"]
    assert none.facts == () and none.unknown == ("the energy",)


def test_parameters_are_counted_from_headers(tmp_path: Path) -> None:
    """One file has 3 × 4 and 5 values and another has 7, together 24."""
    save_file({"a": np.zeros((3, 4), np.float32), "b": np.zeros(5, np.float16)}, tmp_path / "one.safetensors")
    save_file({"c": np.zeros(7, np.float32)}, tmp_path / "two.safetensors", metadata={"format": "pt"})
    assert _parameters(tmp_path) == 24
    (tmp_path / "three.safetensors").write_bytes(b"\xff" * 40)
    assert _parameters(tmp_path) is None, "a damaged file makes the sum unknown"
    deep = b"[" * 100_000
    (tmp_path / "three.safetensors").write_bytes(len(deep).to_bytes(8, "little") + deep)
    assert _parameters(tmp_path) is None
    assert _parameters(None) is None


def test_an_architecture_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    assert _architecture(tmp_path) is None and _architecture(None) is None
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert _architecture(tmp_path) == "LlamaForCausalLM: layers 4, vocabulary 100"
    for damaged in ("[1]", "3", "[" * 100_000):
        (tmp_path / "config.json").write_text(damaged)
        assert _architecture(tmp_path) is None


def test_the_page_ends_with_it_and_escapes_it() -> None:
    attack = "<script>alert(1)</script>"
    page = report_page(
        EMPTY, annex=annex_xi(EMPTY, ModelFacts(attack, 1, attack, 1, 1, (attack,), (attack,), (attack,)))
    )
    assert "<script" not in page and page.count("&lt;script&gt;") == 5
    assert [*re.findall('<h2 id="([a-z]+)"', page)][-1] == "annex"
    assert "annex" not in report_page(EMPTY)
