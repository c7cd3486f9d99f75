"""Steps that a GPU replays are tested on a CPU: the same code without the capture gives what the plain loop gives."""

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.support.uncaptured import Uncaptured
from tests.tasks.host_waits import HostWaits
from vantage.models import captured_steps, one_token, replayed_steps, static_cache
from vantage.models.adapters import Adaptation, add_adapters
from vantage.models.cuda_graphs import Step
from vantage.models.late_counts import LATE
from vantage.models.logprobs import response_logprobs
from vantage.models.one_token import CastWeights
from vantage.models.pass_counts import PassCounts, taken_counts
from vantage.models.sampling import Samples, sample
from vantage.models.sequences import collate
from vantage.models.static_cache import StaticCache, length_for
from vantage.models.stop_strings import StopStrings
from vantage.schemas.recipe.lora import Lora
from vantage.schemas.recipe.pass_limits import UNLIMITED, PassLimits

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.1,
    "pad_token_id": 0,
}
FEW_HEADS = {**SIZES, "num_key_value_heads": 4}
SMALL_GPT: dict[str, Any] = {"vocab_size": 50, "n_layer": 2, "n_head": 2, "initializer_range": 0.1}
REPLAYED: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "one group of heads": lambda: LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_key_value_heads": 1})),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**SIZES)),
    "mistral without a window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SIZES)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**SMALL_GPT, n_embd=32, n_positions=128)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**FEW_HEADS)),
}
PLAIN: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "gemma2": (lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, sliding_window=6)), "attends by eager"),
    "mistral": (
        lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=6)),
        "MistralForCausalLM keeps keys and values of a window",
    ),
    "bloom": (
        lambda: BloomForCausalLM(BloomConfig(**SMALL_GPT, hidden_size=32)),
        "BloomForCausalLM does not take the positions",
    ),
    "gpt_neo": (
        lambda: GPTNeoForCausalLM(
            GPTNeoConfig(
                vocab_size=50,
                hidden_size=32,
                num_layers=2,
                num_heads=2,
                attention_types=[[["global", "local"], 1]],
                window_size=6,
                max_position_embeddings=128,
            )
        ),
        "transformers marks GPTNeoForCausalLM as one whose forward pass cannot be compiled",
    ),
}
PROMPTS = [[1, *range(10, 10 + length)] for length in (7, 1, 12, 3, 3, 9, 5, 2)] * 2
EOS = (2, 17, 30, 31, 5)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let caches grow, and rows leave, within a few tokens, and give each test a log of its own."""
    monkeypatch.setattr(static_cache, "STEP", 8)
    monkeypatch.setattr(replayed_steps, "FEWEST_ROWS", 2)
    monkeypatch.setattr(replayed_steps, "FEWEST_TOKENS", 2)
    replayed_steps._tell.cache_clear()
    taken_counts()
    yield
    replayed_steps._tell.cache_clear()


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay on a CPU what is captured on a GPU."""
    monkeypatch.setattr(replayed_steps, "CAPTURES", {"cpu": Uncaptured})


def built(build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    torch.manual_seed(0)
    model = build()
    model.eval()
    return model


def draw(model: PreTrainedModel, prompts: list[list[int]] = PROMPTS, **options: Any) -> Samples:
    defaults: dict[str, Any] = {"max_new_tokens": 30, "temperature": 0.9, "eos_token_ids": EOS}
    return sample(model, prompts, **{**defaults, "pad_token_id": 0, "seed": 3, **options})


def both(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, *args: Any, **options: Any
) -> tuple[Samples, Samples, PassCounts]:
    """Return the result of the plain loop, that of replayed steps, and what these counted."""
    monkeypatch.setattr(replayed_steps, "CAPTURES", {})
    plain = draw(model, *args, **options)
    assert taken_counts().graph_replays == 0
    monkeypatch.setattr(replayed_steps, "CAPTURES", {"cpu": Uncaptured})
    replayed = draw(model, *args, **options)
    return plain, replayed, taken_counts()


def assert_alike(found: Samples, expected: Samples) -> None:
    assert found.responses == expected.responses
    assert found.ended == expected.ended
    for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("name", REPLAYED)
def test_responses_are_those_of_the_plain_loop(
    name: str, greedy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, replayed, counts = both(built(REPLAYED[name]), monkeypatch, greedy=greedy)
    assert_alike(replayed, plain)
    assert greedy or len(set(map(len, plain.responses))) > 2, "rows leave one after the other"
    longest = max(map(len, plain.responses))
    assert (counts.graph_replays, counts.graph_fallbacks) == (longest - 1, 0)
    assert 3 <= counts.graphs_captured <= 9, "few rows, few lengths"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_in_bfloat16_log_probabilities_are_those_of_the_trainer(
    weights: torch.dtype, name: str, replays: None
) -> None:
    """The trainer reads whole texts, without the sampler's cache and mask. The two agree both under autocast and with
    weights in bfloat16.
    """
    model = built(REPLAYED[name])
    model.to(dtype=weights)  # type: ignore[call-arg]
    context: AbstractContextManager[object] = (
        nullcontext() if weights is torch.bfloat16 else torch.autocast("cpu", dtype=torch.bfloat16)
    )
    with context:
        found = draw(model)
        sequences = collate(PROMPTS, found.responses, pad_token_id=0)
        with torch.no_grad():
            scored = response_logprobs(model, sequences, temperature=0.9).logprobs
    drawn = torch.tensor([value for row in found.logprobs for value in row])
    gaps = (scored[sequences.response_mask] - drawn).abs()
    assert gaps.mean() < 0.01
    assert gaps.max() < 0.1
    counts = taken_counts()
    assert (counts.graph_replays, counts.graph_fallbacks) == (max(map(len, found.responses)) - 1, 0)


def test_autocast_finds_in_a_cast_model_what_it_finds_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tokens have equal bits. They come with the prompts, in which no step has a part."""
    for name in ("llama", "qwen2", "gpt2"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            plain, replayed, _ = both(built(REPLAYED[name]), monkeypatch)
        assert [row[0] for row in plain.logprobs] == [row[0] for row in replayed.logprobs]
        assert [row[0] for row in plain.responses] == [row[0] for row in replayed.responses]


def test_the_same_seed_gives_the_same_bits(replays: None) -> None:
    model = built(REPLAYED["llama"])
    assert draw(model) == draw(model)


@pytest.mark.parametrize("late", [1, 3])
def test_ends_that_are_known_late_change_no_response(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LATE, "cpu", late)
    for eos in (EOS, range(3, 50), ()):
        plain, replayed, _ = both(built(REPLAYED["llama"]), monkeypatch, eos_token_ids=eos)
        assert_alike(replayed, plain)


@pytest.mark.parametrize("limits", [PassLimits(4), PassLimits(5), PassLimits(tokens=120), PassLimits(1)])
def test_batches_share_captured_steps(limits: PassLimits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of equal rows and length share them; a batch of other rows, or with a longer cache, has its own."""
    plain, replayed, counts = both(built(REPLAYED["gpt2"]), monkeypatch, limits=limits)
    assert_alike(replayed, plain)
    assert counts.graph_fallbacks == 0
    assert counts.graphs_captured <= 24


def test_a_second_batch_of_the_same_shape_captures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replayed_steps, "CAPTURES", {"cpu": Uncaptured})
    model, prompts = built(REPLAYED["llama"]), [[1, 7, 9]] * 4
    captured = []
    for batches in (1, 2, 3, 4):
        draw(model, prompts * batches, limits=PassLimits(4), eos_token_ids=())
        captured.append(taken_counts().graphs_captured)
    lengths = {length_for(3 + drawn, most=33) for drawn in range(1, 30)}
    first = len(lengths)
    assert captured[0] == first
    # the second batch finds a cache that is long enough at once; after it nothing changes
    assert captured[1] == captured[2] == captured[3] == 2 * first - 1


def test_a_group_shares_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[1, 5, 6, 7]] * 6 + [[1, 9]] * 5
    plain, replayed, counts = both(built(REPLAYED["qwen2"]), monkeypatch, prompts)
    assert_alike(replayed, plain)
    assert counts.prompt_positions == 2 * 4
    assert counts.graph_replays


@pytest.mark.parametrize("limits", [UNLIMITED, PassLimits(5)])
def test_whoever_listens_is_told_what_the_plain_loop_tells(
    limits: PassLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listener gets, for all batches, how many responses have ended before which token."""
    model = built(REPLAYED["llama"])
    of_both: list[list[tuple[int, int]]] = []
    kinds: list[dict[str, type[Uncaptured]]] = [{}, {"cpu": Uncaptured}]
    for captures in kinds:
        monkeypatch.setattr(replayed_steps, "CAPTURES", captures)
        heard: list[tuple[int, int]] = []
        draw(model, limits=limits, on_token=lambda ended, token, heard=heard: heard.append((ended, token)))
        of_both.append(heard)
    plain, replayed = of_both
    assert replayed == plain
    assert len({ended for ended, _ in plain}) > 8, "responses end one after the other"


def test_rows_that_are_computed_and_had_ended_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count follows from the lengths of the responses: steps have 16 rows or halves of them, as few as hold the
    unfinished ones.
    """
    plain, _, counts = both(built(REPLAYED["llama"]), monkeypatch)
    lengths = [len(response) for response in plain.responses]
    computed = needed = 0
    for token in range(2, max(lengths) + 1):  # the first comes with the prompt
        active = sum(length >= token for length in lengths)
        computed += min(width for width in (16, 8, 4, 2) if width >= active)
        needed += active
    assert (counts.sampled_rows, counts.ended_rows) == (computed, computed - needed)
    assert 0 < needed < computed < 16 * max(lengths)


@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize("strings", [["e"], ["12", "a"], ["xyzzy"]])
def test_stop_strings_end_responses_where_they_did(
    strings: list[str], late: int, byte_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A string that is found late, and an end of sequence after it, change no response."""
    monkeypatch.setitem(LATE, "cpu", late)
    sizes = {**SIZES, "vocab_size": len(byte_tokenizer), "initializer_range": 0.02}
    model = built(lambda: LlamaForCausalLM(LlamaConfig(**sizes)))
    stop = StopStrings(byte_tokenizer, strings)
    prompts = [[70 + place] for place in range(12)] * 4
    options: dict[str, Any] = {
        "stop_strings": stop,
        "eos_token_ids": range(0, len(byte_tokenizer), 23),
        "max_new_tokens": 40,
    }
    plain, replayed, _ = both(model, monkeypatch, prompts, **options)
    assert_alike(replayed, plain)
    if strings != ["xyzzy"]:
        by_strings = [row for row in plain.responses if row[-1] % 23]
        assert by_strings, "strings end some"


@pytest.mark.slow
def test_adapters_are_part_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(REPLAYED["llama"])
    add_adapters(model, Adaptation(Lora(rank=2), seed=1))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
    plain, replayed, counts = both(model, monkeypatch)
    assert_alike(replayed, plain)
    assert counts.graph_replays == max(map(len, plain.responses)) - 1
    assert plain.responses != draw(built(REPLAYED["llama"])).responses


@pytest.mark.slow
def test_weights_that_change_between_calls_are_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast a call has copies of them, which are its own."""
    model = built(REPLAYED["llama"])

    def first_tokens() -> list[list[int]]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            plain, replayed, _ = both(model, monkeypatch)
        assert [row[0] for row in plain.responses] == [row[0] for row in replayed.responses]
        return replayed.responses

    before = first_tokens()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
    assert first_tokens() != before


# what cannot be replayed


@pytest.mark.parametrize("name", PLAIN)
def test_what_cannot_be_replayed_is_sampled_by_the_plain_loop_and_a_line_says_why(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build, reason = PLAIN[name]
    model = built(build)
    if name == "gemma2":
        model.set_attn_implementation("eager")
    for _ in range(2):
        plain, replayed, counts = both(model, monkeypatch)
        assert replayed == plain, "bit for bit"
        assert (counts.graph_fallbacks, counts.graph_replays, counts.graphs_captured) == (1, 0, 0)
    (said,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert reason in said.getMessage()
    assert said.getMessage().startswith("sampling without CUDA graphs, which is slower: ")
    assert "\n" not in said.getMessage()


def breaks(at: int) -> type[Uncaptured]:
    """Return a capture that fails at the n-th step."""

    class Breaks(Uncaptured):
        captured = 0

        def __call__(self, step: Step, *, restore: Step) -> Step:
            Breaks.captured += 1
            if Breaks.captured == at:
                step()
                raise RuntimeError("no\nmore")
            return super().__call__(step, restore=restore)

    return Breaks


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("strings", [None, ["e"], list("aeinorst0123456789")])
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_the_plain_loop_goes_on_from_where_a_capture_fails(
    at: int,
    strings: list[str] | None,
    late: int,
    byte_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(LATE, "cpu", late)
    sizes = {**SIZES, "vocab_size": len(byte_tokenizer), "initializer_range": 0.05}
    model = built(lambda: LlamaForCausalLM(LlamaConfig(**sizes)))
    stop = None if strings is None else StopStrings(byte_tokenizer, strings)
    options: dict[str, Any] = {
        "stop_strings": stop,
        "eos_token_ids": range(0, len(byte_tokenizer), 30),
        "limits": PassLimits(8),
    }
    monkeypatch.setattr(replayed_steps, "CAPTURES", {})
    plain = draw(model, **options)
    monkeypatch.setattr(replayed_steps, "CAPTURES", {"cpu": breaks(at)})
    taken_counts()
    replayed = draw(model, **options)
    counts = taken_counts()
    assert_alike(replayed, plain)
    assert counts.graphs_captured == at - 1
    assert (counts.graph_replays > 0) == (at > 1)
    assert counts.graph_fallbacks == 2, "of two batches, each is counted"
    assert "slower: RuntimeError: no" in caplog.text
    assert model.config._attn_implementation == "sdpa"


def test_a_step_that_is_wrong_is_found_at_its_first_token(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A graph that replays nothing is found, and so is one that replays a step at other positions."""

    class Nothing(Uncaptured):
        def __call__(self, step: Step, *, restore: Step) -> Step:
            return lambda: None

    model = built(REPLAYED["gpt2"])
    with torch.no_grad():
        model.get_parameter("transformer.wpe.weight").mul_(5)
    monkeypatch.setattr(replayed_steps, "CAPTURES", {})
    plain = draw(model)
    monkeypatch.setattr(replayed_steps, "CAPTURES", {"cpu": Nothing})
    assert_alike(draw(model), plain)
    assert "a captured step of GPT2LMHeadModel is" in caplog.text

    whole = one_token.draw_one_token

    def misplaced(forward: Any, *args: Any, **options: Any) -> None:
        whole(
            lambda **inputs: forward(**{**inputs, "position_ids": inputs["position_ids"] + 1}),
            *args,
            **options,
        )

    monkeypatch.setattr(captured_steps, "draw_one_token", misplaced)
    monkeypatch.setattr(replayed_steps, "CAPTURES", {"cpu": Uncaptured})
    taken_counts()
    assert_alike(draw(model), plain)
    assert taken_counts().graph_replays == 0


def test_a_step_that_finds_no_numbers_is_wrong_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A captured step with NaN is refused, though no difference is above a bound, since the plain loop finds numbers."""
    whole = one_token.draw_one_token

    def without_numbers(forward: Any, *args: Any, **options: Any) -> None:
        def spoilt(**inputs: Any) -> Any:
            output = forward(**inputs)
            output.logits = output.logits * torch.nan
            return output

        whole(spoilt, *args, **options)

    model = built(REPLAYED["llama"])
    plain = draw(model)
    monkeypatch.setattr(captured_steps, "draw_one_token", without_numbers)
    monkeypatch.setattr(replayed_steps, "CAPTURES", {"cpu": Uncaptured})
    assert_alike(draw(model), plain)
    assert "a captured step of LlamaForCausalLM is nan nats off the plain one" in caplog.text


def test_a_model_that_looks_at_values_is_not_captured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = built(REPLAYED["llama"])
    plain = draw(model)
    norm = type(model.get_submodule("model.norm"))
    forward = norm.forward
    monkeypatch.setattr(norm, "forward", lambda self, x: forward(self, x) * max(1, int(x.isnan().any())))
    monkeypatch.setattr(replayed_steps, "CAPTURES", {"cpu": Uncaptured})
    assert draw(model) == plain
    assert "LooksAtValues: its forward pass looks at the values of tensors" in caplog.text


def test_it_can_be_switched_off_and_is_not_used_beside_another_thread_or_for_few_tokens(
    monkeypatch: pytest.MonkeyPatch, replays: None, caplog: pytest.LogCaptureFixture
) -> None:
    model = built(REPLAYED["llama"])
    draw(model, is_beside_another=True)
    counts = taken_counts()
    assert (counts.graph_replays, counts.graph_fallbacks) == (0, 1)
    assert "another thread uses the GPU meanwhile (rollout.ahead)" in caplog.text
    monkeypatch.setattr(replayed_steps, "FEWEST_TOKENS", 31)
    draw(model)
    monkeypatch.setattr(replayed_steps, "FEWEST_TOKENS", 2)
    monkeypatch.setenv("VANTAGE_CUDA_GRAPHS", "0")
    draw(model)
    counts = taken_counts()
    assert (counts.graph_replays, counts.graph_fallbacks) == (0, 0)


def test_weights_that_are_not_numbers_are_found(replays: None) -> None:
    model = built(REPLAYED["llama"])
    with torch.no_grad():
        model.get_parameter("model.norm.weight")[0] = torch.nan
    with pytest.raises(FloatingPointError, match="logits are not finite"):
        draw(model)


# what a step is


@pytest.mark.parametrize("fails_at", [None, 1, 2])
def test_a_call_leaves_nothing_behind(fails_at: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the cache nor copies of the weights stay in memory, even before Python's garbage collection."""
    held: list[weakref.ref[torch.Tensor]] = []
    fill, cast = StaticCache._fill, CastWeights.__init__

    def filled(self: StaticCache, *args: Any) -> None:
        fill(self, *args)
        held.extend(weakref.ref(each) for each in self._held[0])

    def copied(self: CastWeights, model: PreTrainedModel) -> None:
        cast(self, model)
        held.extend(weakref.ref(each) for each in self._weights.values())

    monkeypatch.setattr(StaticCache, "_fill", filled)
    monkeypatch.setattr(CastWeights, "__init__", copied)
    capture = Uncaptured if fails_at is None else breaks(fails_at)
    monkeypatch.setattr(replayed_steps, "CAPTURES", {"cpu": capture})
    gc.disable()
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            draw(built(REPLAYED["llama"]), limits=PassLimits(8))
        assert len(held) > 10
        assert not [each for each in held if each() is not None]
    finally:
        gc.enable()


def test_a_replayed_token_waits_once_and_changes_no_address(
    replays: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token waits for the number of responses that have not ended, which on a GPU is that of the token before."""
    monkeypatch.setattr(static_cache, "STEP", 64)
    model, addresses = built(REPLAYED["llama"]), set()
    whole = one_token.draw_one_token

    def noted(forward: Any, cache: Any, slots: Any, **options: Any) -> None:
        whole(forward, cache, slots, **options)
        tensors = [*vars(slots).values(), *(layer.keys for layer in cache.layers)]
        addresses.add(tuple(tensor.data_ptr() for tensor in tensors))

    monkeypatch.setattr(captured_steps, "draw_one_token", noted)
    found = []
    for tokens in (10, 20):
        with HostWaits() as waits:
            draw(model, max_new_tokens=tokens, eos_token_ids=())
        found.append(waits)
    assert found[1].own - found[0].own == 10
    assert found[1].where["transformers"] == found[0].where["transformers"]
    assert len(addresses) == 2, "one for each call"
