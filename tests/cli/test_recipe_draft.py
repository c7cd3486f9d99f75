"""``vantage init`` writes the right recipes from its answers, and estimates lengths."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from vantage.cli import init, room
from vantage.cli.data_columns import find_columns
from vantage.cli.recipe_draft import DataDraft, Draft, Reward, recipe_text

DATA = {name: DataDraft(f"{name}.jsonl", name) for name in ("demonstrations", "preferences", "prompts")}  # type: ignore[arg-type]


def written(reward: Reward, *contents: str, **others: Any) -> dict[str, Any]:
    draft = Draft(
        name="mine", model="model", reward=reward, data={name: DATA[name] for name in contents}, **others
    )
    found: dict[str, Any] = yaml.safe_load(recipe_text(draft, file="mine.yaml"))
    return found


@pytest.mark.parametrize(
    ("reward", "contents", "start", "prompts", "published"),
    [
        ("model", ("demonstrations", "preferences"), "sft", "demonstrations", "policy"),
        ("model", ("preferences", "prompts"), "model", "prompts", "policy"),
        ("verifier", ("demonstrations", "prompts"), "sft", "prompts", "policy"),
        ("none", ("demonstrations", "preferences"), "sft", None, "dpo"),
        ("none", ("demonstrations",), "sft", None, "sft"),
    ],
)
def test_each_stage_reads_what_it_should(
    reward: Reward, contents: tuple[str, ...], start: str, prompts: str | None, published: str
) -> None:
    recipe = written(reward, *contents)
    stages = recipe["stages"]
    [publish] = recipe["publish"]
    assert publish["stage"] == published
    assert ("after" in publish) == (reward != "none"), "an evaluation comes before the alias moves"
    for name in ("reward", "value", "policy", "dpo"):
        if name in stages:
            assert stages[name].get("init") == ("reward" if name == "value" else start)
    if reward == "none":
        assert "rewards" not in recipe and "evaluation" not in stages
        return
    assert stages["policy"]["reference"] == stages["evaluation"]["baseline"] == start
    assert stages["policy"]["prompts"] == stages["evaluation"]["prompts"] == prompts
    [term] = recipe["rewards"]["main"]["terms"]
    assert (list(term), recipe["rewards"]["main"]["missing_eos"]["subtract"]) == (
        (["model"], 1.0) if reward == "model" else (["verifier"], 0.5)
    ), "half of what a right answer of a verifier earns"


@pytest.mark.parametrize(
    ("gpus", "is_sharded", "batch", "resources"),
    [
        (0, False, 64, None),
        (1, True, 256, {"gpus": 1}),
        (8, False, 256, {"gpus": 8}),
        (8, True, 256, {"gpus": 8, "distributed": {"strategy": "fsdp2"}}),
    ],
)
def test_sizes_and_layout_are_those_of_the_hardware(
    gpus: int, is_sharded: bool, batch: int, resources: dict[str, Any] | None
) -> None:
    stages = written("model", "demonstrations", "preferences", gpus=gpus, is_sharded=is_sharded)["stages"]
    assert stages["policy"]["batch_size"] == batch
    for name in ("sft", "reward", "value", "policy"):
        assert stages[name].get("resources") == resources
        assert stages[name].get("precision") == ("auto" if gpus else None)
    assert stages["evaluation"].get("resources") == ({"gpus": gpus} if gpus else None), (
        "it holds no optimizer"
    )


def test_labels_and_columns_of_the_data_are_written() -> None:
    judged = DataDraft(
        "judged.jsonl", "preferences", {"prompt": "question"}, {"first": ["A"], "second": ["B"]}, held_out=0.1
    )
    draft = Draft(name="mine", model="model", reward="none", data={"preferences": judged})
    data = yaml.safe_load(recipe_text(draft, file="mine.yaml"))["data"]["preferences"]
    assert data["columns"] == {"prompt": "question"}
    assert data["labels"] == {"first": ["A"], "second": ["B"]}
    assert data["split"] == {"validation": 0.1, "test": 0.1}


# Lengths


def rows(*lengths: int, response: int = 200) -> list[dict[str, Any]]:
    return [{"prompt": "a" * length, "chosen": "b" * response, "rejected": "c"} for length in lengths]


@pytest.mark.parametrize(
    ("shape", "measured", "expected"),
    [
        # three bytes a token, 16 for the template, up to the next 32: 300 / 3 + 16 = 116 → 128; 200 / 3 + 16 = 82 → 96
        ((32_000, 4096), rows(30, 300), (128, 96)),  # otherwise one of two rows would be left out
        ((32_000, 4096), rows(*[30] * 199, 300), (32, 96)),
        ((32_000, 4096), rows(*[30] * 180, *[300] * 20), (128, 96)),
        ((None, None), rows(300), (128, 96)),
        ((None, None), rows(345), (160, 96)),
        # a vocabulary of letters: one byte a token
        ((300, 4096), rows(300), (320, 224)),
        # a short response has room for a longer one
        ((32_000, 4096), rows(300, response=2), (128, 64)),
        # 128 + 96 of 160 positions: the prompt has the half, and the response the rest
        ((32_000, 160), rows(300), (80, 80)),
        # no text is longer than 1,024
        ((300, None), rows(9000), (1024, 224)),
    ],
)
def test_lengths_have_room_for_nearly_all_rows(
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int | None, int | None],
    measured: list[dict[str, Any]],
    expected: tuple[int, int],
) -> None:
    monkeypatch.setattr(room, "_shape_of", lambda model: shape)
    assert room.lengths_for("model", [measured]) == expected


def test_without_responses_there_is_room_for_256_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_shape_of", lambda model: (32_000, None))
    assert room.lengths_for("model", [[{"prompt": "a"}]]) == (32, 256)


@pytest.mark.parametrize(
    ("field", "positions"), [("max_position_embeddings", 77), ("n_positions", 77), ("n_ctx", None)]
)
def test_positions_are_read_by_both_names(tmp_path: Path, field: str, positions: int | None) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "gpt2", "vocab_size": 12, "{field}": 77}}')
    assert room._shape_of(str(tmp_path)) == (12, positions)


# Places and names


@pytest.mark.parametrize(
    ("target", "file"),
    [("a.yaml", "a.yaml"), ("a.yml", "a.yml"), ("a", "a/recipe.yaml"), ("a.json", "a.json/recipe.yaml")],
)
def test_a_target_is_a_file_of_yaml_or_a_folder(target: str, file: str) -> None:
    assert init._file_of(Path(target)) == Path(file)


@pytest.mark.parametrize(
    ("file", "name"), [("My First.yaml", "my-first"), ("2nd try.yaml", "nd-try"), ("42.yaml", "recipe")]
)
def test_a_recipe_is_named_after_its_file(file: str, name: str) -> None:
    assert init._name_of(None, Path(file)) == name
    assert init._name_of("own", Path(file)) == "own"


def given(**flags: Any) -> init.Given:
    names = ("model", "demonstrations", "preferences", "prompts", "reward", "verifier", "lora", "gpus")
    return init.Given(**{name: flags.get(name) for name in names})


@pytest.mark.parametrize(
    ("flags", "reward"),
    [
        ({}, "model"),
        ({"preferences": "p"}, "model"),
        ({"preferences": "p", "prompts": "q"}, "model"),
        ({"prompts": "q"}, "verifier"),
        ({"verifier": "v.py", "preferences": "p"}, "verifier"),
        ({"demonstrations": "d"}, "none"),
        ({"demonstrations": "d", "preferences": "p"}, "model"),
        ({"demonstrations": "d", "reward": "verifier"}, "verifier"),
    ],
)
def test_the_reward_follows_from_what_is_given(flags: dict[str, str], reward: str) -> None:
    assert init._reward_of(given(**flags)) == reward


@pytest.mark.parametrize(
    ("lora", "gpus", "weights", "is_sharded"),
    [
        (None, 8, 7_000_000_000, True),  # 16 bytes each are more than 60 GB
        (True, 8, 7_000_000_000, False),
        (None, 1, 7_000_000_000, False),
        (None, 8, 1_000_000_000, False),
        (None, 8, None, False),
    ],
)
def test_only_weights_that_do_not_fit_are_sharded(
    monkeypatch: pytest.MonkeyPatch, lora: bool | None, gpus: int, weights: int | None, is_sharded: bool
) -> None:
    monkeypatch.setattr(room, "num_weights", lambda model: weights)
    draft, _ = init._draft(given(lora=lora, gpus=gpus), Path("recipe.yaml"), None)
    assert draft.is_sharded == is_sharded


@pytest.mark.parametrize(("count", "held_out"), [(100, 0.1), (999, 0.1), (1000, 0.05), (1500, 0.05)])
def test_a_small_file_holds_out_a_tenth(tmp_path: Path, count: int, held_out: float) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(f'{{"prompt": "{n}?", "chosen": "a", "rejected": "b"}}\n' for n in range(count)))
    draft, _ = init._draft(given(preferences=str(file), gpus=0), tmp_path / "recipe.yaml", None)
    assert draft.data["preferences"].held_out == held_out


def test_all_datasets_hold_out_the_larger_share(tmp_path: Path) -> None:
    few, many = tmp_path / "few.jsonl", tmp_path / "many.jsonl"
    few.write_text('{"prompt": "a?", "chosen": "a", "rejected": "b"}\n' * 3)
    many.write_text('{"prompt": "a?", "response": "a"}\n' * 1500)
    draft, _ = init._draft(
        given(preferences=str(few), demonstrations=str(many), gpus=0), tmp_path / "recipe.yaml", None
    )
    assert {each.held_out for each in draft.data.values()} == {0.1}


def test_one_answer_without_the_mark_is_enough_for_exact_match(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    for last, own in (("#### 3", True), ("3", False)):
        prompts.write_text(
            f'{{"question": "a?", "answer": "#### 2"}}\n{{"question": "b?", "answer": "{last}"}}\n'
        )
        _, own_verifier = init._draft(given(prompts=str(prompts), gpus=0), tmp_path / "recipe.yaml", None)
        assert own_verifier is own


@pytest.mark.parametrize("bad", ['{"prompt": {"a": 1}, "chosen": "a", "rejected": "b"}', "[]"])
def test_a_large_file_with_a_bad_row_at_its_beginning_is_still_large(bad: str, tmp_path: Path) -> None:
    row = '{"prompt": "a?", "chosen": "a", "rejected": "b"}\n'
    (tmp_path / "pairs.jsonl").write_text(f"{bad}\n{row * 1500}")
    assert len(find_columns(tmp_path / "pairs.jsonl", "preferences").rows) == 999
    asked = given(preferences=str(tmp_path / "pairs.jsonl"), gpus=0)
    draft, _ = init._draft(asked, tmp_path / "recipe.yaml", None)
    assert draft.data["preferences"].held_out == 0.05


@pytest.mark.parametrize(
    ("reward", "contents"),
    [
        ("model", {"demonstrations", "preferences", "prompts"}),
        ("verifier", {"demonstrations", "prompts"}),
        ("none", {"demonstrations"}),
    ],
)
def test_a_demo_reads_what_its_reward_needs(reward: Reward, contents: set[str]) -> None:
    sources = init._sources_of(given(), reward, has_files=False)
    assert {content for content, source in sources.items() if source} == contents
    assert set(sources.values()) <= {None, *(f"builtin:arithmetic/{content}" for content in contents)}


def test_dpo_samples_no_prompts() -> None:
    sources = init._sources_of(given(preferences="p", prompts="q"), "none", has_files=True)
    assert sources == {"demonstrations": None, "preferences": "p"}


def test_a_second_recipe_in_the_folder_uses_the_same_verifier(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"question": "a?", "answer": "#### 2"}\n')
    for name in ("first.yaml", "second.yaml"):
        asked = given(prompts=str(tmp_path / "prompts.jsonl"), gpus=0)
        draft, own = init._draft(asked, tmp_path / name, None)
        assert own
        init._write(draft, tmp_path / name, own_verifier=own, force=False)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        *("first.yaml", "prompts.jsonl", "second.yaml", "verifier.py")
    ]
    (tmp_path / "verifier.py").write_text("mine")
    with pytest.raises(ValueError, match=r"verifier.py exists and is not overwritten"):
        init._write(draft, tmp_path / "third.yaml", own_verifier=True, force=False)
    assert not (tmp_path / "third.yaml").exists()
