"""The recipe of docs/preference_losses.md, and stages of the other losses, run as real stages at reduced size, without Prefect."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.orchestrated import attempt_all, orchestrated
from vantage.flows.orchestrator import Orchestrator
from vantage.flows.publishing.publishing import publish
from vantage.runs.planning import plan
from vantage.runs.record import StageRecord
from vantage.runs.resolving import load_resolved_text
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace
from vantage.schemas.metric_names import UNCOMPILED
from vantage.schemas.records.attempt import RUN_STAGE
from vantage.schemas.records.metrics import headline_metric_names

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PAGE = Path(__file__).parents[2] / "docs" / "preference_losses.md"
OTHERS = """\
  kto: {kind: kto, init: sft, data: labelled, epochs: 0.5, batch_size: 8, learning_rate: 1.0e-4, undesirable_weight: 9.0}
  simpo: {kind: dpo, init: sft, data: imitated, loss: simpo, beta: 2.0, target_margin: 1.0, batch_size: 16, learning_rate: 1.0e-4}
  orpo: {kind: dpo, init: model, data: imitated, loss: orpo, batch_size: 16, learning_rate: 1.0e-4}
"""


def text_of_page() -> str:
    found = re.search(
        r"<!-- tests/flows/test_iterative_dpo\.py runs this recipe -->\n```yaml\n(.*?)```",
        PAGE.read_text(),
        re.DOTALL,
    )
    assert found is not None
    return found[1]


def text() -> str:
    """Return the page's recipe with one more stage for each loss that has another path through its code."""
    page = text_of_page()
    labelled = '  labelled: {source: "builtin:arithmetic/labelled_responses", rows: 160, max_dropped: 0.2}\n'
    return page.replace("  prompts: {", f"{labelled}  prompts: {{", 1).replace(
        "publish:\n", f"{OTHERS}publish:\n"
    )


@pytest.fixture(scope="module")
def lived(
    tmp_path_factory: pytest.TempPathFactory, ledger_database: str
) -> Iterator[tuple[Orchestrator, dict[str, StageRecord]]]:
    path = tmp_path_factory.mktemp("recipe") / "iterative.yaml"
    path.write_text(text())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", ledger_database)
        patch.setenv("OMP_NUM_THREADS", "1")
        workspace = Workspace(tmp_path_factory.mktemp("iterative") / "workspace")
        with orchestrated(workspace, path, in_process=True, stage_function=RUN_STAGE) as orchestrator:
            stages = attempt_all(orchestrator)
            for publication in orchestrator.recipe.publish:
                publish(publication, orchestrator)
            orchestrator.run.update(status=orchestrator.run.outcome())
            yield orchestrator, stages


def test_every_round_completes_from_the_policy_of_the_round_before(
    lived: tuple[Orchestrator, dict[str, StageRecord]],
) -> None:
    orchestrator, stages = lived
    of = orchestrator.artifacts
    assert {stage.status for stage in stages.values()} == {"completed"}, {
        name: stage.reason for name, stage in stages.items() if stage.reason
    }
    policies = ["sft", "dpo_1", "dpo_2"]
    for policy, pairs, dpo in zip(
        policies, ("pairs_1", "pairs_2", "pairs"), ("dpo_1", "dpo_2", "dpo"), strict=True
    ):
        assert of[pairs].parents["policy"] == of[policy].digest
        assert of[dpo].parents == {
            "init": of[policy].digest,
            "reference": of["sft"].digest,
            "data": of[pairs].digest,
        }
    assert (
        len({of[name].digest for name in ("sft", "dpo_1", "dpo_2", "dpo", "pairs_1", "pairs_2", "pairs")})
        == 7
    )
    assert orchestrator.watcher.lines[-1] == "  published dpo as iterative_dpo: version 1"  # type: ignore[attr-defined]


def test_another_round_reuses_those_that_were_made(
    lived: tuple[Orchestrator, dict[str, StageRecord]],
) -> None:
    orchestrator, _ = lived
    runs = read_runs(orchestrator.run.workspace)
    more, _ = load_resolved_text(text().replace("rounds: 3", "rounds: 4"), [])
    steps = {step.name: step.action for step in plan(more, orchestrator.store, runs)}
    assert {name for name, action in steps.items() if action != "reuse"} == {"pairs", "dpo", "evaluation"}
    assert steps["dpo_3"] == "reuse", "the last round of three is the third of four"


def test_stages_of_other_losses_have_the_parents_and_the_metrics_of_their_kind(
    lived: tuple[Orchestrator, dict[str, StageRecord]],
) -> None:
    orchestrator, stages = lived
    of = orchestrator.artifacts
    assert of["simpo"].parents == {"init": of["sft"].digest, "data": of["imitated"].digest}
    assert of["orpo"].parents == {"init": of["model"].digest, "data": of["imitated"].digest}
    assert of["kto"].parents == {
        "init": of["sft"].digest, "reference": of["sft"].digest, "data": of["data.labelled"].digest,
    }  # fmt: skip
    assert set(stages["kto"].metrics) == headline_metric_names("kto") - set(UNCOMPILED)
    assert set(stages["simpo"].metrics) == headline_metric_names("dpo") - {"tied_share", *UNCOMPILED}
