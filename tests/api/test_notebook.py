"""A notebook, in a folder that has modules with our packages' names, runs a recipe of real stages."""

import json
import os
from pathlib import Path

import pytest
import torch

from tests.support.fixtures import ROOT
from tests.support.small_chat_run import RECIPE, save_chat_model

pytestmark = pytest.mark.slow

CELLS = (
    "import models, tasks, vantage",
    "vantage.plan('recipe.yaml', set={'publish': []})",
    "run = vantage.run('recipe.yaml', set={'publish': []})",
    "run",
    "run.stage('sft').curve('loss')",
    "run.metrics().query('metric == \"pair_accuracy\"')",
    "policy = vantage.load_policy('latest/sft')\npolicy.model.num_parameters()",
    "vantage.audit('latest').outcome",
    "run.report('page.html').name",
)


@pytest.mark.usefixtures("prefect_url")
def test_a_notebook_runs_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    save_chat_model(tmp_path / "base")
    rows = [{"prompt": f"say it {number}", "response": "ship"} for number in range(40)]
    pairs = [{"prompt": row["prompt"], "chosen": "ship", "rejected": "sink"} for row in rows]
    (tmp_path / "demonstrations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "preferences.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("MODEL", "base"))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("")
    (tmp_path / "tasks.py").write_text("import torch\ntorch.set_num_threads(7)  # a notebook's own\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("VANTAGE_WORKSPACE", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()

    plan, run, run_text, curve, metrics, parameters, outcome, page = (
        shown(cell) for cell in notebook.cells[1:]
    )
    assert "sft: wait, for model, data.demonstrations" in plan
    assert "✓ sft" in run, "progress is shown in the cell"
    assert "✓ reward" in run
    assert run_text.startswith("run 0001-chat-")
    assert "sft: completed, validation_nll" in run_text
    assert "Name: loss, dtype: float64" in curve
    assert "pair_accuracy" in metrics
    assert int(parameters) == sum(
        torch.Size(tensor.shape).numel() for tensor in weights(tmp_path / "base").values()
    )
    assert outcome == "'ok'"
    assert page == "'page.html'"
    assert "sft" in (tmp_path / "page.html").read_text()
    assert os.path.isdir(tmp_path / ".vantage" / "runs")


def shown(cell: object) -> str:
    """Return the text of a cell's last expression, or what the cell has printed."""
    outputs = cell["outputs"]  # type: ignore[index]
    results = [each["data"]["text/plain"] for each in outputs if each["output_type"] == "execute_result"]
    return results[0] if results else "".join(each["text"] for each in outputs)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's folder."""
    from safetensors.torch import load_file

    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
