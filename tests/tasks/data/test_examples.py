"""Rows become ids if they fit, and margins, ranks and responses stay with their prompt."""

from pathlib import Path
from typing import Any

import pytest
import torch

from vantage.models.builtin import build_builtin
from vantage.models.folders import load_tokenizer
from vantage.schemas.recipe.inputs import Generation
from vantage.tasks.data import examples
from vantage.tasks.data.examples import (
    Codec,
    read_completions,
    read_prompts,
    read_rankings,
)
from vantage.tasks.data.rows import write_rows

TOO_LONG = "x" * 40


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    """Return a codec with one token a character; prompts begin with BOS and responses end in EOS."""
    folder = tmp_path_factory.mktemp("model")
    build_builtin("tiny", folder, seed=0)
    generation = Generation(max_prompt_tokens=20, max_response_tokens=6)
    return Codec(tokenizer=load_tokenizer(folder), generation=generation, chat=False)


def texts(codec: Codec, rows: torch.Tensor, mask: torch.Tensor) -> list[str]:
    return [
        codec.tokenizer.decode(row[kept], skip_special_tokens=True)
        for row, kept in zip(rows, mask, strict=True)
    ]


def pair(prompt: str, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": "yes", "rejected": "no", **more}


def test_a_codec_for_another_thread_has_a_tokenizer_of_its_own(codec: Codec) -> None:
    """A tokenizer remembers how special tokens are read: a call of another thread would change it for this one."""
    apart = codec.apart
    text = f"a{codec.tokenizer.eos_token}b"
    plain = codec.tokenizer(text, split_special_tokens=True)["input_ids"]
    assert apart.tokenizer(text, split_special_tokens=False)["input_ids"] != plain
    assert codec.tokenizer._tokenizer.encode_special_tokens
    assert codec.apart is apart, "it is made once"
    rows = [codec.tokenizer(each, add_special_tokens=False)["input_ids"] for each in ("12 + 3", " 数", "")]
    rows[0].append(codec.tokenizer.eos_token_id)
    assert apart.response_texts(rows) == codec.response_texts(rows)
    assert (apart.generation, apart.chat, apart.scratch) == (codec.generation, codec.chat, codec.scratch)


def test_margins_stay_with_their_pairs_where_a_long_prompt_is_left_out(codec: Codec, tmp_path: Path) -> None:
    rows = [
        pair("a", margin=1.5),
        pair(TOO_LONG, margin=9.0),
        pair("b", margin=None),
        pair("c", margin=0.25),
    ]
    write_rows(tmp_path, "train", rows)
    pairs = read_completions(tmp_path, "train", ("chosen", "rejected"), codec)
    assert list(pairs.margins or ()) == [1.5, 0.0, 0.25]
    assert (len(pairs), pairs.num_too_long) == (3, 1)


def test_pairs_without_a_margin_column_have_no_margins(codec: Codec, tmp_path: Path) -> None:
    write_rows(tmp_path, "train", [pair("a")])
    assert read_completions(tmp_path, "train", ("chosen", "rejected"), codec).margins is None


def test_when_there_are_enough_usable_rows_the_rest_of_the_file_is_not_read(
    codec: Codec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examples, "_ROWS_AT_ONCE", 2)
    prompts = ["a", TOO_LONG, "b", "c", "d", "e", "f"]
    write_rows(tmp_path, "train", [pair(prompt) for prompt in prompts])
    whole = read_completions(tmp_path, "train", ["chosen"], codec)
    assert (len(whole), whole.num_too_long) == (6, 1)
    for enough, are_read in ((1, 1), (2, 3), (3, 3), (6, 6), (7, 6)):
        found = read_completions(tmp_path, "train", ["chosen"], codec, enough=enough)
        assert list(found.prompt_ids) == list(whole.prompt_ids)[:are_read]


def test_answers_stay_with_their_prompts_where_a_long_one_is_left_out(codec: Codec, tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "answer": "1"},
        {"prompt": TOO_LONG, "answer": "2"},
        {"prompt": "b", "answer": None},
        {"prompt": "c", "answer": "4"},
    ]
    write_rows(tmp_path, "train", rows)
    prompts = read_prompts(tmp_path, "train", codec)
    assert (list(prompts.texts), list(prompts.answers)) == (["a", "b", "c"], ["1", None, "4"])
    write_rows(tmp_path, "test", [{"prompt": "a"}, {"prompt": "b"}])
    assert list(read_prompts(tmp_path, "test", codec).answers) == [None, None]


def test_a_prompt_of_just_the_limit_stays(codec: Codec, tmp_path: Path) -> None:
    """With ``<s>`` before it, a prompt of 19 characters has 20 tokens."""
    write_rows(tmp_path, "train", [{"prompt": "x" * 19}, {"prompt": "x" * 20}])
    prompts = read_prompts(tmp_path, "train", codec)
    assert ([len(ids) for ids in prompts.ids], prompts.num_too_long) == ([20], 1)


RANKINGS = [
    {"prompt": "p", "responses": ["aa", "b", "ccc"], "ranks": [2.5, -1.0, 2.5]},
    {"prompt": TOO_LONG, "responses": ["x", "y"], "ranks": [1.0, 2.0]},
    {"prompt": "qq", "responses": ["dddddddd", "e"], "ranks": [0.30000000000000004, 0.3]},
]


def test_completions_of_a_prompt_stand_side_by_side_with_their_ranks(codec: Codec, tmp_path: Path) -> None:
    write_rows(tmp_path, "train", RANKINGS)
    rankings = read_rankings(tmp_path, "train", codec)
    assert (len(rankings), rankings.num_too_long) == (2, 1)
    batch = rankings.batch([1, 0])
    # The long response is cut off after six tokens, without EOS
    assert texts(codec, batch.sequences.input_ids, batch.sequences.attention_mask) == [
        "qqdddddd", "qqe", "paa", "pb", "pccc",
    ]  # fmt: skip
    assert texts(codec, batch.sequences.response_ids, batch.sequences.response_mask) == [
        "dddddd", "e", "aa", "b", "ccc",
    ]  # fmt: skip
    assert batch.group_ids.tolist() == [0, 0, 1, 1, 1]
    # Ranks that a float32 could not tell apart still are
    assert batch.ranks.tolist() == [1, 0, 1, 0, 1]
    assert [part.tolist() for part in rankings.ranks_of([1, 0])] == [
        batch.ranks.tolist(),
        batch.group_ids.tolist(),
    ]


def test_a_ranking_is_as_long_as_its_longest_completion(codec: Codec, tmp_path: Path) -> None:
    write_rows(tmp_path, "train", RANKINGS)
    # BOS + p + ccc + EOS, and BOS + qq + six tokens
    assert list(read_rankings(tmp_path, "train", codec).lengths()) == [6, 9]


def test_rows_become_the_same_ids_in_batches_of_any_size(
    codec: Codec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path, "train", RANKINGS)
    whole, prompts = read_rankings(tmp_path, "train", codec), read_prompts(tmp_path, "train", codec)
    monkeypatch.setattr(examples, "_ROWS_AT_ONCE", 1)
    again, one_by_one = read_rankings(tmp_path, "train", codec), read_prompts(tmp_path, "train", codec)
    for one, other in ((whole.prompt_ids, again.prompt_ids), (whole.ranks, again.ranks)):
        assert list(one) == list(other)
    assert list(whole.response_ids) == list(again.response_ids)
    assert (whole.counts, whole.num_too_long) == (again.counts, again.num_too_long)
    assert (list(prompts.texts), list(prompts.ids), prompts.counts) == (
        list(one_by_one.texts),
        list(one_by_one.ids),
        one_by_one.counts,
    )
