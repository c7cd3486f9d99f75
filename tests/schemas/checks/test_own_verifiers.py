"""A recipe's own verifiers load or are refused at their place, are read by the right steps, and enter the right keys."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from tests.support.every import every
from vantage.schemas.checks.warnings import warnings
from vantage.schemas.loading.recipe_file import load_recipe, parse_recipe
from vantage.schemas.loading.validation import problems_of_names
from vantage.schemas.problems import RecipeError
from vantage.schemas.recipe.evaluations import PolicyEvaluation
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.rewards import Reward
from vantage.schemas.recipe.stages import BestOfN, PolicyOptimization
from vantage.schemas.recipe.terms import VerifierTerm
from vantage.schemas.recipe.verifiers import EXACT_MATCH, Verifier
from vantage.schemas.recipe.work import ImportVerifier, Work
from vantage.schemas.records.stage_key import differences, key_parts, stage_key
from vantage.schemas.steps import dependencies, ordered_steps, verifiers_of

PYTHON = "def verify(prompt, response, answer): return response == answer\n"


def with_verifiers(text: str, section: str) -> str:
    """Return the small recipe with a section of verifiers: the name in line 9, its value beside it."""
    return text.replace("rewards:\n", f"verifiers:\n  mine: {section}\nrewards:\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of the recipe, with a verifier's file in it."""
    (tmp_path / "gsm8k.py").write_text(PYTHON)
    return tmp_path


def refused(text: str, folder: Path, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, name="x.yaml", folder=folder, overrides=overrides)
    return str(caught.value).splitlines()


# -- what loads


def test_a_file_is_found_from_the_recipes_folder_on(text: str, folder: Path) -> None:
    recipe = parse_recipe(with_verifiers(text, "{source: gsm8k.py}"), folder=folder)
    assert recipe.verifiers == {"mine": Verifier(source=str(folder / "gsm8k.py"), function="verify")}
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe


def test_a_file_in_an_override_is_found_from_the_current_folder_on(
    text: str, folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path_factory.mktemp("here")
    (here / "other.py").write_text(PYTHON)
    monkeypatch.chdir(here)
    file = folder / "mine.yaml"
    file.write_text(with_verifiers(text, "{source: gsm8k.py}"))
    recipe = load_recipe(file, ["verifiers.mine.source=other.py", "verifiers.mine.function=check"])
    assert recipe.verifiers["mine"] == Verifier(source=str(here / "other.py"), function="check")


def test_a_comparison_with_the_answer_loads(text: str, folder: Path) -> None:
    section = r"""{source: "builtin:exact_match", extract: '\\boxed\{([^}]*)\}'}"""
    recipe = parse_recipe(with_verifiers(text, section), folder=folder)
    assert recipe.verifiers["mine"] == Verifier(source=EXACT_MATCH, extract=r"\\boxed\{([^}]*)\}")
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe


@pytest.mark.parametrize("extract", ["#### (.*)", "(?:a|b)+(c)", "(?P<answer>[0-9]+)", r"\((.)\)"])
def test_one_group_counts(extract: str) -> None:
    """An expression of ``extract`` may have one capturing group, beside groups that capture nothing."""
    assert Verifier(source=EXACT_MATCH, extract=extract).extract == extract


# -- what is refused


@every(
    ("section", "said"),
    [
        ("{source: nowhere.py}", "verifiers.mine.source: there is no file {folder}/nowhere.py; correct the path"),
        ("{source: folder.py}", "verifiers.mine.source: there is no file {folder}/folder.py; correct the path"),
        ("{source: gsm8k.js}", "verifiers.mine.source: 'gsm8k.js' is no Python file; name a .py file, or "
         "builtin:exact_match"),
        ('{source: ""}', "verifiers.mine.source: '' is no Python file; name a .py file, or builtin:exact_match"),
        ('{source: "builtin:exact"}', "verifiers.mine.source: there is no built-in verifier 'builtin:exact'; "
         "did you mean 'builtin:exact_match'?"),
        ('{source: "?"}', "verifiers.mine.source: is left open by this recipe; give it with --set verifiers.mine.source=…"),
        ("{function: verify}", "verifiers.mine.source: is required; add `source: …`"),
        ("{source: gsm8k.py, function: 'a b'}", "verifiers.mine.function: 'a b' is not a valid name; "),
        ("{source: gsm8k.py, reward: 1}", "verifiers.mine.reward: there is no field 'reward' here"),
        ("gsm8k.py", "verifiers.mine: 'gsm8k.py' must be a mapping (field: value)"),
        # -- extract
        ('{source: "builtin:exact_match", extract: "a(b"}', "verifiers.mine.extract: 'a(b' is not a regular expression: "
         "missing ), unterminated subpattern at position 1; correct it"),
        ('{source: "builtin:exact_match", extract: "ab"}', "verifiers.mine.extract: 'ab' has 0 groups; put one pair of "
         "parentheses around what is compared with the answer ((?:…) groups without counting)"),
        ('{source: "builtin:exact_match", extract: "(a)|(b)"}', "verifiers.mine.extract: '(a)|(b)' has 2 groups; "),
        ("{source: gsm8k.py, extract: (a)}", "verifiers.mine: extract='(a)' belongs to builtin:exact_match; remove it, "
         "or let the file's function do it"),
        ('{source: "builtin:exact_match", function: check}', "verifiers.mine: builtin:exact_match has no "
         "function=check; remove it"),
    ],
)  # fmt: skip
def test_refusals_name_the_line_the_field_and_the_remedy(
    text: str, folder: Path, section: str, said: str
) -> None:
    (folder / "folder.py").mkdir(exist_ok=True)
    (folder / "gsm8k.js").write_text("")
    [line] = refused(with_verifiers(text, section), folder)
    assert line.startswith(f"x.yaml:8: {said.format(folder=folder)}")


def test_a_built_in_verifiers_name_is_taken(text: str, folder: Path) -> None:
    own = with_verifiers(text, "{source: gsm8k.py}").replace("  mine:", "  arithmetic:")
    assert refused(own, folder) == [
        "x.yaml:8: verifiers.arithmetic: 'arithmetic' is a built-in verifier, and would mean two rules; "
        "give yours another name"
    ]


def test_too_many_are_refused(plain: dict[str, Any]) -> None:
    plain["verifiers"] = {f"v{n}": {"source": EXACT_MATCH} for n in range(201)}
    with pytest.raises(ValueError, match="verifiers"):
        Recipe.model_validate(plain)


def named_everywhere(plain: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the small recipe with a verifier in each of the places that take one."""
    plain["rewards"]["main"]["terms"] = [{"model": "reward"}, {"verifier": name, "weight": 2.0}]
    plain["stages"]["policy"]["algorithm"] = {"preset": "vapo", "positive_verifier": name}
    plain["stages"]["evaluation"]["judge"] = {"verifier": name}
    plain["stages"]["collected"] = {
        "kind": "preference_collection",
        "policy": "sft",
        "prompts": "tasks",
        "judge": {"verifier": name},
    }
    return plain


def test_an_own_verifier_may_be_named_wherever_a_built_in_one_may(plain: dict[str, Any]) -> None:
    plain["verifiers"] = {"mine": {"source": "mine.py"}}
    assert list(problems_of_names(named_everywhere(plain, "mine"))) == []
    assert [str(problem) for problem in problems_of_names(named_everywhere(plain, "mien"))] == [
        f"{path}: no verifier is called 'mien'; did you mean 'mine'?"
        for path in (
            "rewards.main.terms.1.verifier",
            "stages.policy.algorithm.positive_verifier",
            "stages.evaluation.judge.verifier",
            "stages.collected.judge.verifier",
        )
    ]


@pytest.mark.parametrize(
    ("tasks", "remedy"),
    [
        ({"source": "builtin:arithmetic/prompts"}, "name another verifier"),
        ({"source": "x.jsonl", "columns": {"prompt": "question"}}, "add data.tasks.columns.answer"),
        ({"source": "x.jsonl", "columns": {"prompt": "question", "answer": "final"}}, None),
        ({"source": "x.jsonl"}, None),  # the file may have a column of that name
    ],
)
def test_a_comparison_is_refused_on_prompts_that_are_known_to_have_no_answers(
    plain: dict[str, Any], tasks: dict[str, Any], remedy: str | None
) -> None:
    plain["verifiers"] = {"mine": {"source": EXACT_MATCH}}
    plain["data"]["tasks"] = tasks
    places = {
        "value": "rewards.main.terms.1.verifier",
        "policy": "stages.policy.algorithm.positive_verifier",
        "evaluation": "stages.evaluation.judge.verifier",
        "collected": "stages.collected.judge.verifier",
    }
    said = {str(problem) for problem in problems_of_names(named_everywhere(plain, "mine"))}
    assert said == {
        f"{path}: 'mine' compares with answers, and data.tasks, which {stage} reads, has none; {remedy}"
        for stage, path in [*places.items(), ("policy", places["value"])]
        if remedy
    }


@every("section", [3, ["mine"], {"mine": None}, {"mine": 3}, {3: {"source": "x.py"}}])
def test_other_shapes_are_left_to_pydantic(plain: dict[str, Any], section: Any) -> None:
    plain["verifiers"] = section
    assert [problem for problem in problems_of_names(plain) if problem.path[0] == "verifiers"] == []


# -- who reads them


def test_each_reader_has_the_verifiers_step_as_an_input(plain: dict[str, Any]) -> None:
    plain["verifiers"] = {"mine": {"source": EXACT_MATCH}, "spare": {"source": EXACT_MATCH}}
    recipe = Recipe.model_validate(named_everywhere(plain, "mine"))
    inputs = dependencies(recipe)
    assert inputs["verifiers.mine"] == {"prompts.0": "data.tasks"}, "it is tried on what it will judge"
    assert "verifiers.spare" not in inputs
    assert warnings(recipe, dependencies(recipe))[0] == "verifiers.spare: no stage reads it"
    read = {
        step: {role for role, source in roles.items() if source == "verifiers.mine"}
        for step, roles in inputs.items()
    }
    assert {step: roles for step, roles in read.items() if roles} == {
        "value": {"reward.main.1"},
        "policy": {"reward.main.1", "positive_verifier"},
        "evaluation": {"judge"},
        "collected": {"judge"},
    }
    assert inputs["policy"]["reward.main.0"] == "reward"
    assert ordered_steps(recipe)[:5] == ["model", "data.demos", "data.pairs", "data.tasks", "verifiers.mine"]


def test_a_built_in_verifier_is_no_step(plain: dict[str, Any]) -> None:
    recipe = Recipe.model_validate(named_everywhere(plain, "arithmetic"))
    assert verifiers_of(recipe, recipe.stages["policy"]) == {
        "reward.main.1": "arithmetic",
        "positive_verifier": "arithmetic",
    }
    inputs = dependencies(recipe)
    read = {source for roles in inputs.values() for source in roles.values()}
    assert not [step for step in (*inputs, *read) if step.startswith("verifiers")]


def test_a_built_in_verifier_is_tried_on_prompts_that_are_not_its_own_and_stands_in_nobodys_key(
    plain: dict[str, Any],
) -> None:
    recipe = Recipe.model_validate(named_everywhere(plain, "arithmetic"))
    plain["data"]["tasks"] = {"source": "questions.jsonl"}
    foreign = Recipe.model_validate(plain)
    assert dependencies(foreign) == {
        **dependencies(recipe),
        "verifiers.arithmetic": {"prompts.0": "data.tasks"},
    }
    work = ImportVerifier(verifier=Verifier(source="builtin:arithmetic"))
    parts = parts_of(work, **{"prompts.0": digest("questions")})
    assert parts["inputs"] == {"prompts.0": digest("questions")}


# -- keys


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def parts_of(
    work: Work, *roles: str, rewards: dict[str, Reward] | None = None, **inputs: str
) -> dict[str, Any]:
    return key_parts(
        work,
        generation=Generation(),
        rewards=rewards or {},
        seed=17,
        inputs={**{role: digest(role) for role in roles}, **inputs},
        extra={},
    )


def test_a_file_is_known_by_what_it_holds_and_a_comparison_by_its_words() -> None:
    def parts(source: str, content: str | None = None, **fields: Any) -> dict[str, Any]:
        inputs = {} if content is None else {"source": digest(content)}
        return parts_of(ImportVerifier(verifier=Verifier(source=source, **fields)), **inputs)

    assert parts("/a/x.py", PYTHON) == parts("/b/y.py", PYTHON)
    assert differences(parts("/a/x.py", PYTHON), parts("/a/x.py", "")) == [
        f"inputs.source: {digest(PYTHON)[:12]} → {digest('')[:12]}"
    ]
    assert differences(parts("/a/x.py", PYTHON), parts("/a/x.py", PYTHON, function="check")) == [
        "configuration.verifier.function: verify → check"
    ]
    with pytest.raises(ValueError, match="import_verifier stage: the content digest of 'source' is missing"):
        parts("/a/x.py")
    assert differences(parts(EXACT_MATCH), parts(EXACT_MATCH, extract="(a)")) == [
        "configuration.verifier.extract: null → (a)"
    ]


def own_reward(name: str) -> dict[str, Reward]:
    return {"main": Reward(terms=(VerifierTerm(verifier=name),))}


def best_of_n(name: str, verifier: str) -> dict[str, Any]:
    work = BestOfN(kind="best_of_n", init="sft", reward="main", prompts="tasks")
    return parts_of(work, "init", "prompts", rewards=own_reward(name), **{"reward.main.0": digest(verifier)})


def evaluation(name: str, verifier: str) -> dict[str, Any]:
    work = PolicyEvaluation.model_validate(
        {
            "kind": "evaluation",
            "candidate": "a",
            "baseline": "b",
            "judge": {"verifier": name},
            "prompts": "tasks",
        }
    )
    return parts_of(work, "candidate", "baseline", "prompts", judge=digest(verifier))


def policy(name: str, verifier: str) -> dict[str, Any]:
    work = PolicyOptimization.model_validate(
        {
            "kind": "policy_optimization",
            "algorithm": {"preset": "grpo", "positive_nll_coef": 0.1, "positive_verifier": name},
            "init": "sft",
            "reward": "main",
            "prompts": "tasks",
        }
    )
    rewards = {"main": Reward(terms=(VerifierTerm(verifier="arithmetic"),))}
    return parts_of(work, "init", "prompts", rewards=rewards, positive_verifier=digest(verifier))


PLACES = {
    "rewards.reward.terms.0.verifier": best_of_n,
    "configuration.judge.verifier": evaluation,
    "configuration.algorithm.positive_verifier": policy,
}


@pytest.mark.parametrize("place", list(PLACES))
def test_a_reader_knows_it_by_content_and_not_by_name(place: str) -> None:
    parts = PLACES[place]
    assert stage_key(parts("mine", "one")) == stage_key(parts("other_name", "one"))
    assert differences(parts("mine", "one"), parts("mine", "two")) == [
        f"{place}: {digest('one')[:12]} → {digest('two')[:12]}"
    ]


def test_a_readers_key_is_refused_without_the_content() -> None:
    work = BestOfN(kind="best_of_n", init="sft", reward="main", prompts="tasks")
    with pytest.raises(
        ValueError, match=r"best_of_n stage: the content digest of 'reward.main.0' is missing"
    ):
        parts_of(work, "init", "prompts", rewards=own_reward("mine"))
    with pytest.raises(ValueError, match=r"best_of_n stage does not read 'reward.main.0'"):
        best_of_n("arithmetic", "one")
