"""The entries of MLflow that an audit reads, as plain data; MLflow is not imported."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vantage.ledger.expected.runs import Row


@dataclass(frozen=True)
class MlflowRun:
    """One of MLflow's runs."""

    run_id: str
    tags: Mapping[str, str]
    params: Mapping[str, str]
    rows: frozenset[Row]
    latest: Mapping[str, float]
    """Metric → the value that MLflow shows, which it stores apart from the rows."""
    datasets: "tuple[DatasetInput, ...]"
    models: tuple[str, ...]
    """Ids of the logged models that the run made."""
    read_models: tuple[str, ...] = ()
    """Ids of the logged models that the run read."""
    named_by: tuple[str, ...] = ()
    """Ids of the logged models of the experiment that name this run as the one that made them."""
    status: str = ""
    started: int | None = None
    """Start in milliseconds since 1970."""
    ended: int | None = None
    files: str = ""
    """Address of the files beside the run."""
    root: str = ""
    """Address of all files of its experiment."""


@dataclass(frozen=True)
class DatasetInput:
    """A dataset that one of MLflow's runs has read."""

    digest: str
    """The 36 characters in MLflow's field."""
    name: str
    source: str
    """JSON: address and digests."""
    profile: str
    """JSON: metrics."""
    tags: Mapping[str, str]
    source_type: str = "vantage"
    schema: str = ""


class ModelRow(NamedTuple):
    """A metric on the page of a logged model."""

    row: Row
    run_id: str
    """Id of MLflow's run that measured it."""
    dataset: tuple[str, str]
    """(Name, digest) of the dataset that the metric was measured on; empty: none is named."""


@dataclass(frozen=True)
class LoggedModel:
    """An artifact on MLflow's page of models."""

    name: str
    kind: str
    run_id: str
    """The id of MLflow's run that made it."""
    tags: Mapping[str, str]
    params: Mapping[str, str]
    rows: tuple[ModelRow, ...]
    location: str = ""
    """The address from which MLflow loads ``models:/m-ID``."""
    root: str = ""
    """Address of all files of its experiment; MLflow gives every model a folder in it."""
    status: str = "READY"
    status_message: str = ""


@dataclass(frozen=True)
class MlflowVersion:
    """A version of a registered model."""

    name: str
    version: str
    tags: Mapping[str, str]
    aliases: tuple[str, ...]
    location: str
    """The address from which MLflow loads ``models:/NAME/VERSION``; empty: it has no files."""
    model_tags: Mapping[str, str]
    """The tags of its logged model."""
    source: str = ""
    """The location that MLflow shows; MLflow may load the version from another one."""
    model_location: str | None = None
    """The address from which MLflow loads its logged model; None: it has none."""
    run_id: str = ""
    """The id of MLflow's run that made it."""
    registered: Mapping[str, str] = field(default_factory=dict)
    """Tags of the registered model, which name the person who moved each alias last."""
    status: str = "READY"
    stage: str = "None"
    """MLflow's own stage of the version, by which ``models:/NAME/STAGE`` loads it. Vantage sets none."""
    run_link: str = ""
    status_message: str = ""
    description: str = ""
    """The text of its page: the card, and additions by people."""
