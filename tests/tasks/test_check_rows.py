"""The check before any training finds the rows that no stage can use, with the model's template and limits."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.models.byte_tokenizer import CHATML, build_byte_tokenizer
from vantage.attempts.jobs import key_parts_of, work_of
from vantage.schemas.loading.recipe_file import load_recipe
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.recipe.work import CheckRows
from vantage.schemas.records.job import StageJob
from vantage.schemas.records.stage_key import stage_key
from vantage.schemas.steps import CHECKED_ROWS, dependencies
from vantage.tasks.check_rows import REPORT, run
from vantage.tasks.data.encoding_counts import TooManyLeftOut
from vantage.tasks.data.examples import NothingLeft
from vantage.tasks.data.rows import write_rows

STRICT = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('turns must alternate') }}{% endif %}{% endfor %}"
) + CHATML
RECIPE = """
recipe: checked
seed: 3
model: {source: "hub:somebody/model@0123456789012345678901234567890123456789"}
data:
  talks: {source: talks.jsonl, max_dropped: 0.2}
  pairs: {source: pairs.jsonl, max_dropped: 0.1}
stages:
  sft: {kind: sft, data: talks, learning_rate: 1e-4}
  dpo: {kind: dpo, init: sft, data: pairs, learning_rate: 1e-5}
"""


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content, "extra": None}


def talk(
    number: int, *, twice: bool = False, response: str = "Two.", extra: str | None = None
) -> dict[str, Any]:
    """Return a demonstration after one turn of a user, or after two, which the template refuses."""
    messages = [user("Hi."), user(f"{number}?")] if twice else [user(f"{number}?")]
    return {
        "prompt": f"{number}?",
        "response": response,
        "messages": messages if twice else None,
        "response_extra": extra,
    }


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = STRICT
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def job_of(
    folder: Path,
    model: Path,
    data: dict[str, tuple[str, list[dict[str, Any]]]],
    *,
    max_dropped: float = 0.0,
    limits: tuple[int, int] = (64, 16),
) -> StageJob[CheckRows]:
    """Return a check of datasets: name → content, rows."""
    inputs = {"model": model}
    for place, (name, (_, rows)) in enumerate(data.items()):
        inputs[f"data.{place}"] = folder / name
        (folder / name).mkdir()
        for split, of_split in (("train", rows), ("validation", rows[:1]), ("test", [])):
            write_rows(folder / name, split, of_split or rows[:0])
    output, scratch = folder / "output", folder / "scratch"
    output.mkdir()
    scratch.mkdir()
    work = CheckRows(
        datasets=tuple(data),
        contents=tuple(content for content, _ in data.values()),
        max_dropped=(max_dropped,) * len(data),
    )
    return StageJob(
        run_id="0001-test",
        name=CHECKED_ROWS,
        attempt=1,
        stage_key="0" * 64,
        seed=3,
        work=work,
        generation=Generation(max_prompt_tokens=limits[0], max_response_tokens=limits[1]),
        inputs=inputs,
        max_dropped={f"data.{place}": max_dropped for place in range(len(data))},
        scratch=scratch,
        output=output,
    )


def pair(number: int, chosen: str, rejected: str) -> dict[str, Any]:
    return {"prompt": f"{number}?", "chosen": chosen, "rejected": rejected}


def test_each_row_that_no_stage_can_use_is_counted_with_its_reason(tmp_path: Path, model: Path) -> None:
    """Among the conversations one is refused, one was rendered before and one has a call that the template leaves out;
    among the pairs one differs only behind the limit of 16 tokens, and one prompt is longer than 64.
    """
    call = json.dumps({"tool_calls": [{"function": {"name": "add", "arguments": {}}}]})
    talks = [talk(0), talk(1, twice=True), talk(2, response="Two.<|im_end|>"), talk(3, extra=call), talk(4)]
    pairs = [
        pair(0, "a", "b"),
        pair(1, "the same for long: a", "the same for long: b"),
        {**pair(2, "a", "b"), "prompt": "long " * 40},
        pair(3, "c", "d"),
    ]
    data = {"talks": ("demonstrations", talks), "pairs": ("preferences", pairs)}
    job = job_of(tmp_path, model, data, max_dropped=0.7)
    result = run(job)
    report = json.loads((job.output / REPORT).read_text())
    assert result.metrics == {"checked_rows": 5 + 1 + 4 + 1, "unusable_rows": 3 + 2}
    of_talks = {name: report["talks"][name] for name in ("rows", "unusable", "refused")}
    assert of_talks == {"rows": 6, "unusable": 3, "refused": 3}
    reasons = " ".join(report["talks"]["first_refused"])
    assert (
        "turns must alternate" in reasons
        and "holds <|im_end|> as text" in reasons
        and "leaves out 'add'" in reasons
    )
    assert (report["pairs"]["prompts_too_long"], report["pairs"]["alike_after_cut"]) == (1, 1)


def test_without_a_template_prompts_may_be_rendered_and_responses_may_not(
    tmp_path: Path, model: Path
) -> None:
    rows = [{**talk(0), "prompt": "<|im_start|>user<|im_end|>"}, talk(1, response="Two.<|im_end|>"), talk(2)]
    job = job_of(tmp_path, model, {"talks": ("demonstrations", rows)}, max_dropped=0.5)
    run(job.model_copy(update={"chat": False}))
    found = json.loads((job.output / REPORT).read_text())["talks"]
    assert found["refused"] == 1 and found["first_refused"][0].startswith("'1?': holds <|im_end|>")


def test_more_than_the_dataset_allows_is_refused_with_the_rows(tmp_path: Path, model: Path) -> None:
    data = {"talks": ("demonstrations", [talk(0), talk(1, twice=True), *(talk(n) for n in range(2, 9))])}
    with pytest.raises(
        TooManyLeftOut, match="(?s)data.talks: 1 of 10 rows.*max_dropped=0.05.*turns must alternate"
    ):
        run(job_of(tmp_path, model, data, max_dropped=0.05))


def test_where_nothing_is_left_to_train_on_it_is_refused(tmp_path: Path, model: Path) -> None:
    data = {"talks": ("demonstrations", [talk(1, twice=True), talk(2, twice=True)])}
    with pytest.raises(
        NothingLeft, match="none of the 2 rows fits the model's chat template; the first: '1\\?'"
    ):
        run(job_of(tmp_path, model, data, max_dropped=1.0))


def test_prompts_alone_are_checked_too(tmp_path: Path, model: Path) -> None:
    rows = [{"prompt": "1?", "messages": None}, {"prompt": "2?", "messages": [user("Hi."), user("2?")]}]
    job = job_of(tmp_path, model, {"prompts": ("prompts", rows)}, max_dropped=0.5)
    assert run(job).metrics == {"checked_rows": 3, "unusable_rows": 1}


def test_every_dataset_of_a_model_that_may_have_a_template_is_checked_before_training(tmp_path: Path) -> None:
    recipe = ResolvedRecipe.of(load_recipe(write(tmp_path, RECIPE), needs_files=False))
    inputs = dependencies(recipe)
    assert inputs[CHECKED_ROWS] == {"model": "model", "data.0": "data.talks", "data.1": "data.pairs"}
    assert all(CHECKED_ROWS not in read.values() for read in inputs.values()), "no stage's key depends on it"
    work = work_of(recipe, CHECKED_ROWS)
    assert isinstance(work, CheckRows)
    assert (work.contents, work.max_dropped) == (("demonstrations", "preferences"), (0.2, 0.1))
    builtin = load_recipe(
        write(tmp_path, RECIPE.replace(recipe.model.source, "builtin:nano")), needs_files=False
    )
    assert CHECKED_ROWS not in dependencies(builtin)


@pytest.mark.parametrize(
    "change",
    ["model.chat=false", "generation.max_prompt_tokens=99", "data.talks.max_dropped=0.3"],
)
def test_its_key_is_that_of_what_it_reads(change: str, tmp_path: Path) -> None:
    """The key of the check is made of the datasets, the model and the limits."""
    file = write(tmp_path, RECIPE)
    digests = {"model": "1" * 64, "data.0": "2" * 64, "data.1": "3" * 64}

    def key(*overrides: str, **others: str) -> str:
        recipe = ResolvedRecipe.of(load_recipe(file, overrides, needs_files=False))
        return stage_key(key_parts_of(recipe, CHECKED_ROWS, {**digests, **others}))

    assert key() != key(change)
    assert key() == key("stages.sft.learning_rate=0.5"), "no stage is a part of it"
    assert len({key(), *(key(**{role: "4" * 64}) for role in digests)}) == 4


def write(folder: Path, text: str) -> str:
    (folder / "recipe.yaml").write_text(text)
    return str(folder / "recipe.yaml")
