"""Read everything that a database of MLflow contains of some runs, through MLflow's own client, and write it back.

Ids that MLflow draws are replaced: ``{run:RUN/STAGE}``, ``{model:RUN/STAGE}`` and ``{experiment}``. The texts of pages are
left out, since people read them and no audit does.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mlflow import entities
from mlflow.tracking import MlflowClient

FOLDER = Path(__file__).parent / "golden"
EXPERIMENT = "tiny"
PAGE = "mlflow.note.content"

Contents = dict[str, Any]


def read_golden(name: str) -> dict[str, Any]:
    """Return a golden file: ``outboxes``, the operations of each run; ``mlflow``, what MLflow then contained."""
    content: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_bytes())
    return content


def contents_of(client: MlflowClient) -> Contents:
    """Return the runs, logged models and registered models of the experiment."""
    experiment = client.get_experiment_by_name(EXPERIMENT)
    assert experiment is not None
    runs = {
        place_of(run.data.tags): client.get_run(run.info.run_id)
        for run in client.search_runs([experiment.experiment_id])
    }
    models = {
        place_of(model.tags): client.get_logged_model(model.model_id)
        for model in client.search_logged_models([experiment.experiment_id])
    }
    names = {run.info.run_id: f"{{run:{place}}}" for place, run in runs.items()}
    names |= {model.model_id: f"{{model:{place}}}" for place, model in models.items()}

    def renamed(tags: Mapping[str, str]) -> dict[str, str]:
        return {name: _replaced(value, names) for name, value in sorted(tags.items()) if name != PAGE}

    return {
        "runs": {place: _run(client, runs[place], names, renamed) for place in sorted(runs)},
        "models": {
            place: {
                "name": models[place].name,
                "kind": models[place].model_type,
                "status": models[place].status.value,
                "run": names[models[place].source_run_id],
                "tags": renamed(models[place].tags),
                "params": models[place].params,
                "metrics": sorted(
                    [each.key, each.value, each.step, each.dataset_name or ""]
                    for each in models[place].metrics or ()
                ),
            }
            for place in sorted(models)
        },
        "registered": {
            each.name: _registered(client, each.name, names, renamed)
            for each in client.search_registered_models()
        },
    }


def place_of(tags: Mapping[str, str]) -> str:
    """Return ``RUN/STAGE`` of a run or a model; ``RUN/`` of a parent run."""
    return f"{tags['vantage.run_id']}/{tags.get('vantage.stage', '')}"


def _run(
    client: MlflowClient,
    run: entities.Run,
    names: Mapping[str, str],
    renamed: Callable[[Mapping[str, str]], dict[str, str]],
) -> Contents:
    assert run.inputs is not None
    assert run.outputs is not None
    return {
        "name": run.info.run_name,
        "status": run.info.status,
        "started": run.info.start_time,
        "ended": run.info.end_time,
        "tags": renamed(run.data.tags),
        "params": dict(sorted(run.data.params.items())),
        "metrics": {
            name: sorted(
                ([each.step, each.timestamp, _number(each.value)] for each in _points(client, run, name)),
                key=lambda row: row[:2],
            )
            for name in sorted(run.data.metrics)
        },
        "datasets": [
            {
                "name": given.dataset.name,
                "digest": given.dataset.digest,
                "source": given.dataset.source,
                "profile": given.dataset.profile,
                "tags": {tag.key: tag.value for tag in given.tags},
            }
            for given in sorted(run.inputs.dataset_inputs, key=lambda each: str(each.dataset.digest))
        ],
        "reads": sorted(names[given.model_id] for given in run.inputs.model_inputs),
        "makes": sorted(names[made.model_id] for made in run.outputs.model_outputs),
        "files": sorted(each.path for each in client.list_artifacts(run.info.run_id)),
    }


def _points(client: MlflowClient, run: entities.Run, name: str) -> list[entities.Metric]:
    return list(client.get_metric_history(run.info.run_id, name))


def _number(value: float) -> float | str:
    """Return a number as JSON can hold it: JSON has none for NaN, and MLflow keeps infinity as the largest number."""
    return "nan" if math.isnan(value) else value


def _registered(
    client: MlflowClient,
    name: str,
    names: Mapping[str, str],
    renamed: Callable[[Mapping[str, str]], dict[str, str]],
) -> Contents:
    registered = client.get_registered_model(name)
    versions = client.search_model_versions(f"name = '{name}'")
    return {
        "tags": renamed(registered.tags),
        "aliases": {alias: str(version) for alias, version in sorted(registered.aliases.items())},
        "versions": {
            str(each.version): {"tags": renamed(each.tags), "run": names[each.run_id or ""]}
            for each in sorted(versions, key=lambda each: int(each.version))
        },
    }


def _replaced(text: str, names: Mapping[str, str]) -> str:
    for drawn, name in names.items():
        text = text.replace(drawn, name)
    return text


def restore(contents: Contents, client: MlflowClient, *, artifacts: Path) -> str:
    """Write recorded contents by MLflow's client alone; returns the id of the experiment."""
    experiment_id = client.create_experiment(EXPERIMENT, artifacts.as_uri(), tags={"vantage": "true"})
    ids: dict[str, str] = {}
    for place, recorded in contents["runs"].items():
        run = client.create_run(experiment_id, start_time=recorded["started"], run_name=recorded["name"])
        ids[f"{{run:{place}}}"] = run.info.run_id
    for place, recorded in contents["models"].items():
        model = client.create_logged_model(
            experiment_id,
            name=recorded["name"],
            source_run_id=ids[recorded["run"]],
            params=recorded["params"],
            model_type=recorded["kind"],
        )
        client.finalize_logged_model(model.model_id, recorded["status"])
        ids[f"{{model:{place}}}"] = model.model_id

    def with_ids(tags: Mapping[str, str]) -> dict[str, str]:
        return {name: _replaced(value, ids) for name, value in tags.items()}

    for place, recorded in contents["models"].items():
        client.set_logged_model_tags(ids[f"{{model:{place}}}"], with_ids(recorded["tags"]))
    for place, recorded in contents["runs"].items():
        _restore_run(client, ids[f"{{run:{place}}}"], recorded, with_ids(recorded["tags"]), ids)
    for name, recorded in contents["registered"].items():
        client.create_registered_model(name, tags=with_ids(recorded["tags"]))
        for made in recorded["versions"].values():
            source = (artifacts / "of a version").as_uri()
            client.create_model_version(name, source, ids[made["run"]], tags=with_ids(made["tags"]))
        for alias, version in recorded["aliases"].items():
            client.set_registered_model_alias(name, alias, version)
    return experiment_id


def _restore_run(
    client: MlflowClient, run_id: str, recorded: Contents, tags: Mapping[str, str], ids: Mapping[str, str]
) -> None:
    client.log_batch(
        run_id,
        params=[entities.Param(name, value) for name, value in recorded["params"].items()],
        tags=[entities.RunTag(name, value) for name, value in tags.items()],
        metrics=list(_metrics(recorded["metrics"])),
    )
    datasets = [
        entities.DatasetInput(
            entities.Dataset(
                name=each["name"],
                digest=each["digest"],
                source_type="vantage",
                source=each["source"],
                profile=each["profile"],
            ),
            [entities.InputTag(name, value) for name, value in each["tags"].items()],
        )
        for each in recorded["datasets"]
    ]
    client.log_inputs(run_id, datasets, [entities.LoggedModelInput(ids[each]) for each in recorded["reads"]])
    if recorded["makes"]:
        client.log_outputs(
            run_id, [entities.LoggedModelOutput(ids[each], step=0) for each in recorded["makes"]]
        )
    if recorded["ended"] is not None:
        client.set_terminated(run_id, recorded["status"], recorded["ended"])


def _metrics(metrics: Mapping[str, list[list[Any]]]) -> Iterator[entities.Metric]:
    for name, rows in metrics.items():
        for step, time, value in rows:
            yield entities.Metric(name, float(value), time, step)
