"""List the cases of ``problems_of_broken_recipes.json``: valid recipes, and the faults that are put into them.

``python -m tests.schemas.checks.broken_recipes`` loads every case again and writes what the loader reports today. Run it
only where a message is meant to change, and read the difference.
"""

import copy
import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.schemas.conftest import RECIPE
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.problems import Problem, RecipeError
from vantage.schemas.records.metrics import METRICS

FILE = Path(__file__).with_name("problems_of_broken_recipes.json")
CASES = 300

EVERY_SECTION = """\
recipe: every_section
model: {source: "builtin:tiny"}
models:
  other: {source: "builtin:nano"}
  best: {source: "models:/best@champion", otherwise: sft}
data:
  demos: {source: "builtin:arithmetic/demonstrations"}
  more: {source: "builtin:arithmetic_long/demonstrations"}
  pairs: {source: "builtin:arithmetic/preferences"}
  tasks: {source: "builtin:arithmetic/prompts"}
  files: {source: answers.jsonl, columns: {prompt: question, answer: result}, near_duplicates: {held_out_of: [demos, exam]}}
  ranked: {source: ranked.jsonl, columns: {prompt: prompt, responses: texts, ranks: ranks}}
  exam: {source: exam.jsonl, split: {test: all}}
mixtures:
  both: {parts: {demos: 7, more: 3}}
  asked: {parts: {tasks: 1, files: 1}}
verifiers:
  same: {source: "builtin:exact_match"}
  mine: {source: verifier.py}
benchmarks:
  school: {source: .}
rewards:
  main: {terms: [{model: reward}, {verifier: arithmetic, weight: 0.5}]}
  right: {terms: [{verifier: mine}]}
stages:
  sft: {kind: sft, data: both}
  pairs_of_sft: {kind: preference_collection, policy: sft, prompts: tasks, judge: {verifier: arithmetic}}
  reward: {kind: reward_model, init: sft, data: pairs_of_sft, centre_on: demos, gate: {metric: pair_accuracy, at_least: 0.6}}
  by_rank: {kind: reward_model, init: model, rankings: ranked}
  scored: {kind: rollout_collection, policy: sft, prompts: files, reward: main, samples_per_prompt: 4}
  value: {kind: value_pretraining, policy: sft, init: reward, reward: main, prompts: files, rollouts: scored, gate: [{metric: explained_variance, at_least: 0.3}]}
  policy: {kind: policy_optimization, algorithm: vapo, init: sft, critic: value, reward: main, prompts: files, ptx: demos}
  direct: {kind: dpo, init: sft, data: pairs}
  best_of: {kind: best_of_n, init: direct, prompts: asked, reward: right}
  judged: {kind: reward_evaluation, reward_model: reward, data: pairs}
  learned: {kind: benchmark_evaluation, policy: policy, benchmark: school, task: sums}
  evaluation:
    kind: evaluation
    candidate: policy
    baseline: best
    judge: {verifier: same}
    also: {model: other}
    prompts: exam
    demonstrations: demos
    gate: [{metric: accuracy_gain, at_least: 0.0, confidence: 0.9}, {metric: win_rate, at_least: 0.5}]
licenses: {model: MIT, data.files: CC0-1.0, policy: MIT, models.other: MIT}
publish:
  - {stage: policy, registered_model: small, alias: champion, after: evaluation}
  - {stage: reward, registered_model: scorer}
"""
BASES = {"small": RECIPE, "every_section": EVERY_SECTION}
"""Name → the text of a recipe without a fault."""

VALUES: tuple[Any, ...] = (None, True, 0, -1, 3, 0.5, "", "x", "Bad Name", "model", [], {}, [None], [3, "x"], {"a": 1}, ["sft"], {"kind": "sft"},
                           [[]], "all", "builtin:arithmetic/prompts", "builtin:arithmetic_long/preferences", {"metric": "x"})  # fmt: skip
"""Values that most fields do not take."""
FIELDS = ("init", "policy", "reference", "critic", "fresh_critic", "rollouts", "data", "rankings", "prompts", "demonstrations", "ptx", "reward",
          "candidate", "baseline", "judge", "also", "kind", "gate", "algorithm", "source", "columns", "otherwise", "split", "stage", "after", "alias",
          "terms", "parts", "held_out_of", "samples_per_prompt", "benchmark", "lora", "unknown_field")  # fmt: skip

Edit = tuple[list[str | int], Any]
"""A path and the value that stands there instead; ``REMOVE``: nothing does."""
REMOVE = "(remove)"


@cache
def plain(base: str) -> Any:
    """Return the plain values of a recipe without a fault."""
    return yaml.safe_load(BASES[base])


def broken(base: Any, edits: list[Edit]) -> Any:
    """Return a copy of plain values with the edits; one whose path is gone changes nothing."""
    values = copy.deepcopy(base)
    for path, value in edits:
        owner = values
        try:
            for part in path[:-1]:
                owner = owner[part]
            if value == REMOVE:
                del owner[path[-1]]
            else:
                owner[path[-1]] = copy.deepcopy(value)
        except (KeyError, IndexError, TypeError):
            continue
    return values


def edits_at_random(values: Any, chance: random.Random) -> list[Edit]:
    """Return one to three faults: a wrong type, name, kind or metric, an unknown field, a missing or a doubled part."""
    return [edit for _ in range(chance.randint(1, 3)) for edit in _fault(values, chance)]


def _fault(values: Any, chance: random.Random) -> list[Edit]:
    paths = list(_paths(values))
    names = [path for path in paths if isinstance(_at(values, path), str)]
    owners = [path for path in paths if isinstance(_at(values, path), dict)]
    known = [str(path[-1]) for path in paths if len(path) == 2] + ["model", "arithmetic", "arithmetic_long"]
    match chance.randrange(9):
        case 0:
            return [(chance.choice(paths), chance.choice(VALUES))]
        case 1:
            path = chance.choice(names)
            return [(path, _misspelt(str(_at(values, path)), chance))]
        case 2 | 3:
            return [(chance.choice(names), chance.choice(known))]
        case 4:
            return [(chance.choice(paths), REMOVE)]
        case 5:
            return [([*chance.choice(owners), chance.choice(FIELDS)], chance.choice((*known, *VALUES)))]
        case 6:  # an item of a section under another name, or twice
            path = chance.choice([path for path in paths if len(path) == 2])
            twin: Edit = ([path[0], chance.choice((*known, "renamed"))], _at(values, path))
            return [twin] if chance.random() < 0.5 else [twin, (path, REMOVE)]
        case 7:
            stage = chance.choice([path for path in paths if path[0] == "stages" and len(path) == 2])
            metric = chance.choice((*(metric.name for metric in METRICS), "pair_acuracy"))
            gate: dict[str, Any] = {"metric": metric, "at_least": 0.5}
            gate |= {"confidence": 0.9} if chance.random() < 0.5 else {}
            return [([*stage, "gate"], chance.choice((gate, [gate], [3, gate], [gate, gate])))]
        case _:
            return _from_the_whole(chance, known)


def _from_the_whole(chance: random.Random, known: list[str]) -> list[Edit]:
    """Return a fault in what few recipes have."""
    name = chance.choice(known)
    faults: list[Edit] = [
        (["licenses"], {name: "MIT", f"data.{name}": "MIT", "modle": "MIT"}),
        (["publish"], [{"stage": name, "registered_model": "m", "alias": "a", "after": name}] * 2),
        (["publish"], [{"stage": "policy", "registered_model": "m", "alias": "latest"}]),
        (["mixtures"], {"mix": {"parts": {name: 1, "mix": 1, chance.choice(known): 1}}}),
        (["models"], {name: {"source": "models:/m@a", "otherwise": chance.choice(known)}}),
        (["verifiers"], {name: {"source": "builtin:exact_match"}}),
        (["data", "tasks", "near_duplicates"], {"held_out_of": [name, "demos", "tasks"]}),
        (["data", "demos", "near_duplicates"], {"held_out_of": ["tasks", "files"]}),
        (["data", chance.choice(("tasks", "demos", "files")), "split"], {"test": "all"}),
        (["stages", "policy", "algorithm"], {"preset": "vapo", "positive_verifier": name}),
        (["rewards", "main", "terms"], {"model": name}),
    ]
    return [chance.choice(faults)]


def _misspelt(word: str, chance: random.Random) -> str:
    place = chance.randrange(len(word) + 1)
    return word[:place] + chance.choice("xe_1") + word[place + chance.randint(0, 1) :]


def _paths(values: Any, path: tuple[str | int, ...] = ()) -> Iterator[list[str | int]]:
    """Yield the paths of all parts, without that of the whole."""
    items: Any = (
        enumerate(values) if isinstance(values, list) else values.items() if isinstance(values, dict) else ()
    )
    for part, value in items:
        yield [*path, part]
        yield from _paths(value, (*path, part))


def _at(values: Any, path: list[str | int]) -> Any:
    for part in path:
        values = values[part]
    return values


def problems_of(values: Any, *, in_one_line: bool) -> list[Problem]:
    """Return what the loader reports, in its order. In one line, nothing is sorted by lines."""
    without_aliases = json.loads(json.dumps(values))
    text = yaml.safe_dump(
        without_aliases,
        sort_keys=False,
        default_flow_style=True if in_one_line else None,
        width=10**9 if in_one_line else 80,
    )
    try:
        parse_recipe(text, name="x.yaml", folder=Path("/nowhere"), needs_files=False)
    except RecipeError as error:
        return list(error.problems)
    return []


def _cases() -> Iterator[dict[str, Any]]:
    chance = random.Random(27)
    for number in range(CASES):
        base = chance.choice(list(BASES))
        yield {"base": base, "edits": edits_at_random(plain(base), chance), "in_one_line": number % 2 == 0}


def problems_of_case(case: dict[str, Any]) -> list[str]:
    """Return what the loader reports of a case of the file."""
    values = broken(plain(case["base"]), case["edits"])
    return [str(problem) for problem in problems_of(values, in_one_line=case["in_one_line"])]


def main() -> None:
    """Write the file: the cases that it has, or new ones where there is none, each with what the loader reports."""
    cases = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else list(_cases())
    lines = [json.dumps({**case, "problems": problems_of_case(case)}, ensure_ascii=False) for case in cases]
    FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
