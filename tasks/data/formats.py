"""Formats of data that people publish: recognised by reading the first rows of a file as each of them in turn."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

from schemas.steps import CONTENT_COLUMNS, OPTIONAL_COLUMNS
from tasks.data.assembly import Assembly
from tasks.data.columns import MissingColumn, RowMapper, WrongValue, is_pattern
from tasks.data.judgments import Undecided

SAMPLE_ROWS = 1000
"""Rows by which a format is recognised."""
READ_SHARE = 0.9
"""Least share of them that must be readable in it."""

Columns = dict[str, str]
Labels = Mapping[str, Sequence[str]]

OWN = "our own columns"
MAPPED = "as the recipe maps it"
_PROMPTS = (
    "prompt",
    "{instruction}\n{input}",
    "{instruction}\n{context}",
    "instruction",
    "question",
    "question.full_text",
    "query",
    "problem",
    "info.post",
    "input",
)
_RESPONSES = ("response", "output", "completion", "answer", "solution", "reply", "target")
_CONVERSATIONS = (
    "messages",
    "conversations",
    "conversation",
    "dialogue",
    "dialog",
    "turns",
    "text",
    "input.messages",
)
_CHOSEN = (
    ("chosen", "rejected"),
    ("chosen_response", "rejected_response"),
    ("response_chosen", "response_rejected"),
    ("preferred", "dispreferred"),
    ("preferred_output", "non_preferred_output"),
    ("better_response", "worse_response"),
    ("pos_resp", "neg_resp"),
)
_SIDES = tuple(
    (first.format(noun), second.format(noun))
    for noun in ("response", "answer", "output", "completion", "conversation")
    for first, second in (
        ("{}_a", "{}_b"),
        ("{}_0", "{}_1"),
        ("{}_1", "{}_2"),
        ("{}_A", "{}_B"),
        ("{}_j", "{}_k"),
        ("{}1", "{}2"),
    )
)
_LABELS = (
    "label",
    "labels",
    "winner",
    "preference",
    "preferred",
    "choice",
    "better_response_id",
    "judgment",
    "judgement",
    "annotations",
    "verdict",
    "votes",
    *(
        f"{several}.{inside}"
        for several in ("annotations.*", "annotators.*", "votes.*")
        for inside in ("label", "winner", "preference", "choice")
    ),
    "annotators.*",
    *(
        f"{one}_{which}"
        for one in ("annotator", "annotation", "rater", "label")
        for which in ("[0-9]*", "[a-z]")
    ),
)
_LISTS = ("responses", "completions", "answers", "candidates", "outputs", "summaries", "generations")
_IN_LISTS = ("", ".*.response", ".*.text", ".*.content", ".*.answer")
_SCORES = ("scores", "ratings", "rewards", "grades")
_IN_SCORES = (".*.score", ".*.overall_score", ".*.rating", ".*.fine-grained_score")
_ANSWERS = ("answer", "solution", "final_answer", "reference", "ground_truth", "target", "label")
_RANKS = ("ranks", "ranking", "rank")
_COLUMNS_EACH = tuple(
    f"{noun}_{which}"
    for noun in ("response", "answer", "output", "completion")
    for which in ("[0-9]", "[ab]")
)
"""Responses that stand in columns of their own."""
_SIGNED = {"first": ("-3", "-2", "-1"), "second": ("1", "2", "3"), "tie": ("0",)}
_NUMBERS = ({"first": ("0",), "second": ("1",)}, {"first": ("1",), "second": ("2",)})


@dataclass(frozen=True)
class Format:
    """How the rows of a file become rows of one content."""

    name: str
    columns: Columns
    labels: Labels = field(default_factory=dict)

    @property
    def is_own(self) -> bool:
        """Whether the file's columns are called like ours."""
        return self.name == OWN

    @property
    def is_recognised(self) -> bool:
        """Whether the mapping was found by looking at the rows."""
        return self.name not in (OWN, MAPPED)


def recognise(rows: Sequence[Mapping[str, Any]], content: str, *, is_text: bool) -> Format | None:
    """The first format in which at least nine tenths of the rows can be read as ``content``; None: none.

    Args:
        rows: the first rows of a file.
        is_text: they hold nothing but text.
    """
    names = {name for row in rows for name in row}
    for candidate in _candidates(content):
        if not all(_has(names, path) for path in _paths(candidate.columns)):
            continue
        for labels in _labels(candidate, rows):
            found = Format(candidate.name, candidate.columns, labels)
            if share_read(rows, content, found, is_text=is_text) >= READ_SHARE:
                return found
    return None


def share_read(rows: Sequence[Mapping[str, Any]], content: str, form: Format, *, is_text: bool) -> float:
    """Share of the rows that can be read in the format; labels that are a tie are read."""
    if not rows:
        return 0.0
    assembly = Assembly(content, tuple(form.columns), form.labels)
    mapper = RowMapper(form.columns, is_text=is_text, keeps_turns=True)
    num_read = 0
    for row in rows:
        try:
            made = assembly.assemble(mapper.map(row))
        except Undecided:
            num_read += 1
        except (WrongValue, MissingColumn, ValueError):
            continue
        else:
            num_read += all(made[column] for column in CONTENT_COLUMNS[content])
    return num_read / len(rows)


def own_format(content: str) -> Format:
    """The format of a file whose columns are called like ours."""
    return Format(OWN, {column: column for column in CONTENT_COLUMNS[content]})


def optional_columns(content: str) -> tuple[str, ...]:
    """Columns that a file in our own format may have or not."""
    return tuple(column for column in OPTIONAL_COLUMNS[content] if column != "messages")


def _candidates(content: str) -> Iterator[Format]:
    if content == "prompts":  # whose prompt is called like ours, and the answer is not
        yield Format(
            "prompts with answers (verl)", {"prompt": "prompt", "answer": "reward_model.ground_truth"}
        )
    yield own_format(content)
    yield from {
        "demonstrations": _demonstrations,
        "preferences": _preferences,
        "rankings": _rankings,
        "prompts": _prompts,
    }[content]()


def _demonstrations() -> Iterator[Format]:
    yield from _conversations()
    for prompt, response in product(_PROMPTS, _RESPONSES):
        if prompt != response:
            yield from _with_history("instructions with answers", {"prompt": prompt, "response": response})


def _conversations() -> Iterator[Format]:
    for column in _CONVERSATIONS:
        for extra in (("system", "tools"), ("tools",), ("system",), ()):
            yield Format("conversations", {"conversation": column, **{name: name for name in extra}})


def _with_history(name: str, columns: Columns) -> Iterator[Format]:
    """Alpaca's optional columns as LLaMA-Factory has them, where the file has them; then without."""
    for extra in (("system", "history"), ("system",), ("history",), ()):
        yield Format(name, {**columns, **{column: column for column in extra}})


def _preferences() -> Iterator[Format]:
    for chosen, rejected in _CHOSEN:
        for column in _CONVERSATIONS:
            yield Format(
                "conversations with two answers",
                {"conversation": column, "chosen": chosen, "rejected": rejected},
            )
        for prompt in _PROMPTS:
            yield from _with_history("pairs", {"prompt": prompt, "chosen": chosen, "rejected": rejected})
        yield Format("pairs of conversations, the prompt in both", {"chosen": chosen, "rejected": rejected})
    for (first, second), label in product(_SIDES, _LABELS):
        sides = {"response_a": first, "response_b": second, "label": label}
        for prompt in _PROMPTS:
            yield Format("judgments of two answers", {"prompt": prompt, **sides})
        for column in _CONVERSATIONS:
            yield Format("judgments of two answers", {"conversation": column, **sides})
        yield Format("judgments of two conversations", sides)
    yield from _published_judgments()
    for prompt, responses, label in product(_PROMPTS, _response_lists(), _LABELS):
        yield Format(
            "judgments of two answers in a list", {"prompt": prompt, "responses": responses, "label": label}
        )
    for form in _graded():
        yield Format("graded answers: the best against the worst", form.columns)


def _published_judgments() -> Iterator[Format]:
    """Judgments whose numbers mean something of their own."""
    yield Format(
        "judgments of two comments (SHP)",
        {"prompt": "history", "response_a": "human_ref_A", "response_b": "human_ref_B", "label": "labels"},
        {"first": ("1",), "second": ("0",)},
    )
    sides = {"response_a": "response1", "response_b": "response2", "label": "overall_preference"}
    yield Format("judgments from -3 to 3 (HelpSteer3)", {"conversation": "context", **sides}, _SIGNED)
    yield Format("judgments from -3 to 3 (HelpSteer3)", {"prompt": "prompt", **sides}, _SIGNED)


def _rankings() -> Iterator[Format]:
    for responses in _response_lists():
        base = responses.partition(".")[0]
        for asked in ({"conversation": "prompt"}, *({"prompt": name} for name in _PROMPTS)):
            yield Format("ranked answers", {**asked, "responses": responses, "ranks": f"{base}.*.rank"})
    for prompt, responses, ranks in product(_PROMPTS, _response_lists(), _RANKS):
        yield Format("ranked answers", {"prompt": prompt, "responses": responses, "ranks": ranks})
    yield from _graded()


def _graded() -> Iterator[Format]:
    for prompt, responses in product(_PROMPTS, _response_lists()):
        base = responses.partition(".")[0]
        for scores in (*(f"{base}{inside}" for inside in _IN_SCORES), *_SCORES):
            yield Format("graded answers", {"prompt": prompt, "responses": responses, "scores": scores})
    for prompt, responses in product(_PROMPTS, _COLUMNS_EACH):
        for scores in ("score", "rating"):
            which = responses.rpartition("_")[2]
            yield Format(
                "graded answers", {"prompt": prompt, "responses": responses, "scores": f"{scores}_{which}"}
            )


def _response_lists() -> Iterable[str]:
    return [f"{name}{inside}" for name in _LISTS for inside in _IN_LISTS]


def _prompts() -> Iterator[Format]:
    for prompt in _PROMPTS:
        for answer in _ANSWERS:
            if prompt != answer:
                yield Format("prompts with answers", {"prompt": prompt, "answer": answer})
    yield from _conversations()
    for prompt in _PROMPTS:
        yield Format("prompts", {"prompt": prompt})


def _labels(candidate: Format, rows: Sequence[Mapping[str, Any]]) -> Iterator[Labels]:
    """The readings of a label to try: the format's own; else words, and where both numbers stand in the rows, those."""
    yield candidate.labels
    if "label" not in candidate.columns or candidate.labels:
        return
    mapper = RowMapper({"label": candidate.columns["label"]})
    found: set[str] = set()
    for row in rows:
        try:
            value = mapper.map(row)["label"]
        except WrongValue:
            continue
        found.update(
            str(label) for label in (value if isinstance(value, list) else [value]) if label is not None
        )
    for labels in _NUMBERS:
        if found == {label for named in labels.values() for label in named}:
            yield labels


def _has(names: Collection[str], path: str) -> bool:
    """Whether rows with these names may have something at the path; only its first name is asked for."""
    first = path.partition(".")[0]
    return (
        path in names
        or first in names
        or (is_pattern(first) and any(fnmatchcase(name, first) for name in names))
    )


def _paths(columns: Columns) -> Iterator[str]:
    for spec in columns.values():
        yield from RowMapper({"prompt": spec}).paths()
