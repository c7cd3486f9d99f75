"""Near-duplicates are those of every pair's exact similarity, in several scripts, and in a dataset from file to report."""

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tasks.test_prepare_odd_files import lines, prepare
from vantage.schemas.recipe.inputs import NearDuplicates
from vantage.tasks.data.near_duplicates import NearDuplicate, banding, jaccard, near_duplicates, shingles
from vantage.tasks.data.rows import read_rows
from vantage.tasks.data.splits import TEST, TRAIN, VALIDATION
from vantage.tasks.prepare_data import UnusableData

LETTERS = {
    "latin": "abcdefghijklmnop qrstuvwxyz",
    "chinese": "的一是不了人我在有他这中大来上国个到说们为子和你地出道也时年得就那要下以生会自着去之过家学对可她里后",
    "arabic": "ابتثجحخدذرزسشصضطظعغفقكلمنهوي ",
}


def texts_of(letters: str, number: int, *, seed: int) -> list[str]:
    """Return texts of which many are others with a few characters changed."""
    draw = random.Random(seed)
    texts: list[str] = []
    for _ in range(number):
        text = list(
            draw.choice(texts)
            if texts and draw.random() < 0.7
            else draw.choices(letters, k=draw.randint(2, 90))
        )
        for _ in range(draw.choice([0, 1, 1, 2, 4, 9])):
            text[draw.randrange(len(text))] = draw.choice(letters)
        texts.append("".join(text))
    return texts


def by_every_pair(texts: list[str], sides: list[str | None], similarity: float) -> set[int]:
    """Return the training rows near a held-out one, by comparing the sets of character triples of every pair."""

    def triples(text: str) -> frozenset[str]:
        plain = " ".join(text.lower().split())
        return frozenset(map("".join, zip(plain, plain[1:], plain[2:], strict=False))) or frozenset([plain])

    sets = [triples(text) for text in texts]
    held_out = [each for each, side in zip(sets, sides, strict=True) if side in (TEST, VALIDATION)]
    return {
        row
        for row, (one, side) in enumerate(zip(sets, sides, strict=True))
        if side == TRAIN
        and any(len(one & two) >= similarity * (len(one) + len(two) - len(one & two)) for two in held_out)
    }


@pytest.mark.parametrize("letters", LETTERS)
@pytest.mark.parametrize("similarity", [0.6, 0.8, 0.9])
def test_they_are_those_of_every_pair(letters: str, similarity: float) -> None:
    """The near-duplicates found are those of comparing every pair."""
    texts = texts_of(LETTERS[letters], 600, seed=5)
    draw = random.Random(1)
    sides = [draw.choice([TRAIN, TRAIN, TRAIN, VALIDATION, TEST, None]) for _ in texts]
    found = list(near_duplicates(lambda: texts, sides, similarity=similarity))
    rows = {pair.row for pair in found}
    wanted = by_every_pair(texts, sides, similarity)
    assert len(rows) == len(found) and 20 < len(wanted) < len(texts) / 2
    assert rows <= wanted, "each is confirmed by its exact similarity"
    assert len(wanted - rows) <= 0.02 * len(wanted)
    for pair in found:
        assert sides[pair.row] == TRAIN and sides[pair.held_out_row] in (TEST, VALIDATION)
        assert (pair.prompt, pair.held_out) == (texts[pair.row][:200], texts[pair.held_out_row][:200])
        assert pair.similarity >= similarity


def test_similarity_by_hand() -> None:
    """Jaccard similarities equal those worked out in the comments."""
    assert (
        shingles("ABCd") == {"abc", "bcd"} and shingles("你好") == {"你好"} and shingles("a \n b") == {"a b"}
    )
    # {abc, bcd, cde} and {abc, bcd, cdx}: two of four
    assert jaccard("abcde", "abcdx") == 0.5
    # a space separates the equal parts
    assert jaccard("今天天气很好", "今天 天气很好") == pytest.approx(2 / 7)
    assert jaccard("a+2:345", "a+3:345") == 2 / 8


def test_bands_find_what_is_asked_for() -> None:
    for similarity in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0):
        bands, rows = banding(similarity)
        assert bands * rows <= 256 and 1 - (1 - similarity**rows) ** bands >= 0.99


def test_held_out_rows_of_other_datasets_are_counted_in_each_of_them() -> None:
    texts = ["the sky is blue and wide", "unlike any other"]
    elsewhere = [
        ("first", "nothing of the kind"),
        ("second", "the sky is blue and wild"),
        ("first", "the sky is blue and wide"),
    ]
    [found] = near_duplicates(lambda: texts, [TRAIN, TRAIN], similarity=0.9, elsewhere=elsewhere)
    assert (found.row, found.held_out_of, found.held_out_row, found.similarity) == (0, "first", 1, 1.0)


def test_no_held_out_row_and_no_near_one() -> None:
    assert list(near_duplicates(lambda: ["a", "b"], [TRAIN, TRAIN], similarity=0.8)) == []
    assert list(near_duplicates(lambda: ["abcdef", "uvwxyz"], [TRAIN, TEST], similarity=0.8)) == []
    pairs = list(near_duplicates(lambda: ["Say it", "say  IT", "x"], [TRAIN, TEST, None], similarity=1.0))
    assert pairs == [NearDuplicate(0, 1, 1.0, "Say it", "say  IT")]


@pytest.mark.slow
def test_the_same_rows_in_every_process(tmp_path: Path) -> None:
    code = (
        "from tests.tasks.data.test_near_duplicates import *\n"
        "texts = texts_of(LETTERS['chinese'], 300, seed=2)\n"
        "sides = [TEST if i % 3 == 0 else TRAIN for i in range(300)]\n"
        "print([(p.row, p.held_out_row) for p in near_duplicates(lambda: texts, sides, similarity=0.7)])"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True, text=True, check=True, timeout=120,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(told) == 1 and len(told.pop()) > 50


def questions(number: int) -> list[dict[str, Any]]:
    """Return for every question three that differ in a character or two."""
    texts = texts_of(LETTERS["chinese"], number, seed=8)
    draw = random.Random(3)
    whole = ["".join(draw.choices(LETTERS["chinese"], k=60)) for _ in texts]
    return [{"prompt": text + end, "answer": end} for text in whole for end in ("甲", "乙", "丙")]


def test_a_dataset_without_near_duplicates_of_its_held_out_prompts(tmp_path: Path) -> None:
    rows = questions(80)
    source = lines(tmp_path / "rows.jsonl", rows)
    plain, before, _ = prepare(tmp_path / "plain", source)
    assert "near_duplicate_rows" not in plain.metrics and len(before) == 240
    asked = NearDuplicates(similarity=0.8, max_dropped=0.9)
    result, _, report = prepare(tmp_path / "asked", source, near_duplicates=asked)
    output = tmp_path / "asked" / "output"
    held_out = [row["prompt"] for side in (TEST, VALIDATION) for row in read_rows(output, side)]
    train = [row["prompt"] for row in read_rows(output, TRAIN)]
    assert not [text for text in train for other in held_out if jaccard(text, other) >= 0.8]
    dropped = plain.metrics["train_rows"] - result.metrics["train_rows"]  # type: ignore[operator]
    assert dropped == result.metrics["near_duplicate_rows"] == report["near_duplicates"] > 20
    assert result.metrics["test_rows"] == plain.metrics["test_rows"]
    [first, *_] = report["first_near_duplicates"]
    assert first["prompt"][:-1] == first["held_out"][:-1] and first["similarity"] > 0.9
    assert first["held_out"] in held_out and len(report["first_near_duplicates"]) == 10


def test_too_many_are_refused_with_what_to_do(tmp_path: Path) -> None:
    source = lines(tmp_path / "rows.jsonl", questions(80))
    said = (
        r"(?s)rows for training have a prompt that is nearly a held-out one, more than near_duplicates.max_dropped=0.1 "
        r"allows\. Where prompts share a long template, raise near_duplicates\.similarity=0\.8.* is nearly "
    )
    with pytest.raises(UnusableData, match=said):
        prepare(tmp_path / "asked", source, near_duplicates=NearDuplicates())
