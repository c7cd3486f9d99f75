"""A stage kind, a switch, a fact of an attempt, an engine, a storage and a reward term can each be added with few files
(docs/decisions/0052).

Each example is written into a copy of the tree, and then used there: a recipe is loaded, planned, estimated, and run
stage by stage as plain functions.
"""

import filecmp
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import boto3
import pyarrow.parquet as pq
import pytest

from tests.support.extensions import (
    ENGINE,
    ENGINE_RECIPE,
    FACT,
    KIND,
    KIND_RECIPE,
    STORAGE,
    SWITCH,
    SWITCH_RECIPE,
    Extension,
)
from tests.support.fork_server import WITH_TORCH
from tests.support.packages import ROOT, copy_packages

STAGE_CLASS = '''
"""Recipe class of the stage that counts long demonstrations."""

from typing import Literal

from vantage.schemas.recipe.fields import Count, Name
from vantage.schemas.recipe.stage import Stage


class LengthCount(Stage):
    """Count the demonstrations that are longer than a limit."""

    kind: Literal["length_count"]
    data: Name
    """A dataset of demonstrations."""
    longest: Count = 3
    """Characters of the longest response that is not counted."""
'''
STAGE_TASK = '''
"""Count the responses that are longer than a limit."""

from vantage.schemas.recipe.length_count import LengthCount
from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks.data.rows import read_rows, write_rows
from vantage.tasks.data.splits import TRAIN


def run(job: StageJob[LengthCount]) -> StageResult:
    """Write the long rows, and report their number."""
    rows = read_rows(job.inputs["data"], TRAIN)
    long = [row for row in rows if len(row["response"]) > job.work.longest]
    write_rows(job.output, "long", long)
    return StageResult(metrics={"train_rows": len(long), "source_rows": len(rows)})
'''
STAGE_ROW = """
    Kind(
        work=LengthCount,
        module="vantage.tasks.length_count",
        makes="evaluation",
        revision=1,
        data={"data": "demonstrations"},
        numbers=("train_rows", "source_rows"),
    ),
"""
STAGE_RECIPE = """
recipe: counted
model: {source: "builtin:tiny"}
data:
  demonstrations: {source: "builtin:arithmetic/demonstrations", rows: 200}
stages:
  long: {kind: length_count, data: demonstrations, longest: 30, gate: {metric: train_rows, at_least: 1}}
"""

TERM_CLASS = '''
class LengthTerm(RewardTerm):
    """Minus the characters of a response beyond a limit."""

    max_length: Annotated[int, Field(ge=0, strict=True)]
    """Characters that cost nothing."""

    @property
    def name(self) -> str:
        """Its only one."""
        return "max_length"


'''
TERM_ROW = """
    TermKind(term=LengthTerm, field="max_length", module="vantage.tasks.rewards.length_scores"),
"""
TERM_SCORER = '''
"""A term that takes off what is too long."""

import torch
from torch import Tensor

from vantage.schemas.recipe.terms import LengthTerm
from vantage.tasks.rewards.term_scores import Responses, Source, TermScores


def load(term: LengthTerm, source: Source) -> TermScores:
    """Minus the characters beyond the term's limit."""

    def scores(given: Responses) -> Tensor:
        beyond = [min(term.max_length - len(response), 0) for response in given.responses]
        return torch.tensor(beyond, dtype=torch.float32, device=given.device)

    return scores
'''
TERM_RECIPE = """
recipe: shortened
model: {source: "builtin:tiny"}
generation: {max_response_tokens: 8}
data:
  prompts: {source: "builtin:arithmetic/prompts", rows: 20, split: {validation: 8, test: 8}}
rewards:
  short: {terms: [{max_length: 2, weight: 0.5}, {verifier: arithmetic}]}
stages:
  best:
    {kind: best_of_n, init: model, reward: short, prompts: prompts, iterations: 1, batch_size: 8, minibatch_size: 2,
     samples_per_prompt: 4, validation_samples: 8, learning_rate: 1.0e-4}
"""

DRIVE = """
import json, sys
from pathlib import Path

from vantage.attempts.jobs import key_parts_of, rewards_of, seed_of, work_of
from vantage.runs.resolving import load_resolved
from vantage.schemas.records.job import StageJob
from vantage.schemas.records.stage_key import stage_key
from vantage.schemas.steps import dependencies, ordered_steps
from vantage.tasks.stages import run_stage

recipe, _ = load_resolved(sys.argv[1], [])
folder, digests, metrics = Path(sys.argv[2]), {}, {}
for step in ordered_steps(recipe):
    inputs = dependencies(recipe)[step]
    key = stage_key(key_parts_of(recipe, step, {role: digests[read] for role, read in inputs.items()}))
    output = folder / "made" / step
    output.mkdir(parents=True)
    job = StageJob(
        run_id="r", name=step, attempt=1, stage_key=key, seed=seed_of(recipe, step), work=work_of(recipe, step),
        generation=recipe.generation, rewards=rewards_of(recipe, step), scratch=folder / "scratch" / key, output=output,
        inputs={role: folder / "made" / read for role, read in inputs.items()},
    )
    digests[step] = key
    metrics[step] = run_stage(type(job).model_validate_json(job.model_dump_json())).metrics
journals = {step: (folder / "scratch" / key / "journal.jsonl") for step, key in digests.items()}
curves = {step: path.read_text() for step, path in journals.items() if path.is_file()}
print(json.dumps({"metrics": metrics, "curves": curves, "keys": digests}))
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a copy of the packages."""
    folder = tmp_path / "tree"
    copy_packages(folder, compiled=True)
    return folder


def insert(file: Path, text: str, *, before: str) -> None:
    """Put lines before the one place that begins with ``before``."""
    written = file.read_text()
    assert written.count(before) == 1, before
    file.write_text(written.replace(before, text.strip("\n") + ("\n" if text.strip() else "") + before))


def touched(folder: Path) -> list[str]:
    """Return the files of the copy that are new or changed."""
    files = sorted(path.relative_to(folder) for path in folder.rglob("*.py"))
    return [
        str(file)
        for file in files
        if not (ROOT / file).is_file() or not filecmp.cmp(ROOT / file, folder / file, shallow=False)
    ]


def environment_of(tree: Path, **more: str) -> dict[str, str]:
    """Return the environment of a process whose packages are the copy's: one thread, as all of the tests have, since two wait for each other."""
    kept = {"OMP_NUM_THREADS": "1", "VANTAGE_CACHE": os.environ["VANTAGE_CACHE"]}
    return {"PATH": "", "PYTHONPATH": str(tree), **kept, **more}


def python(
    tree: Path, arguments: tuple[str, ...], environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a Python process whose packages are the copy's."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=tree, env=environment, capture_output=True, text=True
    )


@pytest.fixture(autouse=True)
def _forked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes of slow tests, which load torch again and again."""
    if request.node.get_closest_marker("slow"):
        monkeypatch.setitem(globals(), "python", forked)


def forked(
    tree: Path, arguments: tuple[str, ...], environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Do as ``python``, with libraries that are loaded already."""
    return WITH_TORCH.run([sys.executable, *arguments], timeout=300, cwd=tree, env=environment)


def run_in(tree: Path, *arguments: str, **environment: str) -> str:
    """Return what a Python process prints whose packages are the copy's."""
    done = python(tree, arguments, environment_of(tree, **environment))
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


COMMAND = ("-c", "from vantage.cli.main import main; main()")


def planned(tree: Path, recipe: str) -> str:
    (tree / "own.yaml").write_text(recipe)
    return run_in(tree, *COMMAND, "plan", "own.yaml", "--workspace", str(tree / "workspace"))


def refused(tree: Path, recipe: str, workspace: str = "workspace") -> str:
    """Return what the recipe is refused with."""
    (tree / "refused.yaml").write_text(recipe)
    arguments = (*COMMAND, "plan", "refused.yaml", "--workspace", workspace)
    done = python(tree, arguments, environment_of(tree, COLUMNS="1000"))
    assert done.returncode == 65, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    return done.stderr


KEYS = """
import json, sys
from vantage.attempts.jobs import key_parts_of
from vantage.runs.resolving import load_resolved
from vantage.schemas.records.stage_key import stage_key
from vantage.schemas.steps import dependencies

step, found = sys.argv[1], []
for overrides in json.loads(sys.argv[2]):
    recipe, _ = load_resolved("own.yaml", overrides)
    inputs = {role: "0" * 64 for role in dependencies(recipe)[step]}
    found.append(stage_key(key_parts_of(recipe, step, inputs)))
print(json.dumps(found))
"""


def keys_of(tree: Path, step: str, *overrides: list[str]) -> list[str]:
    """Return the step's key under the recipe with each of these lists of overrides."""
    keys: list[str] = json.loads(run_in(tree, "-c", KEYS, step, json.dumps(overrides)).splitlines()[-1])
    return keys


def assert_recorded_keys_are_the_same(tree: Path) -> None:
    """Assert that every recorded recipe has the keys that it had."""
    (tree / "tests" / "attempts").mkdir(parents=True)
    for name in ("test_recorded_keys.py", "recorded_keys.json"):
        shutil.copy(ROOT / "tests" / "attempts" / name, tree / "tests" / "attempts")
    (tree / "rec").mkdir()
    run_in(
        tree,
        "-c",
        "from tests.attempts.test_recorded_keys import *; test_no_key_and_no_recorded_recipe_has_moved(Path('rec').absolute())",
    )


def driven(tree: Path) -> dict[str, dict[str, dict[str, float]]]:
    (tree / "drive.py").write_text(DRIVE)
    told: dict[str, dict[str, dict[str, float]]] = json.loads(
        run_in(tree, "drive.py", "own.yaml", str(tree / "results")).splitlines()[-1]
    )
    (tree / "drive.py").unlink()
    return told


def test_a_stage_kind_is_its_class_its_task_and_its_row(tree: Path) -> None:
    (tree / "schemas" / "recipe" / "length_count.py").write_text(STAGE_CLASS.lstrip())
    (tree / "tasks" / "length_count.py").write_text(STAGE_TASK.lstrip())
    kinds = tree / "schemas" / "kinds.py"
    insert(
        kinds,
        "from vantage.schemas.recipe.length_count import LengthCount",
        before="from vantage.schemas.recipe.resolved import (",
    )
    insert(kinds, STAGE_ROW, before=")\n\nKINDS: Mapping")
    assert touched(tree) == ["schemas/kinds.py", "schemas/recipe/length_count.py", "tasks/length_count.py"]

    plan = planned(tree, STAGE_RECIPE)
    assert "long  " in plan and "for data.demonstrations" in plan
    measured = driven(tree)["metrics"]["long"]
    assert measured["source_rows"] > 100
    assert 0 < measured["train_rows"] < measured["source_rows"]
    assert touched(tree) == ["schemas/kinds.py", "schemas/recipe/length_count.py", "tasks/length_count.py"]


@pytest.mark.slow
def test_a_reward_term_is_its_class_its_scorer_and_its_row(tree: Path) -> None:
    terms = tree / "schemas" / "recipe" / "terms.py"
    (tree / "tasks" / "rewards" / "length_scores.py").write_text(TERM_SCORER.lstrip())
    insert(terms, TERM_CLASS, before="@dataclass(frozen=True, kw_only=True)\nclass TermKind")
    insert(terms, TERM_ROW, before=')\n"""Every kind of reward term."""')
    assert touched(tree) == ["schemas/recipe/terms.py", "tasks/rewards/length_scores.py"]

    assert "best" in planned(tree, TERM_RECIPE)
    told = driven(tree)
    (curve,) = (json.loads(line) for line in str(told["curves"]["best"]).splitlines())
    metrics = curve["metrics"]
    assert metrics["score_mean"] == pytest.approx(
        0.5 * metrics["score_mean_max_length"] + metrics["score_mean_arithmetic"]
    )
    assert metrics["score_mean_max_length"] < 0


@pytest.mark.slow
def test_what_is_there_has_the_same_key_beside_a_new_kind(tree: Path) -> None:
    """A new kind of term leaves every stage key alone: its fields stand in its own class."""
    terms = tree / "schemas" / "recipe" / "terms.py"
    insert(terms, TERM_CLASS, before="@dataclass(frozen=True, kw_only=True)\nclass TermKind")
    insert(terms, TERM_ROW, before=')\n"""Every kind of reward term."""')
    assert_recorded_keys_are_the_same(tree)


# -- real extensions


@pytest.mark.parametrize(
    "extension, most",
    [(KIND, 5), (SWITCH, 4), (FACT, 4), (ENGINE, 4), (STORAGE, 5)],
    ids=["kind", "switch", "fact", "engine", "storage"],
)
def test_what_it_costs(extension: Extension, most: int, tree: Path) -> None:
    """The extension touches the files that it lists, and no more than the allowed number."""
    extension.add_to(tree)
    assert touched(tree) == extension.files
    assert len(extension.files) <= most


@pytest.mark.slow
def test_a_kind_that_filters_pairs_by_a_reward_model(tree: Path) -> None:
    KIND.add_to(tree)
    plan = planned(tree, KIND_RECIPE)
    assert "clean  " in plan and "for reward, data.preferences" in plan
    estimate = json.loads(run_in(tree, *COMMAND, "estimate", "own.yaml", "--json"))
    (clean,) = (stage for stage in estimate["stages"] if stage["stage"] == "clean")
    assert clean["counts"] == {"rows": 60}, "of all three splits"
    assert [network["role"] for network in clean["networks"]] == ["reward"]

    key, *others = keys_of(
        tree,
        "clean",
        [],
        ["stages.clean.gate.at_least=0.5"],
        ["stages.clean.least_margin=0.5"],
        ["stages.clean.resources.cpus=1"],
    )
    assert [other == key for other in others] == [True, False, True]
    assert_recorded_keys_are_the_same(tree)

    metrics = driven(tree)["metrics"]["clean"]
    made = tree / "results" / "made"
    kept, given = (
        pq.read_table(made / step / "train.parquet").to_pylist() for step in ("clean", "data.preferences")
    )
    assert 0 < len(kept) == metrics["train_rows"] < len(given)
    assert all(row in given for row in kept)
    page = run_in(
        tree, "-c", "from vantage.schemas.records.metrics_page import docs_page; print(docs_page())"
    )
    (line,) = (line for line in page.splitlines() if "`sure_share`" in line)
    assert line.endswith("| margin_filter | – |")
    assert "margin_filter" in run_in(tree, *COMMAND, "schema")
    wrong = refused(tree, KIND_RECIPE.replace("reward_model: reward,", "reward_model: model,"))
    assert "stages.clean.reward_model" in wrong and "reward_model" in wrong


@pytest.mark.slow
def test_a_switch_that_takes_a_power_of_the_ratio(tree: Path) -> None:
    SWITCH.add_to(tree)
    planned(tree, SWITCH_RECIPE.replace("RATIO", "ratio_power: 0.5"))
    key, same, other = keys_of(
        tree,
        "policy",
        ["stages.policy.algorithm.ratio_power=1.0"],
        ["stages.policy.algorithm={preset: grpo, samples_per_prompt: 4}"],
        [],
    )
    assert (key == same, key == other) == (True, False)
    assert_recorded_keys_are_the_same(tree)
    worked = """
import torch
from vantage.algorithms.policy_loss import tempered
old = torch.log(torch.tensor([[.5, .25]]))
now = (old + torch.log(torch.tensor([[4., 9.]]))).requires_grad_()
ratio = (tempered(now, old, power=0.5) - old).exp()
ratio[0, 0].backward()
print(ratio.tolist()[0], now.grad.tolist()[0])
"""
    ratios, gradient = map(json.loads, run_in(tree, "-c", worked).strip().replace("] [", "]\n[").split("\n"))
    assert ratios == pytest.approx([2.0, 3.0]), "√4 and √9"
    assert gradient == pytest.approx([1.0, 0.0]), "d√ρ/dlog π is √ρ/2"
    (curve,) = driven(tree)["curves"]["policy"].splitlines()
    assert json.loads(curve)["metrics"]["ratio"] > 0
    wrong = refused(tree, SWITCH_RECIPE.replace("RATIO", "ratio_power: 2.0"))
    assert "algorithm.ratio_power: 2.0" in wrong
    without = SWITCH_RECIPE.replace("RATIO", "ratio_power: 0.5, importance_ratio: false")
    unread = planned(tree, without.replace("minibatch_size: 4", "minibatch_size: 8"))
    assert "ratio_power: 0.5 is not read without a ratio" in " ".join(unread.split())


def test_a_fact_of_the_machine_goes_to_mlflow_the_audit_the_report_and_the_docs(tree: Path) -> None:
    FACT.add_to(tree)
    shown = """
import json, socket
from vantage.attempts.facts import read_facts
from vantage.ledger.entries import apply_operation
from vantage.ledger.expected.changes import changes
from vantage.ledger.operations import FinishStage, OpenRun, OpenStage, from_json, to_json
from vantage.review.audit.mlflow_tags import PREFIX
from vantage.review.reports.gathered import Cost, Report
from vantage.review.reports.sections import attempts_and_cost
from vantage.runs.history import history_of
from vantage.schemas.records.facts import docs_table

told = [
    OpenRun(time=1, run_id="0001-a-000000", experiment="e", name="a", recipe={}),
    OpenStage(time=2, stage="sft", kind="sft", stage_key="0" * 64, attempt=1, params={}, inputs={}),
    FinishStage(time=3, stage="sft", outcome="failed", artifact=None, provenance={}, reason="x", facts=read_facts()),
]
told = [from_json(json.loads(json.dumps(to_json(each)))) for each in told]
entry, tags = None, {}
for each in told:
    entry = apply_operation(entry, each)
    for change in changes(entry, each):
        tags |= getattr(change, "tags", {})
(attempt,) = history_of(told).attempts["sft"]
cost = Cost("sft", 1, 1.0, 1.0, 0, "cpu", None, None, facts=attempt.facts)
page = attempts_and_cost(Report("0001-a-000000", "a", "a", (), "failed", "", 1, (), costs=(cost,)))
host = socket.gethostname()
print(json.dumps([
    tags["vantage.fact.host"] == host, "vantage.fact.host".startswith(PREFIX),
    "machine</th>" in page, host in page, "The machine is the name" in page, "`vantage.fact.host`" in docs_table(),
]))
"""
    assert json.loads(run_in(tree, "-c", shown)) == [True] * 6


@pytest.mark.slow
def test_a_second_engine_samples_what_the_first_does(tree: Path) -> None:
    """Greedy ids and their log-probabilities are those of Vantage's own sampler, which is written otherwise."""
    ENGINE.add_to(tree)
    planned(tree, ENGINE_RECIPE)
    key, other, same = keys_of(tree, "best", [], ["generation.engine=generate"], ["generation.engine=own"])
    assert (key == other, key == same) == (False, True)
    assert_recorded_keys_are_the_same(tree)
    compared = """
import json, sys
from pathlib import Path
from vantage.models.builtin import build_builtin
from vantage.models.folders import load_policy, load_tokenizer
from vantage.models.policy import PolicyModel
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.tasks.data.examples import Codec
from vantage.tasks.rollout.engine import load_engine

folder = Path("model")
folder.mkdir()
build_builtin("tiny", folder, seed=1)
policy, tokenizer = PolicyModel(load_policy(folder)), load_tokenizer(folder)
own, other = (
    load_engine(policy, Codec(tokenizer, Generation(max_response_tokens=8, engine=name), None), limits=PassLimits())
    for name in ("own", "generate")
)
prompts = [tokenizer(text)["input_ids"] for text in ("12", "3 4 5")]
ours, theirs = (engine.generate(prompts, count=2, seed=3, greedy=True) for engine in (own, other))
drawn = [other.generate(prompts, count=2, seed=seed).responses for seed in (3, 3, 4)]
gap = max(abs(a - b) for x, y in zip(ours.logprobs, theirs.logprobs) for a, b in zip(x, y))
print(json.dumps([type(other).__name__, ours.responses == theirs.responses, gap < 1e-4, drawn[0] == drawn[1], drawn[0] == drawn[2]]))
"""
    assert json.loads(run_in(tree, "-c", compared)) == ["GenerateEngine", True, True, True, False]
    planned(tree, ENGINE_RECIPE.replace("tokens: 8", "tokens: 8, engine: generate"))
    (curve,) = driven(tree)["curves"]["best"].splitlines()
    assert json.loads(curve)["metrics"]["sampler_gap"] < 1e-4, (
        "the trainer's log-probabilities are the engine's"
    )
    stops = refused(tree, ENGINE_RECIPE.replace("tokens: 8", "tokens: 8, engine: generate, stop: [x]"))
    assert "engine=generate ends responses by token" in stops


@pytest.mark.slow
def test_a_storage_on_a_server_of_ones_own(tree: Path, bucket: str, s3_server: str) -> None:
    """An artifact goes in, is found by its key, is read by the audit's reader, and is removed."""
    STORAGE.add_to(tree)
    used = """
import json, sys
from pathlib import Path
from vantage.runs.workspace import Workspace
from vantage.schemas.records.stage_key import stage_key
from vantage.storage.read_only import open_read_only
from vantage.storage.storage import garbage_of

workspace = Workspace.at(sys.argv[1])
parts = {"kind": "evaluation"}
storage, key = workspace.storage, stage_key(parts)
with storage.exclusive(key, holder="test"):
    number = storage.next_attempt(key)
    folder = storage.staging_folder(key, number)
    (folder / "a.txt").write_text("1")
    description = {"kind": "evaluation", "metrics": {}, "parents": {}}
    made = storage.commit(
        folder, stage_key=key, attempt=number, run_id="0001-a-000000", description=description, key_parts=parts, provenance={}
    )
other = open_read_only(sys.argv[1] + "/store")
print(json.dumps([
    storage.find(key).artifact.digest == made.digest, other.stage_keys() == [key], other.digests() == [made.digest],
    list(workspace.records.ids()) == [], type(garbage_of(storage, "unreferenced")).__name__, key,
]))
"""
    server, place = s3_server.removeprefix("http://"), bucket.removeprefix("s3://")
    login = {name: os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION")}
    login["VANTAGE_CACHE"] = str(tree / "cache")
    address = f"minio://{server}/{place}"
    *found, key = json.loads(run_in(tree, "-c", used, address, **login))
    assert found == [True, True, True, True, "BucketGarbage"]
    (name, prefix) = place.split("/")
    client = boto3.client("s3", endpoint_url=s3_server, region_name="us-east-1")
    listed = {each["Key"] for each in client.list_objects_v2(Bucket=name)["Contents"]}
    assert f"{prefix}/store/keys/{key}.json" in listed, "it is in the bucket, as another client sees it"
    assert "minio://HOST:PORT/BUCKET/PREFIX" in run_in(tree, *COMMAND, "plan", "--help", COLUMNS="1000")
    unknown = refused(tree, SWITCH_RECIPE.replace(", RATIO", ""), "ftp://a/b")
    assert "gs://…, az://… or minio://HOST:PORT/BUCKET/PREFIX" in unknown
