"""MLflow's and Prefect's own pages of one run show in a real browser what docs/pages.md describes."""

import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from mlflow import MlflowClient
from rich.console import Console

from tests.ledger.test_sender import mlflow_server
from tests.review.audit.conftest import RECIPE
from tests.review.reports.browser import Tab, opened_tab
from tests.support.ports import own_port
from vantage.flows.execution import execute
from vantage.flows.prefect_server import pages as prefect_pages
from vantage.runs.console import Screen
from vantage.runs.record import RunRecord
from vantage.runs.resolving import load_resolved
from vantage.runs.run import acquire_run
from vantage.runs.workspace import Workspace

pytestmark = [
    pytest.mark.slow,
    pytest.mark.needs("chromium"),
    pytest.mark.timeout(600),
]

MARKUP = "<img src=nowhere onerror=alert(1)> [x](javascript:alert(2)) | `y`"
LICENSES = {"data.demonstrations": "CC-BY-4.0", "policy": MARKUP}
GATE = "accuracy_gain 0.100 [0.07, 0.13] n=400 >= 0: passed"

OF_THE_FRAMEWORKS = re.compile(
    r"/mlflow/users/current|ResizeObserver loop|/favicon\.ico|/ico/undefined\.svg|WebGL|GL Driver Message"
    r"|/assets/[^\"]*\.js.*Cannot read properties of null \(reading 'position'\)"
)
"""Messages that MLflow 3.17 and Prefect 3.8 print to the console by themselves: about users of a server without logins,
a missing icon, a machine without a GPU, and a graph that still draws when its page is left."""


@dataclass(frozen=True)
class Shown:
    """A run, and the servers that show it."""

    record: RunRecord
    mlflow: str
    prefect: str
    """Prefect's address without ``/api``."""
    runs: dict[str | None, str]
    """Stage → MLflow's id of its run."""
    models: dict[str, str]
    """Stage → MLflow's id of its logged model."""

    def page(self, stage: str | None, tab: str = "") -> str:
        """Return the address of a run's page in MLflow."""
        return f"{self.mlflow}/#/experiments/1/runs/{self.runs[stage]}{tab}"

    def model_page(self, stage: str, tab: str = "") -> str:
        return f"{self.mlflow}/#/experiments/1/models/{self.models[stage]}{tab}"

    @property
    def flow_run(self) -> str:
        return f"{self.prefect}/runs/flow-run/{self.record.prefect_flow_run_ids[-1]}"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory, prefect_url: str) -> Iterator[Shown]:
    """Yield one run of fake stages under both servers, which all tests look at."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "server").mkdir()
    (folder / "demonstrations.jsonl").write_text('{"prompt": "1+1?", "response": "2"}\n' * 40)
    recipe = folder / "fake.yaml"
    recipe.write_text(f"{RECIPE}licenses: {json.dumps(LICENSES)}\n")
    workspace = Workspace(folder / "workspace")
    workspace.root.mkdir()
    (workspace.root / "seconds.txt").write_text("0.05")
    port = own_port()
    address = f"http://127.0.0.1:{port}"
    with mlflow_server(folder / "server", port, seconds=300), pytest.MonkeyPatch.context() as patched:
        patched.setenv("MLFLOW_TRACKING_URI", address)
        patched.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
        patched.setenv("VANTAGE_REPORT", "1")
        patched.setattr(prefect_pages, "SECONDS_BETWEEN_UPDATES", 0.1)
        printed = io.StringIO()
        resolved, _ = load_resolved(str(recipe), [])
        with acquire_run(workspace, resolved, source=str(recipe)) as run:
            screen = Screen(Console(file=printed, width=200))
            record = execute(run, screen, stage_function="tests.support.shown_work.run_stage")
        assert record.status == "completed", printed.getvalue()
        found = MlflowClient(address).search_runs(["1"])
        assert {each.data.tags["vantage.run_id"] for each in found} == {record.run_id}
        tags = {each.info.run_id: each.data.tags for each in found}
        yield Shown(
            record=record,
            mlflow=address,
            prefect=prefect_url.removesuffix("/api"),
            runs={of.get("vantage.stage"): run_id for run_id, of in tags.items()},
            models={
                of["vantage.stage"]: of["vantage.model"] for of in tags.values() if "vantage.model" in of
            },
        )


@pytest.fixture(scope="module")
def opened() -> Iterator[Tab]:
    with opened_tab() as tab:
        yield tab


@pytest.fixture
def tab(opened: Tab) -> Iterator[Tab]:
    """Yield the browser, and assert that whatever a test opened printed no error of ours to the console."""
    yield opened
    ours = {each[-600:] for each in opened.complaints() if not OF_THE_FRAMEWORKS.search(each)}
    assert not ours, "\n".join(sorted(ours))


def has(text: str) -> str:
    """Return JavaScript that is true if the page shows this text."""
    return f"document.body.innerText.includes({json.dumps(text)})"


def follow(tab: Tab, text: str, *, to: str, until: str) -> None:
    """Follow a link of the page, and assert that it leads to a page with this text; MLflow itself opens it in a tab of
    its own.
    """
    assert to in tab.links()[text]
    tab.visit(to, until=has(until))


def test_the_run_links_its_stages_and_its_report(tab: Tab, shown: Shown) -> None:
    tab.visit(shown.page(None), until=has("Recipe fake · completed"))
    text, links = tab.text(), tab.links()
    assert "Report: report.html under Artifacts" in text
    assert GATE in text
    for stage in shown.record.stages:
        assert shown.page(stage) in links[stage], stage
    follow(tab, "policy", to=shown.page("policy"), until="policy optimization · attempt 1 · completed")


def test_the_report_is_shown_where_it_lies(tab: Tab, shown: Shown) -> None:
    tab.visit(shown.page(None, "/artifacts/report.html"), until="document.querySelector('iframe')")
    tab.until("document.querySelector('iframe').getBoundingClientRect().height > 300")


def test_a_stage_links_up_and_down(tab: Tab, shown: Shown) -> None:
    tab.visit(shown.page("sft"), until=has("a stage of run"))
    text, links = tab.text(), tab.links()
    assert "Parents: init: model · data: data.demonstrations" in text
    read_by = next(line for line in text.splitlines() if line.startswith("Read by: "))
    assert "reward (init)" in read_by and "policy (init, reference)" in read_by
    assert "evaluation (baseline)" in read_by
    for other in ("model", "data.demonstrations", "reward", "policy", "evaluation", "value"):
        assert shown.page(other) in links[other], other
    assert shown.page(None) in links[shown.record.run_id]
    digest = shown.record.stages["data.demonstrations"].digest
    assert digest is not None and f"demonstrations ({digest[:36]})" in text
    follow(tab, "data.demonstrations", to=shown.page("data.demonstrations"), until="prepare data · attempt 1")


def test_data_names_its_source_and_what_was_left_out(tab: Tab, shown: Shown) -> None:
    tab.visit(shown.page("data.demonstrations"), until=has("source of demonstrations ("))
    text = tab.text()
    assert "Left out: 5 of 100 rows dropped" in text
    assert "Read by: sft (data)" in text


def test_curves_are_drawn(tab: Tab, shown: Shown) -> None:
    """MLflow's page of a stage draws its curves."""
    tab.visit(
        shown.page("policy", "/model-metrics"), until="document.querySelector('.js-plotly-plot svg path')"
    )
    assert "loss" in tab.text()


def test_the_table_of_responses(tab: Tab, shown: Shown) -> None:
    tab.visit(shown.page("evaluation", "/artifacts/samples.json"), until=has("candidate_judgement"))
    assert all(name in tab.text() for name in ("prompt", "baseline", "candidate"))
    assert "0+1?" in tab.text()


def test_the_card_of_a_version(tab: Tab, shown: Shown) -> None:
    tab.visit(
        f"{shown.mlflow}/#/models/fake/versions/1", until=has("fake: policy · policy made by stage policy")
    )
    tab.until(has("champion"))
    tab.until(has("Inputs (1)"))
    text, links = tab.text(), tab.links()
    for title in ("Gates", "Measured", "Limits", "Data", "Licence", "Use and check"):
        assert f"\n{title}\n" in text, title
    assert f"evaluation: {GATE}" in text
    assert re.search(r"evaluation\s+accuracy_gain\s+0\.1\s+0\.06\d+ to 0\.13\d+\s+400", text)
    demonstrations = next(line for line in text.splitlines() if line.startswith("data.demonstrations\t"))
    digest = str(shown.record.stages["data.demonstrations"].digest)
    assert digest[:16] in demonstrations and "CC-BY-4.0" in demonstrations
    assert re.search(r"^data\.prompts.*Apache-2\.0 \(part of Vantage\)", text, re.MULTILINE)
    assert "data.demonstrations: left out: 5 of 100 rows dropped" in text
    assert "strict: the gate is closed: accuracy_gain 0.100" in text
    assert "vantage audit fake/1" in text and "mlflow models serve -m models:/fake/1" in text
    assert "Inputs (1)" in text and "Outputs (1)" in text
    # what a person wrote is shown as text, not as markup
    assert "img src=nowhere" in text and "javascript:alert(2)" in text
    assert tab.value("document.querySelectorAll('img[src=nowhere]').length") == 0
    assert not [each for addresses in links.values() for each in addresses if "alert" in each]
    for other in ("sft", "value", "data.prompts", "reward", "evaluation"):
        assert shown.page(other) in links[other], other
    follow(tab, "sft", to=shown.page("sft"), until="a stage of run")


def test_the_card_of_a_logged_model_with_its_data(tab: Tab, shown: Shown) -> None:
    tab.visit(shown.model_page("policy"), until=has("Datasets used"))
    tab.until(has("Use and check"))
    text = tab.text()
    digest = shown.record.stages["data.prompts"].digest
    assert digest is not None and f"prompts (#{digest[:36]})" in text
    assert f"vantage audit {shown.record.run_id}/policy" in text
    assert "Read by: evaluation (candidate)" in text
    assert "bill_of_materials.cdx.json under Artifacts of policy" in text
    tab.until(has("Model versions"))
    tab.until("[...document.querySelectorAll('a')].some(e => e.href.includes('#/models/fake'))")


def test_files_of_a_model_and_of_its_run(tab: Tab, shown: Shown) -> None:
    tab.visit(shown.model_page("policy", "/artifacts"), until=has("MLmodel"))
    assert all(name in tab.text() for name in ("input_example.json", "serving_input_example.json"))
    tab.visit(shown.page("policy", "/artifacts/bill_of_materials.cdx.json"), until=has("CycloneDX"))
    assert (
        "fake/data.demonstrations" in tab.text().replace("\n", "") or "machine-learning-model" in tab.text()
    )


def test_prefects_graph_has_names_that_a_person_reads_and_a_line_for_each_input(
    tab: Tab, shown: Shown
) -> None:
    tab.visit(shown.flow_run, until="document.querySelector('canvas')")
    tab.until("document.querySelector('canvas').getBoundingClientRect().height > 100")
    tab.until(has("Completed"))
    text = tab.text()
    assert shown.record.run_id in text and "recipe:fake" in text
    asked = f"{shown.prefect}/api/flow_runs/{shown.record.prefect_flow_run_ids[-1]}/graph-v2"
    tab.until(f"performance.getEntriesByName({json.dumps(asked)}).length > 0")
    tab.value(f"fetch({json.dumps(asked)}).then(e => e.json()).then(e => {{ window.graph = e }})")
    tab.until("window.graph")
    nodes = dict(tab.value("window.graph.nodes"))
    assert all(node["label"].endswith(" · attempt 1") for node in nodes.values())
    names = {key: node["label"].removesuffix(" · attempt 1") for key, node in nodes.items()}
    drawn = {names[key]: {names[each["id"]] for each in node["parents"]} for key, node in nodes.items()}
    read = {
        step: set(parents)
        for step, parents in {
            "model": [],
            "data.demonstrations": [],
            "data.preferences": [],
            "data.prompts": [],
            "sft": ["model", "data.demonstrations"],
            "reward": ["sft", "data.preferences"],
            "value": ["sft", "reward", "data.prompts"],
            "policy": ["sft", "value", "reward", "data.prompts"],
            "evaluation": ["policy", "sft", "value", "data.prompts"],
            "strict": ["policy", "sft", "data.prompts"],
        }.items()
    }
    assert drawn == read


def test_prefects_gates_stages_progress_and_links(tab: Tab, shown: Shown) -> None:
    tab.visit(shown.flow_run, until=has("Artifacts"))
    tab.until(has("Task Runs"))
    tab.press_text("Artifacts")
    tab.until(has(f"Gates of run {shown.record.run_id}"))
    tab.until(has("progress-policy"))
    assert f"Stages of run {shown.record.run_id}" in tab.text()

    open_card(tab, "gates", until="pair_accuracy")
    rows = tab.rows()
    assert rows[0] == [
        "stage",
        "metric",
        "measured",
        "interval",
        "prompts",
        "rule",
        "verdict",
        "if closed",
        "remark",
    ]
    assert [
        "evaluation",
        "accuracy_gain",
        "0.1",
        "0.06935 to 0.1334",
        "400",
        "at least 0",
        "passed",
        "stop",
        "",
    ] in rows
    assert [
        "strict",
        "accuracy_gain",
        "0.1",
        "0.06935 to 0.1334",
        "400",
        "at least 0.9",
        "CLOSED",
        "continue",
        "",
    ] in rows

    tab.visit(shown.flow_run, until=has("Task Runs"))
    tab.press_text("Artifacts")
    tab.until(has("progress-policy"))
    open_card(tab, "links", until="Check it back to the data")
    links = tab.links()
    assert links["the run"] == {shown.page(None)}
    assert links["report.html"] == {shown.page(None, "/artifacts/report.html")}
    assert links["fake"] == {f"{shown.mlflow}/#/models/fake"}
    for stage in shown.record.stages:
        assert shown.page(stage) in links[stage], stage


def open_card(tab: Tab, name: str, *, until: str) -> None:
    """Click an artifact's card, and wait for what it holds."""
    tab.press_text(name)
    tab.until("location.pathname.includes('/artifacts/')")
    tab.until(has(until))
