"""Rows and tokens of the data that a network never sees are counted, and pairs that a cut makes equal are not trained on."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from vantage.models.builtin import build_builtin
from vantage.models.folders import load_tokenizer
from vantage.schemas.recipe.inputs import Generation, Model
from vantage.schemas.recipe.work import ImportModel
from vantage.schemas.records.job import StageJob
from vantage.tasks.data.encoding_counts import (
    EncodingCounts,
    TokenCounts,
    TooManyLeftOut,
    comparison_metrics,
    count_tokens,
    encoding_metrics,
)
from vantage.tasks.data.examples import (
    Codec,
    NothingLeft,
    read_completions,
    read_prompts,
    read_rankings,
)
from vantage.tasks.data.rows import write_rows

SIDES = ("chosen", "rejected")


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    """Return a codec with one token a character; prompts begin with BOS and responses end in EOS. Only ASCII is known."""
    folder = tmp_path_factory.mktemp("model")
    build_builtin("tiny", folder, seed=0)
    generation = Generation(max_prompt_tokens=8, max_response_tokens=4)
    return Codec(tokenizer=load_tokenizer(folder), generation=generation, chat=False)


def job_with(codec: Codec, folder: Path, **max_dropped: float) -> StageJob:
    return StageJob(
        run_id="0001-test",
        name="reward",
        attempt=1,
        stage_key="0" * 64,
        seed=0,
        work=ImportModel(model=Model(source="builtin:tiny")),
        generation=codec.generation,
        max_dropped=max_dropped,
        scratch=folder,
        output=folder,
    )


def pair(prompt: str, chosen: str, rejected: str) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


PAIRS = [
    pair("a", "yes", "no"),  # 3 + EOS, 2 + EOS
    pair("b", "yesterday", "yes"),  # cut to "yest", and 3 + EOS
    pair("c", "yesterday", "yesteryear"),  # alike after the cut
    pair("d", "same!", "same?"),  # alike after the cut
    pair("far too long a prompt", "x", "y"),
]


def test_pairs_that_are_the_same_after_the_cut_are_left_out_and_counted(codec: Codec, tmp_path: Path) -> None:
    write_rows(tmp_path, "train", [{**row, "margin": float(n)} for n, row in enumerate(PAIRS)])
    pairs = read_completions(tmp_path, "train", SIDES, codec)
    assert [codec.tokenizer.decode(ids[1:]) for ids in pairs.prompt_ids] == ["a", "b"]
    assert [len(ids) for side in SIDES for ids in pairs.response_ids[side]] == [4, 4, 3, 4]
    assert list(pairs.margins or ()) == [0.0, 1.0]
    metrics = comparison_metrics(job_with(codec, tmp_path), "data", [pairs])
    assert metrics == {
        "prompts_too_long": 1,
        "prompts_too_long_share": 1 / 5,
        # of the eight responses of the four rows that fit: yest, yest, yest, same, same
        "responses_cut": 5,
        "responses_cut_share": 5 / 8,
        "rows_alike_after_cut": 2,
        "unknown_token_share": 0.0,
        "single_byte_share": 0.0,
    }


def test_pairs_of_which_nothing_is_left_are_refused(codec: Codec, tmp_path: Path) -> None:
    write_rows(tmp_path, "train", PAIRS[2:4])
    with pytest.raises(NothingLeft, match="each of the 2 rows .* generation.max_response_tokens=4 cuts off"):
        read_completions(tmp_path, "train", SIDES, codec)


def test_text_that_a_tokenizer_cannot_tell_apart_is_alike_too(codec: Codec, tmp_path: Path) -> None:
    write_rows(tmp_path, "train", [pair("a", "是", "不"), pair("b", "是", "yes")])
    pairs = read_completions(tmp_path, "train", SIDES, codec)
    assert len(pairs) == pairs.counts.num_alike == 1


def test_of_ranked_responses_that_are_alike_the_best_ranked_stays(codec: Codec, tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "responses": ["longer1", "x", "longer2"], "ranks": [1.0, 2.0, 3.0]},
        {"prompt": "b", "responses": ["longer1", "longer2", "longer3"], "ranks": [3.0, 2.0, 1.0]},
        {"prompt": "c", "responses": ["y", "longer1", "longer2"], "ranks": [1.0, 2.0, 2.0]},
        {"prompt": "d", "responses": ["y", "x"], "ranks": [7.0, 5.0]},
    ]
    write_rows(tmp_path, "train", rows)
    rankings = read_rankings(tmp_path, "train", codec)
    decoded = [
        [codec.tokenizer.decode(ids).removesuffix("</s>") for ids in row] for row in rankings.response_ids
    ]
    assert decoded == [["long", "x"], ["y", "long", "long"], ["y", "x"]]
    assert list(rankings.ranks) == [[0, 1], [0, 1, 1], [1, 0]]
    assert rankings.counts.num_alike == 2  # the first and the second
    write_rows(tmp_path, "test", rows[1:2])
    with pytest.raises(NothingLeft, match="each of the 1 rows"):
        read_rankings(tmp_path, "test", codec)


def test_demonstrations_that_are_alike_all_stay(codec: Codec, tmp_path: Path) -> None:
    write_rows(tmp_path, "train", [{"prompt": "a", "response": "longer"}, {"prompt": "b", "response": "no"}])
    rows = read_completions(tmp_path, "train", ["response"], codec)
    assert (len(rows), rows.counts.num_cut, rows.counts.num_responses) == (2, 1, 2)
    assert encoding_metrics(job_with(codec, tmp_path), "data", [rows])["responses_cut_share"] == 0.5


def test_unknown_characters_are_a_share_of_all_tokens(codec: Codec, tmp_path: Path) -> None:
    write_rows(tmp_path, "train", [{"prompt": "ab"}, {"prompt": "中文"}, {"prompt": "a中"}])
    # BOS and two tokens each: three of nine are unknown
    metrics = encoding_metrics(job_with(codec, tmp_path), "prompts", [read_prompts(tmp_path, "train", codec)])
    assert metrics["unknown_token_share"] == 3 / 9
    assert "responses_cut" not in metrics


def test_bytes_are_told_from_pieces() -> None:
    """A character without a piece of its own is three bytes of UTF-8, as Llama's tokenizers write it."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "<0xZZ>"]
    model = models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(model), unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    ids = tokenizer("a中a")["input_ids"]
    assert count_tokens(tokenizer, [ids, [0, 1, 2, len(pieces) - 1]]) == TokenCounts(
        num_tokens=9, num_unknown=1, num_bytes=3
    )
    tokenizer.eos_token = "<unk>"  # as in GPT-2, where it ends every text
    assert count_tokens(tokenizer, [[0, 0]]).num_unknown == 0


def test_shares_are_over_all_splits(codec: Codec, tmp_path: Path) -> None:
    write_rows(tmp_path, "train", [{"prompt": "a"}, {"prompt": "far too long"}, {"prompt": "b"}])
    write_rows(tmp_path, "test", [{"prompt": "c"}])
    splits = [read_prompts(tmp_path, split, codec) for split in ("train", "test")]
    metrics = encoding_metrics(job_with(codec, tmp_path), "prompts", splits)
    assert (metrics["prompts_too_long"], metrics["prompts_too_long_share"]) == (1, 0.25)


def test_rows_that_cannot_be_used_count_for_max_dropped(codec: Codec, tmp_path: Path) -> None:
    write_rows(tmp_path, "train", PAIRS)
    pairs = read_completions(tmp_path, "train", SIDES, codec)
    with pytest.raises(
        TooManyLeftOut,
        match=r"reward.data: 3 of 5 rows cannot be used, more than the dataset's max_dropped=0.5 allows: 1 prompts are "
        r"longer than generation.max_prompt_tokens=8 \(the longest has 22 tokens\); 2 rows have responses that are the "
        r"same tokens, cut off at generation.max_response_tokens=4",
    ):
        comparison_metrics(job_with(codec, tmp_path, data=0.5), "data", [pairs])
    assert (
        comparison_metrics(job_with(codec, tmp_path, data=0.6), "data", [pairs])["rows_alike_after_cut"] == 2
    )


def test_counts_of_splits_add_up_to_those_of_all() -> None:
    one = EncodingCounts(
        num_rows=3, longest_prompt=9, shortest_prompt=4, num_tokens=20, refused=("a", "b"), num_refused=2
    )
    other = EncodingCounts(
        num_rows=2, longest_prompt=7, shortest_prompt=5, num_tokens=10, refused=("c", "d"), num_refused=4
    )
    assert one + other == EncodingCounts(
        num_rows=5, longest_prompt=9, shortest_prompt=4, num_tokens=30, refused=("a", "b", "c"), num_refused=6
    )
    assert EncodingCounts() + one == one == one + EncodingCounts()
