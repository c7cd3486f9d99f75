"""Compute the stage key: sha256 of everything that a stage's result depends on.

Equal keys mean equal work, so a result that is already in the store is reused. In the key: the kind of work and its
revision, its configuration with every default filled in, the fields of ``generation`` that it reads, its reward, the
content digests of its inputs, and the seed. Not in the key: names (of stages, datasets, rewards and presets), paths,
gates, resources, and fields that change memory or safety but never the numbers.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from vantage.schemas.canonical_json import canonical_json
from vantage.schemas.frozen import Frozen
from vantage.schemas.kinds import KINDS
from vantage.schemas.recipe.extending import PREVIOUS_ROLES
from vantage.schemas.recipe.inputs import MODEL, Generation
from vantage.schemas.recipe.rewards import Reward
from vantage.schemas.recipe.sources import (
    Builtin,
    DataSource,
    Gguf,
    Hub,
    HubDataset,
    HubFiles,
    LocalPath,
    ModelSource,
    Package,
    Registered,
    StageOfRun,
)
from vantage.schemas.recipe.stage import Stage, Training
from vantage.schemas.recipe.terms import row_of
from vantage.schemas.recipe.work import (
    CheckRows,
    ImportBenchmark,
    ImportVerifier,
    MixData,
    ModelImport,
    PrepareData,
    Work,
)
from vantage.schemas.source_files import data_format
from vantage.schemas.steps import (
    BUILTIN_VERIFIERS,
    JUDGES,
    checked_role,
    held_out_role,
    part_role,
    role_of_test_set,
)

NOT_IN_KEY = frozenset(
    {
        "kind",
        "gate",
        "resources",
        "seed",
        "checkpoint_every",
        "keep_state",
        "microbatch_size",
        "microbatch_tokens",
        "gradient_checkpointing",
        "compile",
        "packing",
        "rollout.max_rows",
        "rollout.url",
        "rollout.servers",
        "rollout.tensor_parallel",
        "rollout.api_key_variable",
        "rollout.weights_folder",
        "rollout.request_seconds",
        "rollout.checksums",
        "member",
        "round",
        "uses",
    }
)
"""Fields that never change a stage's numbers, or (kind, seed) are elsewhere in the key; ``rollout.…`` are fields of
``rollout``."""

_ABSENT = object()
_DIGEST_LENGTH_SHOWN = 12


def key_parts(
    work: Work,
    *,
    generation: Generation,
    rewards: Mapping[str, Reward],
    seed: int | None,
    inputs: Mapping[str, str],
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the parts of the key of ``work``, as JSON.

    Args:
        work: the work of the stage process.
        generation: the recipe's ``generation``. All of it is in the key of a stage; implicit steps, which never sample,
            use only its
            two limits.
        rewards: name in the recipe → reward, for the rewards that ``work`` names.
        seed: the stage's resolved seed; None for work without random numbers.
        inputs: role → content digest; roles as in ``StageJob.inputs``, and ``source`` (sha256 of the content)
            for the implicit steps.
        extra: values that the work reads besides its configuration, for example ``{"chat": True}``.

    Raises:
        ValueError: a digest or a reward is missing, or one is given that the work does not name.
    """
    kind, row = work.kind, KINDS[work.kind]
    configuration = dumped(work)
    digests = dict(inputs)
    stand_in = row.reference_from if getattr(work, "reads_reference", True) else None
    if stand_in is not None and configuration["reference"] is None and stand_in in digests:
        digests.setdefault("reference", digests[stand_in])

    named = _named_inputs(work, configuration, digests)
    reward_names = _reward_names(configuration)
    read_rewards = {
        place: _reward_by_content(name, rewards, digests, kind) for place, name in reward_names.items()
    }
    if configuration.get("algorithm"):
        role = "positive_verifier"
        _verifier_by_content(configuration["algorithm"], role, digests, role, kind)
    _judges_by_content(configuration, digests, kind)
    if (configuration.get("watch") or {}).get("prompts"):
        # the key has the dataset's content under its role instead
        configuration["watch"]["prompts"].pop("data")
    if row.imports is not None:
        named |= _source_by_content(work, configuration[row.imports], digests)
    unread = [*sorted(digests), *sorted(set(rewards) - set(reward_names.values()))]
    if unread:
        raise ValueError(
            f"a {kind} stage does not read {', '.join(map(repr, unread))}; leave it out of its key"
        )

    for field in (*NOT_IN_KEY, *row.roles, "reward"):
        configuration.pop(field, None)
    if configuration.get("lora") is False:  # left out as in recipes from before adapters existed
        configuration.pop("lora")
    if "algorithm" in configuration:
        configuration["algorithm"].pop("preset")  # a preset is only a name for its switches
    limits = {"max_prompt_tokens", "max_response_tokens"} if row.is_implicit else None
    return {
        "kind": kind,
        "revision": row.revision,
        "configuration": configuration,
        "generation": generation.model_dump(mode="json", include=limits),
        "rewards": read_rewards,
        "inputs": named,
        "extra": dict(extra),
        "seed": seed,
    }


def _named_inputs(work: Work, configuration: dict[str, Any], digests: dict[str, str]) -> dict[str, str]:
    """Take the digests of the inputs that ``work`` names by role, and remove the fields that name a list of them."""
    kind, row = work.kind, KINDS[work.kind]
    named = {
        role: _take(digests, role, kind) for role in row.roles if role in digests or configuration.get(role)
    }
    if isinstance(work, ImportVerifier):  # its inputs are the datasets of its dry run
        named |= {role: _take(digests, role, kind) for role in sorted(digests) if role.startswith("prompts.")}
    if isinstance(work, MixData):
        named |= {
            role: _take(digests, role, kind)
            for role in map(part_role, range(len(configuration.pop("parts"))))
        }
    if isinstance(work, CheckRows):
        named |= {
            role: _take(digests, role, kind)
            for role in (MODEL, *map(checked_role, range(len(configuration.pop("datasets")))))
        }
    if isinstance(work, PrepareData):
        test_sets = configuration.pop("test_sets", ())
        held_out_of = (configuration["data"].get("near_duplicates") or {}).pop("held_out_of", ())
        roles = [role_of_test_set(i) for i in range(len(test_sets))]
        roles += [held_out_role(i) for i, name in enumerate(held_out_of) if name not in test_sets]
        named |= {role: _take(digests, role, kind) for role in roles}
    if isinstance(work, Training):
        named |= {role: _take(digests, role, kind) for role in PREVIOUS_ROLES if role in digests}
    return named


def dumped(work: Work) -> dict[str, Any]:
    """Return the work as JSON, with the arithmetic that it does, and with its fields of ``NOT_IN_KEY`` at their
    defaults.

    A teacher's server has only the fields that decide its answers.
    """
    if isinstance(work, Stage):
        work = work.model_copy(update={"precision": work.arithmetic})
    for path in NOT_IN_KEY:
        outer, _, inner = path.partition(".")
        part = getattr(work, outer, None)
        if inner and isinstance(part, Frozen) and inner in type(part).model_fields:
            default = type(part).model_fields[inner].default
            work = work.model_copy(update={outer: part.model_copy(update={inner: default})})
    found = work.model_dump(mode="json")
    if (server := getattr(work, "teacher_server", None)) is not None:
        found["teacher_server"] = server.in_key()
    return found


def stage_key(parts: Mapping[str, Any]) -> str:
    """Return the sha256 of the canonical JSON of ``parts``, in lower-case hexadecimal."""
    return hashlib.sha256(canonical_json(parts).encode()).hexdigest()


def differences(old_parts: Mapping[str, Any], new_parts: Mapping[str, Any]) -> list[str]:
    """Return the changed values, one line each: ``configuration.algorithm.clip_range_high: 0.28 → 0.2``.

    Empty exactly if both have the same key. Digests are shortened to 12 characters.
    """
    return list(_differences("", old_parts, new_parts))


def _take(digests: dict[str, str], role: str, kind: str) -> str:
    if role not in digests:
        given = ", ".join(sorted(digests)) or "nothing"
        raise ValueError(
            f"inputs of a {kind} stage: the content digest of {role!r} is missing; given: {given}"
        )
    return digests.pop(role)


def _reward_names(configuration: Mapping[str, Any]) -> dict[str, str]:
    """Return field → name of each reward that a stage reads; the key contains the field, not the name."""
    judging = {field: judge.get("reward") for field, judge in _judges(configuration)}
    places = {"reward": configuration.get("reward"), **judging}
    return {place: name for place, name in places.items() if name is not None}


def _reward_by_content(
    name: str, rewards: Mapping[str, Reward], digests: dict[str, str], kind: str
) -> dict[str, Any]:
    """Return the reward, with the names of models and of the recipe's verifiers replaced by their content digests, which are
    removed from ``digests``."""
    if name not in rewards:
        raise ValueError(
            f"rewards of a {kind} stage: {name!r} is missing; given: {', '.join(rewards) or 'nothing'}"
        )
    content = rewards[name].model_dump(mode="json")
    for index, term in enumerate(rewards[name].terms):
        role, field = f"reward.{name}.{index}", row_of(term).field
        if term.stage is not None:
            content["terms"][index][field] = _take(digests, role, kind)
        if term.verifier_name is not None:
            _verifier_by_content(content["terms"][index], field, digests, role, kind)
        if term.server is not None:
            content["terms"][index][field] = term.server.in_key()
        if term.judging_model is not None:
            content["terms"][index][field] = term.judging_model.in_key(_take(digests, role, kind))
    return content


def _source_by_content(work: Work, imported: dict[str, Any], digests: dict[str, str]) -> dict[str, str]:
    """Return ``source`` → its digest, unless its text determines the content; in ``imported`` only the options of reading
    it are left."""
    origin: ModelSource | DataSource = getattr(work, KINDS[work.kind].imports or "").origin
    imported["source"] = _form(origin, is_folder=isinstance(work, ModelImport | ImportBenchmark))
    if imported.pop("base", None) is not None:  # its content is in the digest of the source
        imported["adapter"] = True
    (imported.get("load") or {}).pop("streaming", None)  # the rows are the same
    if "source" not in digests and isinstance(origin, Builtin | Hub | HubDataset | HubFiles):
        return {}
    return {"source": _take(digests, "source", work.kind)}


def _judges_by_content(configuration: dict[str, Any], digests: dict[str, str], kind: str) -> None:
    """Replace the names in each judge by content digests; its reward is in the key by content already."""
    for role, judge in _judges(configuration):
        _verifier_by_content(judge, "verifier", digests, role, kind)
        if judge.get("model"):
            judge["model"] = _take(digests, role, kind)
        judge.pop("reward")


def _judges(configuration: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the field and the configuration of each judge."""
    for role, path in JUDGES.items():
        judge: Any = configuration
        for field in path:
            judge = judge.get(field) if judge else None
        if judge:
            yield role, judge


def _verifier_by_content(
    named: dict[str, Any], field: str, digests: dict[str, str], role: str, kind: str
) -> None:
    """Replace the name of one of the recipe's verifiers by its content digest."""
    if named[field] is not None and named[field] not in BUILTIN_VERIFIERS:
        named[field] = _take(digests, role, kind)


def _form(origin: ModelSource | DataSource, *, is_folder: bool) -> str:
    """Return the part of a source that decides how its content is read: its text without the path."""
    match origin:
        case Builtin() | Hub() | HubDataset() | HubFiles():
            return str(origin)
        case Gguf():
            return "gguf"
        case Package():
            return "package"
        case Registered():
            return "registered"
        case StageOfRun():
            return "stage of a run"
        case LocalPath(path=path):
            return "folder" if is_folder else data_format(path) or path.suffix.lower()


def _differences(path: str, old: Any, new: Any) -> Iterator[str]:
    if _is_nested(old, Mapping, new):
        old, new = ({} if side is _ABSENT else side for side in (old, new))
        for key in sorted(old.keys() | new.keys()):
            yield from _differences(
                f"{path}.{key}" if path else key, old.get(key, _ABSENT), new.get(key, _ABSENT)
            )
    elif _is_nested(old, list, new) or _is_nested(old, tuple, new):
        old, new = (() if side is _ABSENT else side for side in (old, new))
        for index, (before, after) in enumerate(zip_longest(old, new, fillvalue=_ABSENT)):
            yield from _differences(f"{path}.{index}", before, after)
    elif _shown(old, whole=True) != _shown(new, whole=True):
        yield f"{path}: {_shown(old)} → {_shown(new)}"


def _is_nested(old: Any, container: type[Mapping[str, Any]] | type[Sequence[Any]], new: Any) -> bool:
    """Return whether both are such containers, or one is a nonempty container and the other is absent."""
    if isinstance(old, container) and isinstance(new, container):
        return True
    if new is _ABSENT:
        return isinstance(old, container) and bool(old)
    return old is _ABSENT and isinstance(new, container) and bool(new)


def _shown(value: Any, *, whole: bool = False) -> str:
    if value is _ABSENT:
        return "absent"
    if whole:
        return canonical_json(value)
    if isinstance(value, str):
        is_digest = len(value) == 64 and set(value) <= set("0123456789abcdef")
        return value[:_DIGEST_LENGTH_SHOWN] if is_digest else value
    return canonical_json(value)
