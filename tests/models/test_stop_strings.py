"""Stop strings end a response where decoding after each token does, and where transformers' own criteria do."""

import random
from collections.abc import Sequence

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.generation import StopStringCriteria

from tests.models.byte_tokenizer import build_byte_tokenizer
from vantage.models import sampling
from vantage.models.prompts import decode_all, encode_prompts, stop_token_ids
from vantage.models.sampling import Samples, sample
from vantage.models.stop_strings import StopStrings, before_stop, special_stops
from vantage.models.tokenising import tokenise
from vantage.schemas.recipe.pass_limits import PassLimits

HUMAN = "\n\nHuman:"


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer in the manner of Llama 2: a space before every text, and bytes for characters that have no
    token.
    """
    merges = [
        ("▁", "b"),
        ("s", "t"),
        ("st", "o"),
        ("sto", "p"),
        ("o", "p"),
        ("▁", "s"),
        ("▁s", "to"),
        ("t", "o"),
        ("H", "u"),
    ]
    special = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = list("▁abcdefghijklmnopqrstuvwxyzHU:.?")
    tokens = dict.fromkeys([*special, *bytes_, *letters, *(a + b for a, b in merges)])
    tokenizer = Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<unk>"
    )


TOKENIZERS = {"byte-level": build_byte_tokenizer(), "sentencepiece": sentencepiece_tokenizer()}


def first_stop(stops: StopStrings, ids: Sequence[int]) -> int | None:
    """Return how many ids a response has that is sampled as these."""
    return next((length for length in range(1, len(ids) + 1) if stops.complete(ids[:length])), None)


def plain_first_stop(
    tokenizer: PreTrainedTokenizerBase, strings: Sequence[str], ids: Sequence[int]
) -> int | None:
    """Return the number of ids after which their text has a stop string, by decoding all ids after each of them."""
    for length in range(1, len(ids) + 1):
        [text] = decode_all(tokenizer, [ids[:length]])
        if any(string in text for string in strings):
            return length
    return None


def ids_of(tokenizer: PreTrainedTokenizerBase, *pieces: str) -> list[int]:
    ids = tokenizer.convert_tokens_to_ids(list(pieces))
    assert tokenizer.unk_token_id not in ids and None not in ids
    return list(ids)


@pytest.mark.parametrize(
    "strings, pieces, length, text",
    [
        # "ĊĊ" is one token of two line ends
        ([HUMAN], ["a", "ĊĊ", "H", "u", "m", "a", "n", ":", "x"], 8, "a"),
        ([HUMAN], ["ĊĊ", "H", "u", "m", "a", "n", ".", ":"], None, "\n\nHuman.:"),
        (["\nH"], ["a", "ĊĊ", "H"], 3, "a\n"),  # begins inside a token
        (["l"], ["a", "hell", "o"], 2, "ahe"),  # ends inside a token
        (["ell"], ["hello"], 1, "h"),
        (["é"], ["a", "Ã", "©", "b"], 3, "a"),  # the second byte completes the character
        (["aé"], ["a", "Ã", "b"], None, "a\N{REPLACEMENT CHARACTER}b"),
        # of two stop strings that end together, the one that begins first counts
        (["b", "ab"], ["a", "b"], 2, ""),
        (["lo", "he"], ["hello"], 1, ""),
        (["a", "bc"], ["b", "c", "a"], 2, ""),
        (["a b"], ["a", "<|im_start|>", "Ġ", "b"], 4, ""),  # special tokens are no text
    ],
)
def test_a_response_ends_with_the_token_that_completes_a_stop_string(
    strings: list[str], pieces: list[str], length: int | None, text: str
) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = ids_of(tokenizer, *pieces)
    assert first_stop(StopStrings(tokenizer, strings), ids) == length
    assert before_stop(decode_all(tokenizer, [ids[:length]])[0], strings) == text


@pytest.mark.parametrize(
    "strings, pieces, length, text",
    [
        ([" stop"], ["▁sto", "p"], 2, ""),  # the space that begins a response is its own
        (["stop"], ["▁b", "▁sto", "p"], 3, " b "),
        (["b stop"], ["b", "▁sto", "p"], 3, ""),
        (["ö"], ["a", "<0xC3>", "<0xB6>", "a"], 3, "a"),
        (
            ["\n"],
            ["<0xC3>", "<0x0A>", "a"],
            None,
            "\N{REPLACEMENT CHARACTER}" * 2 + "a",
        ),  # as the tokenizer reads it
        (["\n\nHu"], ["<0x0A>", "<0x0A>", "Hu"], 3, ""),
    ],
)
def test_the_same_where_bytes_are_tokens_and_texts_begin_with_a_space(
    strings: list[str], pieces: list[str], length: int | None, text: str
) -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = [*ids_of(tokenizer, "▁b"), *ids_of(tokenizer, *pieces)]
    found = first_stop(StopStrings(tokenizer, strings), ids)
    assert found == (None if length is None else length + 1)
    assert before_stop(decode_all(tokenizer, [ids[:found]])[0], strings) == " b" + text


def random_cases(tokenizer: PreTrainedTokenizerBase, number: int) -> list[tuple[list[str], list[int]]]:
    """Return the ids in which bytes and pieces of words are frequent, and strings that some of them contain."""
    chance = random.Random(5)
    words = ["stop", " stop", HUMAN, "hello", " hello b", "é", "你好", "\n", "a.", "?"]
    parts = [tokenise(tokenizer, [word], add_special_tokens=False)[0] for word in words]
    alone = [i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids]
    cases = []
    for _ in range(number):
        ids = [
            i
            for _ in range(12)
            for i in (chance.choice(parts) if chance.random() < 0.5 else [chance.choice(alone)])
        ]
        [text] = decode_all(tokenizer, [ids])
        begin = chance.randrange(len(text))
        own = text[begin : begin + chance.randint(1, 6)]
        strings = [chance.choice(words), *([own] if "\N{REPLACEMENT CHARACTER}" not in own else [])]
        cases.append((strings, ids))
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENIZERS)
def test_what_is_found_in_the_last_ids_is_what_decoding_all_of_them_finds(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    found = []
    for strings, ids in random_cases(tokenizer, 400):
        found.append(first_stop(StopStrings(tokenizer, strings), ids))
        assert found[-1] == plain_first_stop(tokenizer, strings, ids), (strings, ids)
    assert found.count(None) < 200 and len(set(found)) > 15


@pytest.mark.parametrize("name", TOKENIZERS)
def test_transformers_stops_at_the_same_token(name: str) -> None:
    """Compared where the bytes of the response are characters, since transformers also finds a stop string among other
    bytes.
    """
    tokenizer = TOKENIZERS[name]
    compared = 0
    for strings, ids in random_cases(tokenizer, 400):
        if "\N{REPLACEMENT CHARACTER}" in decode_all(tokenizer, [ids])[0]:
            continue
        criteria = StopStringCriteria(tokenizer, strings)
        theirs = next(
            (n for n in range(1, len(ids) + 1) if criteria(torch.tensor([ids[:n]]), None).item()), None
        )
        assert first_stop(StopStrings(tokenizer, strings), ids) == theirs, (strings, ids)
        compared += theirs is not None
    assert compared > 5


def model_of(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=128, initializer_range=0.4,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def draw(name: str, prompts: list[list[int]], strings: Sequence[str], **options: object) -> Samples:
    tokenizer = TOKENIZERS[name]
    settings = {
        "max_new_tokens": 24, "temperature": 1.0, "eos_token_ids": stop_token_ids(tokenizer, chat=False), "pad_token_id": 0,
        "seed": 4, "stop_strings": StopStrings(tokenizer, strings) if strings else None, **options,
    }  # fmt: skip
    return sample(model_of(tokenizer), prompts, **settings)  # type: ignore[arg-type]


def prompts_of(name: str) -> list[list[int]]:
    texts = ["stop b", "hello hello", "?", "a.b.c.d", " stop hello", "é"]
    return encode_prompts(TOKENIZERS[name], texts * 2, chat=False)


def parts_of(texts: Sequence[str]) -> list[str]:
    """Return stop strings: a few characters from the middle of a piece of each of the first four texts."""
    runs = [[run for run in text.split("\N{REPLACEMENT CHARACTER}") if run] for text in texts[:4]]
    return list(
        dict.fromkeys(found[len(found) // 2][:size] for found, size in zip(runs, (1, 3, 2, 4), strict=True))
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENIZERS)
def test_greedy_is_what_generate_says_with_stop_strings(name: str) -> None:
    tokenizer, prompts = TOKENIZERS[name], prompts_of(name)[:6]
    strings = parts_of(decode_all(tokenizer, draw(name, prompts, [], greedy=True).responses))
    result = draw(name, prompts, strings, greedy=True)
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=24,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
        stop_strings=strings,
    )
    assert any(result.ended) and len({len(row) for row in result.responses}) > 2
    for prompt, response in zip(prompts, result.responses, strict=True):
        output = model_of(tokenizer).generate(
            torch.tensor([prompt]), generation_config=config, tokenizer=tokenizer
        )
        assert response == output[0, len(prompt) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("shrink_at", [0.0, 0.9])
def test_rows_end_each_at_their_own_step_and_are_otherwise_what_they_were(
    name: str, shrink_at: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ids, their log-probabilities and ends are those of sampling without stop strings, up to the first stop."""
    monkeypatch.setattr(sampling, "SHRINK_AT", shrink_at)
    tokenizer, prompts = TOKENIZERS[name], prompts_of(name)
    whole = draw(name, prompts, [])
    strings = parts_of(decode_all(tokenizer, whole.responses))
    result = draw(name, prompts, strings, limits=PassLimits(5))
    stopped = 0
    for place, ids in enumerate(whole.responses):
        length = plain_first_stop(tokenizer, strings, ids)
        assert result.responses[place] == ids[:length]
        assert result.ended[place] == (whole.ended[place] or length is not None)
        torch.testing.assert_close(
            torch.tensor(result.logprobs[place]),
            torch.tensor(whole.logprobs[place][:length]),
            rtol=0,
            atol=5e-5,
        )
        stopped += length is not None and length < len(ids)
    assert stopped >= 3 and len({len(row) for row in result.responses}) > 3


def test_a_stop_string_that_the_last_possible_token_completes_ends_the_response() -> None:
    name, prompts = "sentencepiece", prompts_of("sentencepiece")[:1]
    [greedy] = draw(name, prompts, [], greedy=True).responses
    texts = [decode_all(TOKENIZERS[name], [greedy[:length]])[0] for length in (4, 5)]
    last = texts[1].removeprefix(texts[0][:-1])  # the last two characters and what they belong to
    assert last and last not in texts[0]
    at_limit = draw(name, prompts, [last], greedy=True, max_new_tokens=5)
    assert at_limit.responses == [greedy[:5]] and at_limit.ended == [True]
    before = draw(name, prompts, [last], greedy=True, max_new_tokens=4)
    assert before.responses == [greedy[:4]] and before.ended == [False]


def test_what_the_prompt_says_ends_nothing() -> None:
    name, tokenizer = "byte-level", TOKENIZERS["byte-level"]
    [prompt] = encode_prompts(tokenizer, [f"hello{HUMAN}"], chat=False)
    unstopped = draw(name, [prompt], [], greedy=True)
    # ":" ends the prompt, and with the first character of the response it would be a stop string
    [text] = decode_all(tokenizer, unstopped.responses)
    assert draw(name, [prompt], [HUMAN, ":" + text[:1]], greedy=True) == unstopped


def test_special_tokens_that_are_named_are_tokens() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    assert special_stops(tokenizer, ["<|im_start|>", "a"]) == [
        tokenizer.convert_tokens_to_ids("<|im_start|>")
    ]
    with pytest.raises(
        ValueError, match=r"generation.stop has '<\|im_end\|>\\n', .* give '<\|im_end\|>' alone"
    ):
        special_stops(tokenizer, ["<|im_end|>\n"])
