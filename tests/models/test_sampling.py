from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

from vantage.models import sampling
from vantage.models.logprobs import response_logprobs
from vantage.models.sampling import Samples, batches, sample
from vantage.models.sequences import collate
from vantage.schemas.recipe.pass_limits import PassLimits

EOS = (2, 17, 30)
"""Several, so that random weights end some responses early."""
PROMPTS = [[1, *range(10, 10 + length)] for length in (7, 1, 12, 3, 3, 9, 5, 2)] * 2


def draw(model: PreTrainedModel, prompts: list[list[int]] = PROMPTS, **options: object) -> Samples:
    defaults = {"max_new_tokens": 24, "temperature": 1.0, "eos_token_ids": EOS, "pad_token_id": 0, "seed": 3}
    return sample(model, prompts, **{**defaults, **options})  # type: ignore[arg-type]


def cut_at_eos(ids: list[int]) -> list[int]:
    ends = [i for i, token in enumerate(ids) if token in EOS]
    return ids[: ends[0] + 1] if ends else ids


def gpt2() -> GPT2LMHeadModel:
    """Return a model with learned positions, so that a wrong position of a left-padded row shows."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=64))
    with torch.no_grad():
        model.transformer.wpe.weight.mul_(20)
        model.transformer.wte.weight.mul_(5)
    return model.eval()


@pytest.mark.parametrize("name", ["tiny", "gpt2"])
def test_greedy_is_what_generate_says_to_each_prompt_alone(name: str, tiny_policy: PreTrainedModel) -> None:
    model = tiny_policy if name == "tiny" else gpt2()
    result = draw(model, greedy=True)
    config = GenerationConfig(do_sample=False, max_new_tokens=24, eos_token_id=list(EOS), pad_token_id=0)
    for prompt, response in zip(PROMPTS, result.responses, strict=True):
        output = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), generation_config=config
        )
        assert response == output[0, len(prompt) :].tolist()


def test_greedy_of_a_real_model_is_what_generate_says(stories: Path) -> None:
    from vantage.models.folders import load_policy, load_tokenizer
    from vantage.models.prompts import encode_prompts

    model, tokenizer = load_policy(stories), load_tokenizer(stories)
    prompts = encode_prompts(tokenizer, ["Once upon a time", "Tom"], chat=None)
    result = draw(model, prompts, greedy=True, eos_token_ids=(2,), max_new_tokens=40)
    config = GenerationConfig(do_sample=False, max_new_tokens=40, eos_token_id=2, pad_token_id=0)
    for prompt, response in zip(prompts, result.responses, strict=True):
        output = model.generate(torch.tensor([prompt]), generation_config=config)
        assert response == output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_log_probabilities_of_the_samples_are_those_of_the_sampling_distribution(
    tiny_policy: PreTrainedModel, temperature: float
) -> None:
    result = draw(tiny_policy, temperature=temperature)
    sequences = collate(PROMPTS, result.responses, pad_token_id=0)
    scored = response_logprobs(tiny_policy, sequences, temperature=temperature).logprobs
    drawn = torch.tensor([value for row in result.logprobs for value in row])
    torch.testing.assert_close(scored[sequences.response_mask], drawn, rtol=0, atol=2e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_tokens_are_drawn_as_often_as_they_are_probable(temperature: float) -> None:
    model, prompt, num_draws = gpt2(), [1, 5, 9], 20_000
    with torch.no_grad():
        p = torch.softmax(model(torch.tensor([prompt])).logits[0, -1].double() / temperature, dim=0)
    # the prompt beside it is longer, so that padding is at work
    result = draw(
        model,
        [prompt] * num_draws + [[1] * 8],
        max_new_tokens=1,
        temperature=temperature,
        limits=PassLimits(4096),
    )
    counts = torch.bincount(torch.tensor([row[0] for row in result.responses[:num_draws]]), minlength=50)
    standard_error = (num_draws * p * (1 - p)).sqrt()
    assert int((p > 0.02).sum()) >= 5, "a distribution that is worth a test"
    assert ((counts - num_draws * p).abs() <= 5 * standard_error + 1).all()


@pytest.mark.slow
def test_a_row_depends_on_the_seed_and_its_place_alone(tiny_policy: PreTrainedModel) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = draw(tiny_policy)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert draw(tiny_policy) == first
    assert draw(tiny_policy, seed=4).responses != first.responses
    for size in (1, 3, 5, 100):
        assert draw(tiny_policy, limits=PassLimits(size)).responses == first.responses
        assert draw(tiny_policy, limits=PassLimits(tokens=40 * size)).responses == first.responses
        assert draw(tiny_policy, limits=PassLimits(3, 40 * size)).responses == first.responses
    assert draw(tiny_policy, PROMPTS[:3]).responses == first.responses[:3]


def test_the_same_prompt_several_times_gives_different_samples(tiny_policy: PreTrainedModel) -> None:
    result = draw(tiny_policy, [[1, 5, 6]] * 6)
    assert len({tuple(row) for row in result.responses}) == 6


@pytest.mark.slow
@pytest.mark.parametrize("size", [None, 4])
def test_a_prompt_is_read_once_whatever_number_of_responses_it_has(
    size: int | None, tiny_policy: PreTrainedModel
) -> None:
    """With three responses to each of two prompts, the first pass reads 2 prompts, and each later one a token of each
    of 6 rows. In batches of four rows, the first passes read 2 prompts and 1, and the later ones 4 rows and 2."""
    prompts = [[1, 5, 6, 7]] * 3 + [[1, 9]] * 3
    rows: list[tuple[int, int]] = []
    seen = tiny_policy.register_forward_pre_hook(
        lambda *call: rows.append(tuple(call[2]["input_ids"].shape)), with_kwargs=True
    )
    shared = draw(tiny_policy, prompts, eos_token_ids=(), limits=PassLimits(size))
    seen.remove()
    assert [shape for shape in rows if shape[1] > 1] == ([(2, 4)] if size is None else [(2, 4), (1, 4)])
    assert {shape[0] for shape in rows if shape[1] == 1} == ({6} if size is None else {4, 2})
    alone = [draw(tiny_policy, prompts, eos_token_ids=(), limits=PassLimits(1))]
    assert shared.responses == alone[0].responses
    for found, expected in zip(shared.logprobs, alone[0].logprobs, strict=True):
        assert found == pytest.approx(expected, abs=1e-5)


def test_rows_that_leave_the_batch_change_nothing(
    tiny_policy: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaving = draw(tiny_policy)
    monkeypatch.setattr(sampling, "SHRINK_AT", 0.0)
    staying = draw(tiny_policy)
    assert leaving.responses == staying.responses
    assert any(leaving.ended) and not all(leaving.ended)


def test_a_response_stops_at_its_first_eos_and_says_so(tiny_policy: PreTrainedModel) -> None:
    result = draw(tiny_policy)
    assert len(result.responses) == len(result.ended) == len(result.logprobs) == len(PROMPTS)
    for response, ended, logprobs in zip(result.responses, result.ended, result.logprobs, strict=True):
        assert response == cut_at_eos(response)
        assert ended == (response[-1] in EOS)
        assert ended or len(response) == 24
        assert len(logprobs) == len(response)


def test_a_model_that_never_ends_is_cut_at_the_limit(tiny_policy: PreTrainedModel) -> None:
    result = draw(tiny_policy, eos_token_ids=())
    assert result.ended == [False] * len(PROMPTS)
    assert {len(row) for row in result.responses} == {24}


def test_weights_that_are_not_numbers_are_found(tiny_policy: PreTrainedModel) -> None:
    with torch.no_grad():
        tiny_policy.model.norm.weight[0] = torch.nan
    with pytest.raises(FloatingPointError, match="logits are not finite"):
        draw(tiny_policy)


def test_a_batch_that_comes_back_short_is_found(
    tiny_policy: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sampling._sample_batch
    monkeypatch.setattr(sampling, "_sample_batch", lambda *args, **options: whole(*args, **options)[:-1])
    with pytest.raises(ValueError, match="shorter"):
        draw(tiny_policy)


def test_a_model_in_training_mode_is_left_in_it(tiny_policy: PreTrainedModel) -> None:
    tiny_policy.train()
    draw(tiny_policy)
    assert tiny_policy.training
    assert all(
        not parameter.requires_grad or parameter.grad is None for parameter in tiny_policy.parameters()
    )


@pytest.mark.parametrize(
    "prompts, options, message",
    [
        ([], {}, "there is no prompt"),
        ([[1], []], {}, "one without tokens"),
        ([[1]], {"temperature": 0.0}, r"temperature=0.0 must be above 0"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens=0 at least 1"),
        ([[1] * 500], {}, "a prompt of 500 tokens and max_new_tokens=24 exceed the model's 512 positions"),
    ],
)
def test_what_cannot_be_sampled_is_refused(
    tiny_policy: PreTrainedModel, prompts: list[list[int]], options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        draw(tiny_policy, prompts, **options)


@pytest.mark.parametrize(
    "limits", [PassLimits(tokens=30), PassLimits(3, 60), PassLimits(2), PassLimits(tokens=1)]
)
def test_batches_hold_both_bounds_and_are_as_large_as_these_allow(limits: PassLimits) -> None:
    """The shortest prompts come first; a batch's positions are its rows times its longest prompt with four tokens of
    response.
    """
    lengths = [5, 1, 9, 3, 3, 2, 30, 8, 1, 4]

    def fits(batch: list[int]) -> bool:
        positions = len(batch) * (max(lengths[place] for place in batch) + 4)
        within = positions <= (limits.tokens or positions) and len(batch) <= (limits.rows or len(batch))
        return within or len(batch) == 1

    found = batches(lengths, limits, max_new_tokens=4)
    order = [place for batch in found for place in batch]
    assert order == sorted(range(10), key=lambda place: (lengths[place], place))
    assert all(map(fits, found))
    assert not any(fits([*batch, later[0]]) for batch, later in pairwise(found))


@pytest.mark.slow
def test_a_row_longer_than_the_budget_is_sampled_alone(tiny_policy: PreTrainedModel) -> None:
    widths: list[int] = []
    seen = tiny_policy.register_forward_pre_hook(
        lambda *call: widths.append(call[2]["input_ids"].shape[0]), with_kwargs=True
    )
    alone = draw(tiny_policy, limits=PassLimits(tokens=1))
    seen.remove()
    assert set(widths) == {1}
    assert alone.responses == draw(tiny_policy).responses
