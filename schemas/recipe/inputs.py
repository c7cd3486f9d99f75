"""The inputs of a recipe: its model, settings of sampling, datasets and verifiers."""

from datetime import date as date_type
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator

from vantage.schemas.doubled import doubled
from vantage.schemas.frozen import Frozen, rule
from vantage.schemas.recipe.fields import (
    MAX_NAMED,
    Count,
    Fraction,
    Name,
    Positive,
    Probability,
    Similarity,
    Switch,
    is_default,
    is_unset,
)
from vantage.schemas.recipe.lora import Lora
from vantage.schemas.recipe.sources import (
    Builtin,
    DataSource,
    HubDataset,
    LocalPath,
    ModelSource,
    Registered,
    data_source,
    model_source,
)

MODEL = "model"
"""The name by which a stage refers to the recipe's model."""

Content = Literal["demonstrations", "preferences", "rankings", "labelled_responses", "prompts"]
"""Content of a dataset's rows."""


class SourcedModel(Frozen):
    """A model with its source."""

    source: str
    """``builtin:tiny`` or ``builtin:nano``, a Hugging Face folder, ``gguf:FILE``, ``package:NAME``, ``hub:org/name@revision``, or
    a policy that another run has made: ``RUN/STAGE`` or ``latest/STAGE``. A run looks the stage up once, when it begins, and
    keeps to what it found."""
    base: str | None = Field(None, exclude_if=is_unset)
    """The base model of an adapter, in the form of ``source``; for a ``source`` that is the folder of an adapter (LoRA,
    as peft saves it). The adapter is merged into it when it is imported; the name in ``adapter_config.json`` is not
    followed."""

    @property
    def whole(self) -> str:
        """The source that names a whole model."""
        return self.source if self.base is None else self.base

    @property
    def origin(self) -> ModelSource:
        """Return what ``whole`` names."""
        return model_source(self.whole)

    @property
    def adapter(self) -> Path | None:
        """The folder of the adapter that is merged into it."""
        return None if self.base is None else Path(self.source)


class OtherModel(SourcedModel):
    """A model beside the recipe's own: stages sample from it, compare with it, or train a reward model from it."""

    source: str
    """``builtin:tiny``, a Hugging Face folder, ``gguf:FILE``, ``package:NAME``, ``hub:org/name@revision``, a policy that
    another run has made (``RUN/STAGE``, ``latest/STAGE``), or one that Vantage has published in MLflow:
    ``models:/NAME@ALIAS`` or ``models:/NAME/VERSION``. A run looks up such a stage or version once, when it begins, and keeps to
    it. Where a term or ``reward_evaluation`` names it, it is a reward model instead."""
    otherwise: Name | None = Field(None, exclude_if=is_unset)
    """The stage (or ``model``) whose policy replaces it as long as MLflow has no such version. None: the run is refused
    then."""

    @rule
    def _only_a_registered_model_may_be_missing(self) -> None:
        if self.otherwise is not None and not isinstance(self.origin, Registered):
            raise ValueError(
                f"otherwise={self.otherwise} stands in for a registered model that MLflow does not have, and "
                f"source={self.source!r} is none; leave it out, or write source: models:/NAME@ALIAS"
            )

    @property
    def stand_in(self) -> str | None:
        """The stage that replaces it, if MLflow had no such version when the run began."""
        return self.otherwise if isinstance(self.origin, Registered) and self.origin.is_absent else None


DEFAULT_DATE = date_type(2024, 7, 26)
"""The date that chat templates write unless a recipe names another: that of Llama 3.1's own template."""


class Model(SourcedModel):
    """The pretrained (or built-in, untrained) model that the pipeline starts from."""

    chat: Switch | None = None
    """Wrap prompts in the tokenizer's chat template; None: if it has one."""
    date: date_type = Field(DEFAULT_DATE, exclude_if=is_default(DEFAULT_DATE))
    """The date (``YYYY-MM-DD``) that a chat template writes where it would ask for today's, at midnight UTC: the same in every
    stage, on every day and machine. It is in the stage keys of models whose template writes a date, and of those whose
    template cannot be read when the key is made (hub, MLflow) if it is not the default."""
    lora: Lora | None = Field(None, exclude_if=is_unset)
    """Adapters that every stage trains instead of all weights, unless it has a ``lora`` of its own. None: stages train
    all weights."""
    quantization: Literal["nf4"] | None = Field(None, exclude_if=is_unset)
    """``nf4``: QLoRA. Linear layers but the output head are rounded to 4 bits when the model is imported, and held so beneath
    adapters; needs ``lora`` and the package bitsandbytes. None: as they are."""


StopString = Annotated[str, StringConstraints(pattern=r"^[^\uFFFD]+$", max_length=200)]
"""A text that ends a response. U+FFFD stands for bytes that are no character, so no text has it."""


class Generation(Frozen):
    """Settings of sampled text, the same for all stages."""

    max_prompt_tokens: Count = 512
    """Longest prompt, in tokens; longer ones are dropped and counted."""
    max_response_tokens: Count = 512
    """Longest response, in tokens, with its end-of-sequence token; sampling is cut off there."""
    temperature: Positive = 1.0
    """Temperature of sampling. Training divides logits by it too: log-probabilities are those of the sampler."""
    stop: tuple[StopString, ...] = Field(default=(), max_length=MAX_NAMED, exclude_if=is_default(()))
    """Texts that end a response, in addition to its end-of-sequence token: it ends with the token that completes the
    first of them. All of its tokens are trained on and scored; verifiers and judges read the text before the stop string.
    Stop strings in the prompt do not count."""

    @rule
    def _stops_are_different(self) -> None:
        twice = doubled(self.stop)
        if twice:
            raise ValueError(f"stop has {twice[0]!r} twice; leave one out")


class Shares(Frozen):
    """The held-out shares of all prompts, the same in every dataset of a recipe."""

    validation: Fraction = 0.05
    test: Fraction = 0.05


class Split(Frozen):
    """Held-out rows, by prompt: ``validation`` selects checkpoints, ``test`` is for gates and evaluation only.

    A hash of the prompt and the recipe's ``Shares`` decide the split of a prompt. So no prompt that one dataset holds
    out is trained on in another.
    """

    validation: Count | Fraction | None = None
    """A share of all prompts, which must be the same in every dataset; or a number of rows from that share, of which
    the rest is not used. None: the share that other datasets give, else 0.05."""
    test: Count | Fraction | Literal["all"] | None = None
    """A share of all prompts, or a number of rows, for gates and evaluation. ``all``: the dataset is a test set, whose rows
    evaluations alone read. No other dataset of the recipe trains on its prompts, or selects checkpoints by them: their rows with
    such prompts are left out."""

    @rule
    def _a_test_set_has_test_rows_alone(self) -> None:
        if self.test == "all" and self.validation is not None:
            raise ValueError(
                f"validation={self.validation:g} of a dataset whose rows are all test rows (test=all); leave it out"
            )

    @rule
    def _shares_leave_training_rows(self) -> None:
        held_out = sum(size for size in (self.validation, self.test) if isinstance(size, float))
        if held_out >= 1.0:
            raise ValueError(
                f"validation={self.validation:g} and test={self.test:g} leave nothing to train on; "
                "use shares that add up to less than 1"
            )


Column = Literal[
    "prompt",
    "response",
    "chosen",
    "rejected",
    "margin",
    "responses",
    "ranks",
    "answer",
    "conversation",
    "history",
    "system",
    "tools",
    "response_a",
    "response_b",
    "label",
    "scores",
    "score",
    "subgroup",
]
_NOT_TEXT = ("margin", "responses", "ranks", "conversation", "history", "tools", "label", "scores", "score")


class Labels(Frozen):
    """The meaning of the labels of judgments: which of two responses each label prefers."""

    first: tuple[str, ...]
    """Labels that prefer the first response; numbers count as text."""
    second: tuple[str, ...]
    """Labels that prefer the second response."""
    tie: tuple[str, ...] = ()
    """Labels that prefer neither."""

    @field_validator("first", "second", "tie", mode="before")
    @classmethod
    def _as_texts(cls, found: Any) -> Any:
        found = found if isinstance(found, list | tuple) else [found]
        return tuple(str(label) if isinstance(label, bool | int | float) else label for label in found)

    @rule
    def _each_means_one_thing(self) -> None:
        known = [label.strip().casefold() for found in (self.first, self.second, self.tie) for label in found]
        twice = sorted(doubled(known))
        if twice:
            raise ValueError(f"the label {twice[0]!r} occurs twice; let it mean one of first, second and tie")


class NearDuplicates(Frozen):
    """Rows for training whose prompt is nearly one that is held out: they are left out, reported, and limited.

    Held-out prompts are the dataset's own, those of test sets (``split.test: all``), and those of ``held_out_of``.
    """

    similarity: Similarity = 0.8
    """Two prompts are near-duplicates from this Jaccard similarity on: the share of their sequences of three characters
    (without case and repeated white space) that both have. For a conversation, the user's first message is compared."""
    max_dropped: Probability = 0.1
    """Largest share of the rows for training that may be left out; above it the data is refused. Prompts that share a long
    template are alike without being leaks: a higher similarity separates them."""
    held_out_of: tuple[Name, ...] = Field(default=(), max_length=MAX_NAMED, exclude_if=is_default(()))
    """Other datasets of the recipe whose held-out prompts count as well. Test sets need not be named."""

    @rule
    def _names_are_different(self) -> None:
        twice = doubled(self.held_out_of)
        if twice:
            raise ValueError(f"held_out_of has {twice[0]} twice; leave one out")


CONFIG_PATTERN = r"^[A-Za-z0-9_.,+=()&@~-]+$"
ConfigName = Annotated[str, StringConstraints(pattern=CONFIG_PATTERN, max_length=200)]
"""A configuration of a dataset on the hub."""
SPLIT_PATTERN = r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$"
SplitName = Annotated[str, StringConstraints(pattern=SPLIT_PATTERN, max_length=200)]
"""A split of a dataset on the hub, without a slice: ``max_rows`` is the number of its rows that are read."""


class Load(Frozen):
    """The rows of a dataset on the hub that are read: a configuration, a split, and how many."""

    split: SplitName
    """The split: ``train``, ``test`` or as the dataset calls it. Its rows are split once more by the recipe's ``split``."""
    config: ConfigName | None = Field(None, exclude_if=is_unset)
    """The configuration (the hub also calls it subset). None: the only one, or the one that the dataset has as its default."""
    max_rows: Count | None = Field(None, exclude_if=is_unset)
    """Rows that are read, from the first on; None: all."""
    streaming: Switch = False
    """Fetch only what is read, and keep nothing. False: the split's files are fetched whole into the hub's cache, where other
    runs find them. The rows are the same, so it is in no stage key."""


class Data(Frozen):
    """A named dataset: where it comes from and how its columns are read."""

    source: str
    """``builtin:NAME/KIND``, or a ``.json``, ``.jsonl``, ``.csv``, ``.parquet`` or ``.arrow`` file (relative to the recipe's
    folder); the first three also packed, if the name ends with ``.gz``, ``.bz2``, ``.xz`` or ``.zst``. At most 16 GiB,
    packed and unpacked, or ``VANTAGE_MAX_DATA_GIB``. ``*`` and ``?`` in its last part name several files of one format,
    whose rows are read in the order of the files' names. A folder that ``save_to_disk`` of the library datasets wrote is such files, too. ``hub:ORGANISATION/NAME@COMMIT/FILE`` names such files of a dataset's
    repository on the Hugging Face hub, ``hub:ORGANISATION/NAME@COMMIT`` the dataset, of which ``load`` names a split."""
    load: Load | None = Field(default=None, exclude_if=is_unset)
    """The rows of ``hub:ORGANISATION/NAME@COMMIT`` that are read; any other source has no ``load``."""
    columns: dict[Column, str] = Field(default_factory=dict)
    """Our column → a column of the file (``chosen.value`` is a field inside it) or a template
    ``"{instruction} {input}"``. A verifier gets ``answer`` with the prompt. ``reward_evaluation`` measures each ``subgroup`` of
    preferences on its own. A number in place of text makes the row unusable, except in ``answer``, ``subgroup`` and in
    a template, where it is converted to text. Cells of CSV are text, with commas between them, or with semicolons, tabs or bars if
    the header has no comma; empty ones are missing. Empty: the format is recognised from the file's first 1,000 rows (``vantage data inspect`` shows it).

    Conversations (lists of messages, HH transcripts) are read from ``conversation``, which ends with the response of a
    demonstration, or from ``prompt``, ``chosen`` and ``rejected``; two conversations without a prompt have it in common.
    ``history`` holds earlier rounds, ``system`` a system message, ``tools`` the tools that a chat template shows.
    Judgments are ``response_a`` and ``response_b``, or two ``responses``, with a ``label`` or a list of annotators' labels,
    whose majority counts; ties rank nothing and are left out. ``scores`` rank ``responses``, the highest first. A single
    ``response`` with a ``score``, or with a ``label`` that marks it as good (true) or bad (false), is compared with the others
    of its prompt, wherever in the file they are; a ``kto`` stage learns each with its ``label``, uncompared. ``a.*.b`` is the list of ``b`` in all items of ``a``, and ``score_[0-9]`` is
    the list of all columns with such a name, in the order of their names."""
    labels: Labels | None = Field(default=None, exclude_if=lambda labels: labels is None)
    """Meaning of each ``label``; None: ``A``, ``B``, ``tie`` and the like (``response_a``, ``model_b``, ``first`` …)."""
    system: str | None = Field(default=None, exclude_if=lambda text: text is None)
    """A system message for rows that have none."""
    split: Split = Split()
    """How many rows are held out for validation and test."""
    rows: Count | None = None
    """Most rows for training; None: all rows of the source."""
    near_duplicates: NearDuplicates | None = Field(default=None, exclude_if=is_unset)
    """Leave out rows for training that are nearly the same as a held-out prompt. None: only prompts that are equal up to case
    and white space are kept on one side, since near-duplicates of short prompts (for example sums) are no leaks."""
    max_dropped: Probability = 0.01
    """Largest share of unusable rows; above it the data is refused. Unusable are rows that cannot be read, are empty,
    or have equal sides; and, in a stage that reads them, rows whose prompt is too long or whose sides are equal after
    truncation. Repeated rows are dropped and reported, and do not count."""

    @property
    def origin(self) -> DataSource:
        """Return what ``source`` names."""
        return data_source(self.source)

    @property
    def is_test_set(self) -> bool:
        """Return whether all of its rows are test rows."""
        return self.split.test == "all"

    @rule
    def _a_dataset_of_the_hub_is_loaded(self) -> None:
        is_dataset = isinstance(self.origin, HubDataset)
        if is_dataset and self.load is None:
            raise ValueError(
                f"load=None, and source={self.source!r} is a dataset, which has splits; name one with load: {{split: train}}, "
                "or name files as source: hub:ORGANISATION/NAME@COMMIT/FILE"
            )
        if not is_dataset and self.load is not None:
            raise ValueError(
                f"load is about source: hub:ORGANISATION/NAME@COMMIT, and source={self.source!r} is no such dataset; leave load "
                "out, and name the folder or the files of one split as source"
            )

    @rule
    def _a_test_set_trains_nothing(self) -> None:
        if not self.is_test_set:
            return
        if isinstance(self.origin, Builtin):
            raise ValueError(
                f"split.test=all makes a test set of a file, and source={self.source!r} is built in, with "
                "test rows of its own; give a number of rows"
            )
        for field in ("rows", "near_duplicates"):
            if getattr(self, field) is not None:
                raise ValueError(
                    f"{field} is about rows for training, and with split.test=all there are none; leave it out"
                )

    @rule
    def _templates_make_text(self) -> None:
        for column, spec in self.columns.items():
            if column in _NOT_TEXT and "{" in spec:
                raise ValueError(
                    f"columns.{column}={spec!r} is a template, which makes a text, and {column} is not a text; "
                    "name a column of the file"
                )


class HeldOutRows(Frozen):
    """Held-out rows of a mixture; None: as many as there are without repeating any."""

    validation: Count | None = None
    """Rows that select checkpoints."""
    test: Count | None = None
    """Rows for gates and evaluation."""


class Mixture(Frozen):
    """Rows of several datasets in given shares; a stage names it like a dataset.

    The parts are prepared and split by their entries under ``data``, so a prompt that one part holds out is trained on from
    none. Rows for training and the held-out rows are mixed in the same shares.
    """

    parts: Annotated[dict[Name, Positive], Field(min_length=2, max_length=MAX_NAMED)]
    """Dataset → weight: its share of the mixture's rows, if the weights are divided by their sum."""
    rows: Count | None = None
    """Rows for training. None: as many as the shares allow without repeating a row. If a part has fewer rows than its
    share, its rows repeat: each is there as often as any other, or once more."""
    split: HeldOutRows = HeldOutRows()
    """Held-out rows, which never repeat."""


class Benchmark(Frozen):
    """Tasks of lm-eval (the package ``lm_eval``) with their data, in one folder."""

    source: str
    """A folder (from the recipe's folder on) with the tasks' definitions (``.yaml``), their data and their Python functions.
    All of it is copied into the store. Data are files of the folder: ``dataset_path: json`` with ``dataset_kwargs.data_files``
    from the folder on."""

    @property
    def origin(self) -> LocalPath:
        """Return what ``source`` names."""
        return LocalPath(Path(self.source))
