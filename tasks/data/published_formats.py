"""Formats of published data: which columns a file of each has, and in which order they are tried."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from vantage.schemas.steps import CONTENT_COLUMNS, MADE_COLUMNS, OPTIONAL_COLUMNS
from vantage.tasks.data.garbled_rows import MARKS
from vantage.tasks.data.spellings import Spellings

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
    "inputs",
    "user_prompt",
    "user_input",
    "问题",
    "指令",
)
_RESPONSES = (
    "response",
    "output",
    "completion",
    "solution",  # before "answer", since the solution contains the reasoning too
    "answer",
    "reply",
    "target",
    "targets",
    "model_response",
    "回答",
    "输出",
)
_CONVERSATIONS = (
    "messages",
    "conversations",
    "conversation",
    "dialogue",
    "dialog",
    "turns",
    "text",
    "input.messages",
    "trajectory",
)
_CHOSEN = (
    ("chosen", "rejected"),
    ("chosen_response", "rejected_response"),
    ("response_chosen", "response_rejected"),
    ("preferred", "dispreferred"),
    ("preferred_output", "non_preferred_output"),
    ("better_response", "worse_response"),
    ("pos_resp", "neg_resp"),
    ("response_w", "response_l"),
    ("answer_chosen", "answer_rejected"),
    ("chosen_answer", "rejected_answer"),
    ("chosen_completion", "rejected_completion"),
    ("accepted", "rejected"),
    ("winner", "loser"),
)
_CHOSEN_UNLESS_JUDGED = (("response_j", "response_k"), ("answer_j", "answer_k"))
"""Names whose first one is the better response of the pair (stack-exchange-paired), unless a label contradicts that."""
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
    "better",
    "best",
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
_IN_SCORES = (
    ".*.score",
    ".*.overall_score",
    ".*.rating",
    ".*.fine-grained_score",
    ".*.reward",
    ".*.pm_score",
)
_ANSWERS = ("answer", "solution", "final_answer", "reference", "ground_truth", "target", "label")
_ANSWERS_BESIDE = ("answer", "final_answer", "ground_truth", "solution")
"""Names of answers beside columns with our names, or a conversation, where `label` and the like may be anything."""
_GRADES = ("helpfulness", "score", "rating", "reward", "overall_score", "grade")
"""Names of a single answer's grade; if there are several, the first one here is used."""
_RANKS = ("ranks", "rank")
"""Names of ranks; `ranking` is not one, since it may also be the order of the responses."""
_COLUMNS_EACH = tuple(
    f"{noun}_{which}"
    for noun in ("response", "answer", "output", "completion")
    for which in ("[0-9]", "[ab]")
)
"""Patterns of columns that each hold one response."""
_SIGNED = {"first": ("-3", "-2", "-1"), "second": ("1", "2", "3"), "tie": ("0",)}


@dataclass(frozen=True)
class Format:
    """Mapping by which the rows of a file become rows of one content."""

    name: str
    columns: Columns
    labels: Labels = field(default_factory=dict)

    @property
    def is_own(self) -> bool:
        """Return whether the file's columns have our names."""
        return self.name == OWN

    @property
    def is_recognised(self) -> bool:
        """Return whether the mapping was found from the rows."""
        return self.name not in (OWN, MAPPED)


def own_format(content: str) -> Format:
    """Return the format of a file whose columns have our names."""
    return Format(OWN, {column: column for column in CONTENT_COLUMNS[content]})


def optional_columns(content: str) -> tuple[str, ...]:
    """Return the columns that a file in our own format may lack."""
    return tuple(column for column in OPTIONAL_COLUMNS[content] if column not in MADE_COLUMNS)


def candidates(content: str, spelt: Spellings) -> Iterator[Format]:
    """Yield the formats to try, without those that need a column which the file lacks."""
    if content == "prompts":  # the prompt has our name, and the answer does not
        yield Format(
            "prompts with answers (verl)", {"prompt": "prompt", "answer": "reward_model.ground_truth"}
        )
        if "answer" not in spelt.names:
            for answer in _ANSWERS_BESIDE:
                yield Format("prompts with answers", {"prompt": "prompt", "answer": answer})
    yield own_format(content)
    if content == "labelled_responses":
        yield from _marked_answers(spelt)
    elif content in ("preferences", "rankings"):
        yield from (_preferences if content == "preferences" else _rankings)(spelt)
    else:
        yield from (_demonstrations if content == "demonstrations" else _prompts)(spelt)


def _demonstrations(spelt: Spellings) -> Iterator[Format]:
    yield from _conversations(spelt)
    for prompt, response in product(spelt.present(_PROMPTS), spelt.present(_RESPONSES)):
        if prompt != response:
            yield from _with_history("instructions with answers", {"prompt": prompt, "response": response})


def _conversations(spelt: Spellings) -> Iterator[Format]:
    for column in spelt.present(_CONVERSATIONS):
        for extra in (("system", "tools"), ("tools",), ("system",), ()):
            yield Format("conversations", {"conversation": column, **{name: name for name in extra}})


def _with_history(name: str, columns: Columns) -> Iterator[Format]:
    """Yield the format with Alpaca's optional columns (in LLaMA-Factory's form), if the file has them; then without."""
    for extra in (("system", "history"), ("system",), ("history",), ()):
        yield Format(name, {**columns, **{column: column for column in extra}})


def _preferences(spelt: Spellings) -> Iterator[Format]:
    prompts, conversations = spelt.present(_PROMPTS), spelt.present(_CONVERSATIONS)
    labels = spelt.present(_LABELS)
    for chosen, rejected in spelt.present_pairs(_CHOSEN):
        for column in conversations:
            yield Format(
                "conversations with two answers",
                {"conversation": column, "chosen": chosen, "rejected": rejected},
            )
        for prompt in prompts:
            yield from _with_history("pairs", {"prompt": prompt, "chosen": chosen, "rejected": rejected})
        yield Format("pairs of conversations, the prompt in both", {"chosen": chosen, "rejected": rejected})
    for (first, second), label in product(spelt.present_pairs(_SIDES), labels):
        sides = {"response_a": first, "response_b": second, "label": label}
        for prompt in prompts:
            yield Format("judgments of two answers", {"prompt": prompt, **sides})
        for column in conversations:
            yield Format("judgments of two answers", {"conversation": column, **sides})
        yield Format("judgments of two conversations", sides)
    yield from _published_judgments()
    for prompt, responses, label in product(prompts, _response_lists(spelt), labels):
        yield Format(
            "judgments of two answers in a list", {"prompt": prompt, "responses": responses, "label": label}
        )
    for form in _graded(spelt):
        yield Format("graded answers: the best against the worst", form.columns)
    yield from _single_answers(spelt)
    yield from _marked_answers(spelt)
    if not set(_LABELS) & set(spelt.names):
        for (chosen, rejected), prompt in product(_CHOSEN_UNLESS_JUDGED, prompts):
            yield Format("pairs", {"prompt": prompt, "chosen": chosen, "rejected": rejected})


def _marked_answers(spelt: Spellings) -> Iterator[Format]:
    prompts, responses = spelt.present(_PROMPTS), spelt.present(_RESPONSES)
    for (prompt, response), mark in product(product(prompts, responses), MARKS):
        if mark in spelt.names:
            columns = {"prompt": prompt, "response": response, "label": mark}
            yield Format("single answers, good or bad (KTO)", columns)
    for column, mark in product(spelt.present(_CONVERSATIONS), MARKS):
        yield Format("single answers, good or bad (KTO)", {"conversation": column, "label": mark})


def _published_judgments() -> Iterator[Format]:
    """Yield formats of published judgments whose numbers have a special meaning."""
    yield Format(
        "judgments of two comments (SHP)",
        {"prompt": "history", "response_a": "human_ref_A", "response_b": "human_ref_B", "label": "labels"},
        {"first": ("1",), "second": ("0",)},
    )
    sides = {"responses": "response_[ab]", "scores": "winner_model_[ab]"}  # the winner has 1
    yield Format("judgments, a column for each answer (Chatbot Arena)", {"prompt": "prompt", **sides})
    sides = {"response_a": "response1", "response_b": "response2", "label": "overall_preference"}
    yield Format("judgments from -3 to 3 (HelpSteer3)", {"conversation": "context", **sides}, _SIGNED)
    yield Format("judgments from -3 to 3 (HelpSteer3)", {"prompt": "prompt", **sides}, _SIGNED)
    sides = {"response_a": "response_1", "response_b": "response_2", "label": "preference_strength"}
    yield Format("judgments from -3 to 3 (HelpSteer2)", {"prompt": "prompt", **sides}, _SIGNED)


def _single_answers(spelt: Spellings) -> Iterator[Format]:
    for grade in _GRADES:
        if grade in spelt.names:
            for prompt, response in product(spelt.present(_PROMPTS), spelt.present(_RESPONSES)):
                columns = {"prompt": prompt, "response": response, "score": grade}
                yield Format("single graded answers, by their prompt", columns)


def _rankings(spelt: Spellings) -> Iterator[Format]:
    prompts, response_lists = spelt.present(_PROMPTS), _response_lists(spelt)
    for responses in response_lists:
        base = responses.partition(".")[0]
        for asked in ({"conversation": "prompt"}, *({"prompt": name} for name in prompts)):
            yield Format("ranked answers", {**asked, "responses": responses, "ranks": f"{base}.*.rank"})
    for prompt, responses, ranks in product(prompts, response_lists, _RANKS):
        yield Format("ranked answers", {"prompt": prompt, "responses": responses, "ranks": ranks})
    yield from _graded(spelt)
    yield from _single_answers(spelt)


def _graded(spelt: Spellings) -> Iterator[Format]:
    prompts = spelt.present(_PROMPTS)
    for prompt, responses in product(prompts, _response_lists(spelt)):
        base = responses.partition(".")[0]
        for scores in (*(f"{base}{inside}" for inside in _IN_SCORES), *_SCORES):
            yield Format("graded answers", {"prompt": prompt, "responses": responses, "scores": scores})
    for prompt, responses in product(prompts, spelt.present(_COLUMNS_EACH)):
        for scores in ("score", "rating"):
            which = responses.rpartition("_")[2]
            yield Format(
                "graded answers", {"prompt": prompt, "responses": responses, "scores": f"{scores}_{which}"}
            )


def _response_lists(spelt: Spellings) -> list[str]:
    return spelt.present(f"{name}{inside}" for name in _LISTS for inside in _IN_LISTS)


def _prompts(spelt: Spellings) -> Iterator[Format]:
    prompts = spelt.present(_PROMPTS)
    for prompt in prompts:
        for answer in _ANSWERS:
            if prompt != answer:
                yield Format("prompts with answers", {"prompt": prompt, "answer": answer})
    for form, answer in product(_conversations(spelt), _ANSWERS_BESIDE):
        yield Format("conversations with answers", {**form.columns, "answer": answer})
    yield from _conversations(spelt)
    for prompt in prompts:
        yield Format("prompts", {"prompt": prompt})
