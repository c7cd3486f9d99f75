"""The stage keys of every recipe, and the resolved recipe in ``run.json``, equal a record.

    python tests/attempts/test_recorded_keys.py

writes the record anew. A key that moves throws every artifact in every store away: only a raised revision, or a changed
recipe, is a reason to.
"""

import hashlib
import json
import tempfile
from pathlib import Path

from vantage.attempts.jobs import key_parts_of
from vantage.runs.resolving import resolve_rates
from vantage.schemas.canonical_json import canonical_json
from vantage.schemas.loading.recipe_file import load_recipe, parse_recipe
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.records.stage_key import stage_key
from vantage.schemas.steps import dependencies, ordered_steps
from vantage.schemas.sweep import load_sweep

RECORD = Path(__file__).with_name("recorded_keys.json")

OTHER_KINDS = """
recipe: others
model: {source: "builtin:tiny", chat: false}
data:
  pairs: {source: "builtin:arithmetic/preferences", rows: 100}
  ranked: {source: rows.jsonl}
  tasks: {source: rows.jsonl, columns: {prompt: question, answer: answer}, split: {validation: 8, test: 0.2}}
  demos: {source: rows.jsonl}
verifiers:
  mine: {source: mine.py}
  exact: {source: "builtin:exact_match", extract: "#### (.*)"}
rewards:
  main: {terms: [{model: reward, weight: 0.5}, {verifier: exact, wrong: -1}, {verifier: arithmetic}]}
  replaced: {terms: [{verifier: mine, weight: 2}], missing_eos: {replace: -1.5}}
stages:
  sampled: {kind: preference_collection, policy: model, prompts: tasks, judge: {verifier: mine}}
  shown: {kind: preference_collection, policy: model, demonstrations: demos}
  dpo: {kind: dpo, init: model, data: sampled, seed: 3}
  held: {kind: dpo, init: dpo, reference: model, data: shown}
  reward: {kind: reward_model, init: dpo, data: pairs, centre_on: demos}
  ranks: {kind: reward_model, init: model, rankings: ranked}
  best: {kind: best_of_n, init: dpo, reward: main, prompts: tasks}
  value: {kind: value_pretraining, policy: dpo, init: reward, reward: main, prompts: tasks}
  policy: {kind: policy_optimization, algorithm: {preset: ppo, positive_nll_coef: 0.1, positive_verifier: exact,
           ptx_coef: 0.1}, init: dpo, critic: value, ptx: demos, reward: main, prompts: tasks}
  fresh: {kind: policy_optimization, algorithm: vc_ppo, init: dpo, fresh_critic: model, reward: replaced,
          prompts: tasks}
  grouped: {kind: policy_optimization, algorithm: grpo, init: best, critic: value, ptx: demos, reward: replaced,
            prompts: tasks, learning_rate: 1.0e-5, batch_size: 64, minibatch_size: 64}
  judged: {kind: evaluation, candidate: policy, baseline: fresh, judge: {reward: main}, prompts: tasks}
  verified: {kind: evaluation, candidate: grouped, baseline: held, judge: {verifier: exact}, prompts: tasks}
"""
"""What the recipes that come with Vantage leave out."""

LABELS_AND_ROUNDS = """
recipe: labels_and_rounds
model: {source: "builtin:tiny", chat: false}
data:
  labelled: {source: "builtin:arithmetic/labelled_responses", rows: 100}
  pairs: {source: "builtin:arithmetic/preferences", rows: 100}
  tasks: {source: "builtin:arithmetic/prompts", rows: 100}
rewards:
  right: {terms: [{verifier: arithmetic}]}
stages:
  kto: {kind: kto, init: model, data: labelled, undesirable_weight: 1.5}
  simpo: {kind: dpo, init: model, data: pairs, loss: simpo, beta: 2.0, target_margin: 1.0}
  collected: {kind: preference_collection, policy: kto, prompts: tasks, judge: {reward: right}}
  repeated: {kind: dpo, init: kto, data: collected, rounds: 2, label_smoothing: 0.1}
"""


def all_recipes(folder: Path) -> dict[str, Recipe]:
    """Return name → recipe, with every learning rate written out. ``folder`` takes the files that they read."""
    (folder / "rows.jsonl").write_text('{"prompt": "1+1?"}\n')
    (folder / "mine.py").write_text("def verify(prompt, response, answer): ...\n")
    file = folder / "rows.jsonl"
    own = [
        "model.source=builtin:tiny",
        *(f"data.{name}.source={file}" for name in ("demonstrations", "preferences")),
    ]
    recipes = {
        "others": parse_recipe(OTHER_KINDS, folder=folder),
        "labels_and_rounds": parse_recipe(LABELS_AND_ROUNDS, folder=folder),
        **{name: load_recipe(name) for name in ("quickstart", "long_dial", "study_value_bias")},
        **{name: load_recipe(name, own) for name in ("instruct", "smollm2")},
    }
    for sweep in ("ablation_vapo", "ablation_interplay"):
        recipes |= {f"{sweep}.{arm}": recipe for arm, recipe in load_sweep(sweep).recipes.items()}
    return {name: resolve_rates(recipe)[0] for name, recipe in recipes.items()}


def recorded(recipe: Recipe, folder: Path) -> dict[str, str]:
    """Return each step's stage key, computed with the sha256 of the input steps' names as the inputs' digests. Under ""
    is the sha256 of the recipe's JSON.
    """
    inputs = dependencies(recipe)
    text = canonical_json(recipe.model_dump(mode="json")).replace(str(folder), "FOLDER")
    found = {"": hashlib.sha256(text.encode()).hexdigest()}
    for step in ordered_steps(recipe):
        digests = {role: hashlib.sha256(read.encode()).hexdigest() for role, read in inputs[step].items()}
        found[step] = stage_key(key_parts_of(recipe, step, digests))
    return found


def test_no_key_and_no_recorded_recipe_has_moved(tmp_path: Path) -> None:
    record = json.loads(RECORD.read_text())
    present = {name: recorded(recipe, tmp_path) for name, recipe in all_recipes(tmp_path).items()}
    assert present == record


def test_the_record_has_every_kind_of_stage(tmp_path: Path) -> None:
    kinds = {stage.kind for recipe in all_recipes(tmp_path).values() for stage in recipe.stages.values()}
    assert len(kinds) == 9


def test_a_resolved_recipe_is_read_again_as_it_was(tmp_path: Path) -> None:
    for recipe in all_recipes(tmp_path).values():
        again = type(recipe).model_validate_json(recipe.model_dump_json())
        assert again == recipe


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        written = {each: recorded(recipe, place) for each, recipe in all_recipes(place).items()}
    RECORD.write_text(json.dumps(written, indent=1) + "\n")
