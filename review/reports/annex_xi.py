"""Answer the questions of Annex XI of the EU AI Act (Regulation (EU) 2024/1689) from the record of a run.

Every answer is a fact of the record, with the place where it is recorded. What the record does not contain is unknown; a
question may have both. The questions are in our own words, by section, number and letter of the annex.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from vantage.review.reports.gathered import Report
from vantage.review.reports.words import about, duration, energy, interval_text, number, words

_LIBRARIES = ("python", "torch", "transformers", "tokenizers", "safetensors", "device", "system")
"""Parts of the provenance that concern who loads the model."""


@dataclass(frozen=True)
class ModelFacts:
    """Contents of the files of the reported model and the recipe; None: they could not be read."""

    architecture: str | None = None
    parameters: int | None = None
    """Number of values in the weight files; shared ones count once."""
    licence: str | None = None
    prompt_tokens: int | None = None
    response_tokens: int | None = None
    released: tuple[str, ...] = ()
    """Registered models and versions, with the time."""
    design: tuple[str, ...] = ()
    """Method and most important settings of each training stage."""
    data: tuple[str, ...] = ()
    """Source, digest and rows of each dataset."""


@dataclass(frozen=True)
class Fact:
    """An answer, and where it is recorded."""

    text: str
    source: str


@dataclass(frozen=True)
class Question:
    """A point of the annex with everything that the record answers, and what it leaves open."""

    point: str
    """``Section 1, 1 (a)``."""
    asks: str
    facts: tuple[Fact, ...]
    unknown: tuple[str, ...]


def annex_xi(report: Report, model: ModelFacts) -> tuple[Question, ...]:
    """Return every point of the annex in its order."""
    return (*_general(report, model), *_process(report, model), *_systemic(report))


def _general(report: Report, model: ModelFacts) -> Iterator[Question]:
    """Yield section 1, point 1: the general description."""
    tasks = report.decision.task if report.decision is not None else ()
    yield Question(
        "Section 1, 1 (a)",
        "Tasks the model is meant for, and the AI systems that it can be a part of",
        _facts([f"Measured on this task: {task}" for task in tasks], "recipe, evaluations"),
        ("the intended tasks", "the type and nature of AI systems"),
    )
    yield Question("Section 1, 1 (b)", "Acceptable use policies", (), ("the acceptable use policies",))
    yield Question(
        "Section 1, 1 (c)",
        "Date of release, and methods of distribution",
        _facts(model.released, "ledger, publications"),
        ("a release outside the model registry",)
        if model.released
        else ("the date of release", "the methods of distribution"),
    )
    counted = [f"Values in the weight files: {model.parameters:,}"] if model.parameters is not None else []
    yield Question(
        "Section 1, 1 (d)",
        "Architecture and number of parameters",
        (
            *_facts(
                [f"Architecture: {model.architecture}"] if model.architecture else [], "artifact, config.json"
            ),
            *_facts(counted, "artifact, headers of *.safetensors"),
        ),
        (
            *(() if model.architecture else ("the architecture",)),
            *(() if counted else ("the number of parameters",)),
        ),
    )
    limits = [
        f"Text in and text out; prompts of at most {model.prompt_tokens} tokens, responses of at most {model.response_tokens} tokens"
    ]
    yield Question(
        "Section 1, 1 (e)",
        "Modality, and format of inputs and outputs",
        _facts(limits if model.prompt_tokens is not None else [], "recipe, generation"),
        () if model.prompt_tokens is not None else ("the format of inputs and outputs",),
    )
    yield Question(
        "Section 1, 1 (f)",
        "Licence",
        _facts([model.licence] if model.licence else [], "recipe, licenses"),
        () if model.licence else ("the licence",),
    )


def _process(report: Report, model: ModelFacts) -> Iterator[Question]:
    """Yield section 1, point 2: elements of the model and its development."""
    libraries = [
        f"{part} {' and '.join(value for value, _ in values)}"
        for part, values in report.environment
        if part in _LIBRARIES
    ]
    yield Question(
        "Section 1, 2 (a)",
        "Technical means that are needed to integrate the model",
        _facts([f"Computed with: {', '.join(libraries)}"] if libraries else [], "provenance"),
        ("instructions of use", "the infrastructure that a use needs"),
    )
    yield Question(
        "Section 1, 2 (b)",
        "Design of the model and of its training: methods, key choices and their reasons, what is optimised, parameters",
        _facts(model.design, "recipe, stages"),
        ("the reasons and assumptions of the choices",),
    )
    left_out = [f"{each.step}: {each.text}" for each in report.remarks if each.text.startswith("left out: ")]
    yield Question(
        "Section 1, 2 (c)",
        "Data for training, testing and validation: type, origin, curation, amount, scope, selection, measures against bias",
        (
            *_facts(model.data, "recipe, artifacts of the datasets"),
            *_facts(left_out, "report.json of the dataset"),
        ),
        ("how the data was obtained before it reached the recipe", "methods to find identifiable biases"),
    )
    yield Question(
        "Section 1, 2 (d)",
        "Computation of the training: operations, time and other details",
        _facts(list(_computation(report)), "run.json and ledger, attempts"),
        ("the number of floating-point operations",),
    )
    counted = list(_energies(report))
    measured = sum(cost.measured_attempts for cost in report.costs)
    attempts = sum(cost.attempts for cost in report.costs)
    unmeasured = "the energy of what was not measured" if counted else "the energy"
    yield Question(
        "Section 1, 2 (e)",
        "Energy",
        _facts(counted, f"ledger, counters of the machine in {measured} of {attempts} attempts"),
        () if counted and measured == attempts else (unmeasured,),
    )


def _energies(report: Report) -> Iterator[str]:
    """Yield what counters measured; the processor's counts for the whole machine, so its sum is an upper bound."""
    energies = [cost.energy for cost in report.costs if cost.energy is not None]
    gpu = [each.gpu_joules for each in energies if each.gpu_joules is not None]
    cpu = [each.cpu_joules for each in energies if each.cpu_joules is not None]
    if gpu:
        yield f"GPUs: {energy(sum(gpu))}"
    if cpu:
        yield f"Processor: at most {energy(sum(cpu))}"


def _computation(report: Report) -> Iterator[str]:
    for cost in report.costs:
        tokens = f", about {about(cost.tokens)} tokens" if cost.tokens else ""
        gpus = f", {cost.gpus} GPUs" if cost.gpus else ""
        yield f"{cost.step}: {duration(cost.all_seconds)} in {cost.attempts} attempts on {cost.device}{gpus}{tokens}"
    for step in report.steps:
        if step.made_by is not None:
            yield f"{step.name} was reused; run {step.made_by} computed it and records its time"


def _systemic(report: Report) -> Iterator[Question]:
    """Yield section 2, for models with systemic risk."""
    judged = report.decision.judged if report.decision is not None else ()
    results = [
        f"{each.step}: {effect.sentence(each.candidate, each.baseline)}"
        for each in judged
        for effect in each.effects
    ]
    gates = [
        f"{gate.step} asks for {gate.asks}: measured {number(gate.verdict.measured)}, interval "
        f"{interval_text(gate.verdict.interval)}, {'passed' if gate.verdict.passed else 'closed'}"
        for gate in report.gates
        if gate.verdict is not None
    ]
    alarms = [str(alarm) for alarm in (report.decision.alarms if report.decision is not None else ())]
    yield Question(
        "Section 2, 1",
        "Evaluation: strategies with criteria, metrics and the way in which limits are found; results",
        (
            *_facts(results, "run.json, evaluations"),
            *_facts(gates, "run.json, verdicts"),
            *_facts(alarms, "run.json, guards and remarks"),
        ),
        ("results by public evaluation protocols, unless an evaluation above is one",),
    )
    trained = [
        f"{step.name}: {words(step.kind)}, reads {', '.join(read for _, read in step.reads)}"
        for step in report.steps
        if not step.is_implicit and step.digest and step.kind != "evaluation"
    ]
    yield Question(
        "Section 2, 2",
        "Adversarial testing, inside and outside; adaptations of the model, such as alignment and fine-tuning",
        _facts([f"Adaptation {each}" for each in trained], "run.json, stages"),
        ("internal and external adversarial testing",),
    )
    yield Question(
        "Section 2, 3",
        "Architecture of the system: how its parts build on each other",
        _facts(
            [
                f"{step.name} is made of {', '.join(dict.fromkeys(read for _, read in step.reads))}"
                for step in report.steps
                if step.reads
            ],
            "run.json, lineage",
        ),
        ("the system that the model becomes a part of",),
    )


def _facts(texts: "tuple[str, ...] | list[str]", source: str) -> tuple[Fact, ...]:
    return tuple(Fact(text, source) for text in texts)
