"""Rows and lengths of datasets equal those of files that are counted by hand."""

import gzip
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from vantage.estimates.token_counts import DataCount, Lengths, count_data, mixed, token_counter
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.recipe.inputs import HeldOutRows, Mixture, Split
from vantage.schemas.recipe.recipe import Recipe
from vantage.tasks.data import arithmetic

RECIPE = """\
recipe: small
model: {source: "builtin:tiny"}
generation: {max_prompt_tokens: 20, max_response_tokens: 8}
data:
  demos: {source: "%s", split: {validation: 0.25, test: 0.25}%s}
stages:
  sft: {kind: sft, data: demos, learning_rate: 1.0e-3}
"""


def counted(source: str, more: str = "") -> DataCount:
    recipe: Recipe = parse_recipe(RECIPE % (source, more), needs_files=False)
    count, name = token_counter(None, is_character_model=True)
    return count_data(recipe, "demos", count, counted_by=name)


def rows(number: int) -> list[dict[str, str]]:
    return [{"prompt": "p" * (1 + i % 4), "response": "r" * (2 + i % 3)} for i in range(number)]


def test_the_expected_longest_is_that_of_every_draw() -> None:
    lengths = Lengths((1, 4, 9))
    for count in (1, 2, 3):
        draws = itertools.product(lengths.tokens, repeat=count)
        assert lengths.longest_of(count) == pytest.approx(mean(map(max, draws)))


def test_rows_and_tokens_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(120)))
    found = counted(str(path))
    assert (found.train, found.validation, found.test) == (60, 30, 30)
    assert found.prompt.mean == mean(1 + i % 4 for i in range(120)) + 1, "a token begins each prompt"
    [response] = found.responses
    assert response.mean == mean(2 + i % 3 for i in range(120)) + 1, "a token ends each response"
    assert found.whole.longest == 4 + 4 + 2
    assert found.basis == "120 rows of rows.jsonl, the first 120 measured, tokens counted one per character"


def test_all_rows_of_a_test_set_are_test_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(120)))
    recipe = parse_recipe(RECIPE % (path, ""), needs_files=False)
    data = recipe.data["demos"].model_copy(update={"split": Split(test="all")})
    recipe = recipe.model_copy(update={"data": {"demos": data}})
    count, name = token_counter(None, is_character_model=True)
    found = count_data(recipe, "demos", count, counted_by=name)
    assert (found.train, found.validation, found.test) == (0, 0, 120)


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".parquet", ".csv", ".json"])
@pytest.mark.parametrize("counted_bytes", [0, 2**24])
def test_rows_of_a_file_are_counted_or_reckoned(
    tmp_path: Path, ending: str, counted_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vantage.estimates.token_counts.COUNTED_BYTES", counted_bytes)
    path, many = tmp_path / f"rows{ending}", rows(3000)
    text = "".join(json.dumps(row) + "\n" for row in many)
    if ending == ".parquet":
        pq.write_table(pa.Table.from_pylist(many), path)
    elif ending == ".csv":
        path.write_text("prompt,response\n" + "".join(f"{row['prompt']},{row['response']}\n" for row in many))
    elif ending == ".json":
        path.write_text(json.dumps(many))
    else:
        path.write_bytes(gzip.compress(text.encode()) if ending.endswith("gz") else text.encode())
    is_exact = counted_bytes or ending in (".parquet", ".jsonl.gz")
    assert counted(str(path)).train == pytest.approx(1500, rel=0.0 if is_exact else 0.05)


def test_prompts_that_are_too_long_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    long = {"prompt": "p" * 40, "response": "r" * 40}
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows(60), *([long] * 40)]))
    found = counted(str(path))
    assert found.train == 30
    assert found.prompt.longest == 5


def test_responses_are_cut_at_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "p", "response": "r" * 40}) + "\n" for _ in range(9)))
    assert counted(str(path)).responses[0].tokens == (8,) * 9


def test_a_file_that_is_not_here_is_as_long_as_the_limits() -> None:
    found = counted("elsewhere.jsonl", ", rows: 500")
    assert (found.train, found.prompt.mean, found.responses[0].mean) == (500, 20, 8)
    assert "elsewhere.jsonl is not here: 500 rows as the recipe says" in found.basis


def test_a_file_that_is_not_here_needs_its_number_of_rows() -> None:
    with pytest.raises(ValueError, match=r"say how many there are with --set data\.demos\.rows=N"):
        counted("elsewhere.jsonl")


def test_the_models_own_tokenizer_counts(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    count, name = token_counter(tmp_path, is_character_model=False)
    assert (count("a b b"), name) == (3, "by the model's tokenizer")


def test_without_a_tokenizer_four_bytes_are_one_token(tmp_path: Path) -> None:
    count, name = token_counter(tmp_path, is_character_model=False)
    assert ([count(text) for text in ("", "abcd", "abcde", "äöü")], name) == ([0, 1, 2, 2], "one per 4 bytes")


def count_of(train: int, held_out: int, prompt: int, response: int) -> DataCount:
    prompts, responses = Lengths((prompt,) * 10), Lengths((response,) * 10)
    return DataCount(
        train=train,
        validation=held_out,
        test=held_out,
        prompt=prompts,
        responses=(responses,),
        whole=Lengths((prompt + response,) * 10),
        responses_per_row=1.0,
        basis=f"{train} rows",
    )


def test_built_in_rows_are_drawn_once_for_all_datasets_with_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw, drawn = arithmetic.demonstrations, []

    def counting(**options: Any) -> Iterator[dict[str, Any]]:
        drawn.append(options["count"])
        return draw(**options)

    monkeypatch.setattr(arithmetic, "demonstrations", counting)
    first, again = (counted("builtin:arithmetic/demonstrations", ", rows: 37") for _ in range(2))
    assert first == again
    assert counted("builtin:arithmetic/demonstrations", ", rows: 38") != first
    assert drawn == [37, 38]


def test_a_mixture_has_the_rows_and_lengths_of_its_parts_in_their_shares() -> None:
    parts = [count_of(800, 50, 10, 100), count_of(100, 40, 20, 300)]
    found = mixed(Mixture(parts={"a": 7, "b": 3}), parts, "demonstrations")
    # 0.3 of 334 is 100 to a row, which is all of b; 0.7 of 72 is 50, which is all of a's held-out rows
    assert (found.train, found.validation, found.test) == (334, 72, 72)
    assert found.prompt.mean == pytest.approx(0.7 * 10 + 0.3 * 20)
    assert found.responses[0].mean == pytest.approx(0.7 * 100 + 0.3 * 300)
    assert (found.whole.tokens[0], found.whole.longest) == (110, 320)
    assert found.basis == "a mixture of 800 rows; 100 rows"
    asked = Mixture(parts={"a": 7, "b": 3}, rows=5_000, split=HeldOutRows(test=10))
    found = mixed(asked, parts, "demonstrations")
    assert (found.train, found.validation, found.test) == (5_000, 72, 10)
