"""``vantage sample`` makes the right requests and shows the answers; tested without any model."""

import json
import os
from contextlib import ExitStack, nullcontext
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from vantage.attempts.launchers import sampling_process
from vantage.cli import sample
from vantage.runs import named_models
from vantage.runs.named_models import NamedModel, Origin
from vantage.runs.workspace import Workspace
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.rollout import Sampling
from vantage.schemas.records.sampling import Answer, Answers, ModelOpened, OpenModel, SampleRequest, Turn


def settings(**changes: Any) -> sample.Settings:
    given = {"count": 2, "seed": 7, "greedy": False, "temperature": None, "max_tokens": None, "system": None}
    return sample.Settings(**{**given, **changes})


def user(text: str) -> tuple[Turn, ...]:
    return (Turn(role="user", content=text),)


def test_prompts_of_a_later_request_have_seeds_of_their_own() -> None:
    request = settings(greedy=True, temperature=0.3, max_tokens=9).request([user("a"), user("b")], offset=32)
    assert (request.seed, request.count, request.greedy) == (39, 2, True)
    assert (request.temperature, request.max_tokens) == (0.3, 9)
    assert [turns[0].content for turns in request.conversations] == ["a", "b"]


def test_a_system_prompt_comes_before_every_conversation() -> None:
    request = settings(system="Be brief.").request([user("a"), user("b")])
    roles = [[turn.role for turn in turns] for turns in request.conversations]
    assert roles == [["system", "user"]] * 2


@pytest.mark.parametrize(
    ("row", "contents"),
    [
        ('"plain"', ["plain"]),
        ('{"prompt": "p", "answer": "a"}', ["p"]),
        ('{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}', ["q"]),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', ["a"]),
        (
            '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, '
            '{"role": "user", "content": "r"}]}',
            ["q", "a", "r"],
        ),
    ],
)
def test_a_row_is_asked_without_the_answer_that_it_ends_with(row: str, contents: list[str]) -> None:
    assert [turn.content for turn in sample._of_row(row, "f:1")] == contents


@pytest.mark.parametrize(
    ("row", "said"),
    [("{", "f:1: is not JSON"), ("{}", "f:1: has neither prompt"), ('{"messages": []}', "f:1: has neither prompt")]
    + [("[" * 100_000, "f:1: is nested too deeply"), ("[\udcff", "f:1: is not UTF-8"), ('"\\ud800"', "f:1: is not UTF-8")]
    + [('{"prompt": "\\udfff"}', "f:1: is not UTF-8"), ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "f:1: is not UTF-8")]
    + [(json.dumps({"messages": [turn]}), "f:1: each of messages needs a role") for turn in ({"role": "user"}, "a", {"role": "tool", "content": "a"})],
)  # fmt: skip
def test_a_row_that_is_no_prompt_is_named(row: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        sample._of_row(row, "f:1")


def test_a_file_and_an_argument_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'"fine"\n{"prompt": "\xff"}\n')
    asked = sample._in_file(file)
    assert [turn.content for turn in next(asked)] == ["fine"]
    with pytest.raises(
        ValueError, match=r"prompts\.jsonl:2: is not UTF-8; correct it, or save it as UTF-8 text"
    ):
        next(asked)
    with pytest.raises(ValueError, match=r"^the prompt: is not UTF-8"):
        sample._asked([os.fsdecode(b"\xff")], None)


@pytest.mark.parametrize("count", [0, 1, sample.CHUNK - 1, sample.CHUNK, sample.CHUNK + 1, 3 * sample.CHUNK])
def test_every_prompt_is_in_one_request(count: int) -> None:
    chunks = list(sample._chunks(iter([user(str(number)) for number in range(count)])))
    assert [int(turns[0].content) for chunk in chunks for turns in chunk] == list(range(count))
    assert all(1 <= len(chunk) <= sample.CHUNK for chunk in chunks)


class Process:
    """A model that answers each conversation by its length and the seed, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[SampleRequest] = []

    def send(self, request: SampleRequest) -> None:
        self.asked.append(request)

    def sampled(self) -> Any:
        request = self.asked[-1]
        replies = [
            Answers(
                prompt_tokens=5,
                answers=tuple(
                    Answer(
                        text=f"{len(turns)} turns, seed {request.seed}",
                        ended=number > 0,
                        num_tokens=3,
                        logprob=-3.5,
                        tokens=("sure", "so\n", "odd"),
                        logprobs=(-0.1, -1.0, -2.4),
                    )
                    for number in range(request.count)
                ),
            )
            for turns in request.conversations
        ]
        return SimpleNamespace(conversations=tuple(replies))


def opened(title: str = "", *, most: int = 4, origin: object = None, chat: bool = True) -> Any:
    model = SimpleNamespace(
        label=f"the {title or 'model'}",
        origin=origin,
        generation=Generation(
            max_prompt_tokens=most, max_response_tokens=11, temperature=0.6, stop=("\n\n",)
        ),
    )
    described = ModelOpened(uses_chat=chat, stop_token_ids=(2,), stop_tokens=("</s>",), writes_date=False)
    return sample.Opened(title, model, Process(), described)  # type: ignore[arg-type]


def console() -> tuple[Console, StringIO]:
    file = StringIO()
    return Console(file=file, width=200, force_terminal=True, color_system="standard"), file


def test_answers_name_their_model_and_number_and_what_was_cut_off() -> None:
    screen, shown = console()
    first, second = opened("sft"), opened("dpo")
    sample._answer_all(screen, [first, second], settings(), iter([user("a")]), logprobs=False)
    text = Console(file=(plain := StringIO()), width=200, color_system=None)
    sample._answer_all(text, [first, second], settings(), iter([user("a")]), logprobs=False)
    lines = plain.getvalue().splitlines()
    assert lines[0] == "> a"
    assert lines[1] == "sft 1: 1 turns, seed 7  … cut off at 3 tokens"
    assert lines[2:5] == [
        "sft 2: 1 turns, seed 7",
        "dpo 1: 1 turns, seed 7  … cut off at 3 tokens",
        "dpo 2: 1 turns, seed 7",
    ]
    assert "\x1b[1;32msft 1: \x1b[0m" in shown.getvalue()


@pytest.mark.parametrize(
    ("most", "origin", "warns"), [(4, object(), True), (5, object(), False), (4, None, False)]
)
def test_a_prompt_that_the_recipe_would_leave_out_is_named(most: int, origin: object, warns: bool) -> None:
    screen, shown = console()
    sample._show_answers(
        screen, opened(most=most, origin=origin), Answers(prompt_tokens=5, answers=()), logprobs=False
    )
    assert (
        "has 5 tokens, more than the recipe's generation.max_prompt_tokens=4" in shown.getvalue()
    ) == warns


def test_tokens_are_coloured_by_their_probability() -> None:
    answer = Answer(
        text="",
        ended=True,
        num_tokens=3,
        logprob=-3.5,
        tokens=("sure", "so\n", "odd"),
        logprobs=(-0.1, -1.0, -2.4),
    )
    found = sample._tokens(answer)
    styles = {found.plain[span.start : span.end]: span.style for span in found.spans if span.style != "dim"}
    assert styles == {"so\\n": "yellow", "odd": "red"}, "below a half and below a tenth"
    assert found.plain.endswith("Σ -3.50 nats")


def test_json_has_the_settings_that_were_used() -> None:
    for changes, expected in (({}, (0.6, 11)), ({"temperature": 0.2, "max_tokens": 3}, (0.2, 3))):
        found = sample._model_as_json(opened(), settings(**changes))
        assert (found["temperature"], found["max_tokens"]) == expected
        assert (found["stop"], found["stop_tokens"], found["chat"]) == (("\n\n",), ("</s>",), True)


def test_json_counts_the_seeds_over_all_requests() -> None:
    model = opened()
    found = sample._all_as_json([model], settings(count=1), [user(str(n)) for n in range(sample.CHUNK + 1)])
    assert [request.seed for request in model.process.asked] == [7, 7 + sample.CHUNK]  # type: ignore[attr-defined]
    assert [each["messages"][0]["content"] for each in found["prompts"]] == [
        str(n) for n in range(sample.CHUNK + 1)
    ]


@pytest.mark.parametrize(("chat", "turns"), [(True, [1, 3, 1]), (False, [1, 1, 1])])
def test_a_conversation_goes_on_where_the_model_has_a_template(
    monkeypatch: pytest.MonkeyPatch, chat: bool, turns: list[int]
) -> None:
    lines = iter(["first", "second", "/new", "third", None])
    monkeypatch.setattr(sample, "_read_line", lambda screen: next(lines))
    model = opened(chat=chat)
    sample._converse(console()[0], [model], settings(count=1), logprobs=False)
    asked = model.process.asked  # type: ignore[attr-defined]
    assert [len(request.conversations[0]) for request in asked] == turns
    assert [request.seed for request in asked] == [7, 8, 9], "each turn draws anew"
    if chat:
        assert [turn.content for turn in asked[1].conversations[0]] == ["first", "1 turns, seed 7", "second"]


@pytest.mark.parametrize(
    ("stages", "against", "titles"),
    [
        ((None,), None, [""]),
        (("sft", "dpo"), "dpo", ["sft", "dpo"]),
        (("policy", "policy"), "2", ["model 0", "model 1"]),
        ((None, "sft"), "sft", ["model 0", "sft"]),
    ],
)
def test_two_models_have_titles_that_tell_them_apart(
    monkeypatch: pytest.MonkeyPatch, stages: tuple[str | None, ...], against: str | None, titles: list[str]
) -> None:
    models = [
        NamedModel(
            label=f"model {number}",
            kind="policy",
            folder=Path("model"),
            generation=Generation(max_prompt_tokens=4, max_response_tokens=11, temperature=0.6),
            origin=None
            if stage is None
            else Origin("fake", "0001-fake-000001", stage, "a" * 64, "b" * 64, None, {}),
        )
        for number, stage in enumerate(stages)
    ]
    opened_with: list[OpenModel] = []

    def open_model(opening: OpenModel, *, side_by_side: int) -> Any:
        assert side_by_side == len(stages)
        opened_with.append(opening)
        return nullcontext(SimpleNamespace(opened=lambda: opened().described))

    found = iter(models)
    monkeypatch.setattr(sampling_process, "open_model", open_model)
    monkeypatch.setattr(named_models, "open_named_model", lambda *words, **options: nullcontext(next(found)))
    with ExitStack() as stack:
        made = sample._open_all(
            stack, Workspace(Path()), ["a"] * len(stages), against, settings(temperature=0.2), Sampling()
        )
    assert [each.title for each in made] == titles
    assert {(each.generation.temperature, each.generation.max_response_tokens) for each in opened_with} == {
        (0.2, 11)
    }
