"""Sample with servers of vLLM: a `RolloutEngine` that gives them its weights, has them prove these, and divides the
prompts."""

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from safetensors.torch import load_file
from torch import Tensor

from vantage.models.adapters import base_weights
from vantage.models.partial_responses import Response
from vantage.models.pass_counts import count_prompts
from vantage.models.policy import PolicyModel
from vantage.models.sampling import Samples, samples_of
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.rollout import Sampling
from vantage.tasks.data.examples import Codec
from vantage.tasks.rewards.api_keys import api_key
from vantage.tasks.rollout.checksums import Checksums
from vantage.tasks.rollout.engine import Listener, Origin, SamplesWhenAsked, of_all_ranks
from vantage.tasks.rollout.held_weights import DIGITS, digest_of
from vantage.tasks.rollout.own_servers import OwnServers, Settings, own_servers
from vantage.tasks.rollout.remote_round import Rollout, Round
from vantage.tasks.rollout.sampled_policy import SampledPolicy
from vantage.tasks.rollout.sent_adapters import adapter_files
from vantage.tasks.rollout.vllm_server import (
    ADAPTER,
    HOW_TO_SERVE_ADAPTERS,
    Described,
    EngineUnavailable,
    ServerFailed,
    ServerRefused,
    ServerTimedOut,
    VllmServer,
)
from vantage.tasks.rollout.weight_files import update_folder, weight_files
from vantage.tasks.training import engine_record, preemption, progress, ranks
from vantage.tasks.training.optimization import Precision

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Faults = Sequence[tuple[VllmServer, ServerFailed]]
"""Servers that failed, and how."""

MAX_FAILED_ROUNDS = 5
"""Most rounds of requests for missing responses, within one call of ``generate``."""
PATIENCE_SECONDS = 120.0
"""Seconds for which a stage waits until one of its servers answers."""
PAUSE_SECONDS = 2.0
"""Seconds between two checks of servers, if none answers."""
AT_ONCE = 256
"""Responses that a server draws at once if ``rollout.max_rows`` is not set."""

DRAWN = "what was sampled meanwhile is not used"

TEXT = "What is 17 + 25? Answer: 42."
"""Text that must have the same ids by the server's tokenizer and by the stage's."""

_OF_NO_EFFECT = re.compile(
    r"_.*|transformers_version|architectures|dtype|torch_dtype|use_cache|(bos|eos|pad)_token_id|.*(dropout|pdrop|layerdrop).*"
)
"""Names of fields of a configuration that do not change a server's results. The import of a model rewrites most of
them; each request names the tokens that end a response, and there is no dropout without training."""


@dataclass(frozen=True)
class _Version:
    """The weights that the servers must hold."""

    name: str
    own: Tensor
    """The policy's log-probabilities of the fixed rows."""
    adapter: str | None
    """Name of the policy's adapter on the servers; None: it has none."""


@dataclass(frozen=True)
class _Asked:
    """Answers of the servers to the first rank; the other ranks ask nothing."""

    holding: Sequence[VllmServer] = ()
    """Servers that have the weights."""
    others: Sequence[VllmServer] = ()
    """Servers that have other weights, and can be given these."""
    based: Set[VllmServer] = frozenset()
    """Servers among ``others`` that have earlier weights from this engine: if the policy has adapters, they get only
    these."""
    faults: Faults = ()


@dataclass(frozen=True)
class _Kept:
    """Files of weights that servers were given, for a server that restarts while they sample ahead."""

    version: str
    folder: Path
    files: ExitStack
    """Removes the files when it is closed."""


class RemoteEngine(SamplesWhenAsked):
    """Samples with servers that the recipe names or that the stage starts; the first rank gives them weights, and each
    rank asks for its own responses."""

    def __init__(
        self,
        policy: PolicyModel,
        codec: Codec,
        *,
        rollout: Sampling,
        limits: PassLimits,
        precision: Precision,
    ) -> None:
        """Prepare to sample from the policy; no server is called yet.

        Raises:
            ValueError: vLLM cannot apply the policy's adapters, there is no folder for weights or no API key, or see
                ``OwnServers``.
        """
        self._sampled = SampledPolicy(policy, codec, limits=limits, precision=precision)
        self._place = "rollout.url" if rollout.servers is None else "rollout.servers"
        self.codec = codec
        self._token = ranks.agreed(int.from_bytes(os.urandom(7), "big"))
        self._folder = _weights_folder(rollout, codec)
        self._own: OwnServers | None = None
        if rollout.servers is not None:
            settings = Settings(
                precision,
                self._sampled.most_tokens,
                rollout.max_rows,
                rollout.request_seconds,
                self._sampled.adapters,
                rollout.tensor_parallel,
            )
            key = hashlib.sha256(f"{self._token:014x}".encode()).hexdigest()
            folder = (codec.scratch or self._folder) / "servers"
            self._own = own_servers(policy, folder, count=rollout.servers, key=key, settings=settings)
        self._servers = [] if rollout.url is None else _named_servers(rollout)
        self._hung: set[VllmServer] = set()
        """Own servers that took too long for this rank since all ranks last asked for servers."""
        self._at_once = max(1, (rollout.max_rows or AT_ONCE) // ranks.world_size())
        """Responses that this rank has a server draw at once; those of all ranks together need no queue on the
        server."""
        self._weights: dict[str, Tensor] = dict(policy.causal_lm.named_parameters())
        self._num_updates = self._num_given = 0
        self._held: _Version | None = None
        self._may_keep = getattr(rollout, "ahead", 0) == 1 and self._sampled.adapters is None
        self._keeps = False
        """Whether weights that are given are kept until ``release``."""
        self._kept: _Kept | None = None
        self._checksums = Checksums(rollout.checksums, precision)
        self._gap = 0.0

    def __enter__(self) -> Self:
        self._keeps = self._may_keep and self._own is not None and ranks.world_size() == 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """See ``RolloutEngine``."""
        self._keeps = False
        self.release()

    def take_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See ``RolloutEngine``; servers that answer have proved that they have the weights when this returns; others
        get them later.

        Raises:
            KeyError: the model has no weight of this name.
            WeightsDiffer: a server does not hold the policy's weights afterwards.
            ServerRefused: a server serves another model, or cannot be used.
        """
        self._weights = self._sampled.named(weights)
        self._num_updates += 1
        self._ready(self._version())

    def generate(
        self,
        prompts: Sequence[list[int]],
        *,
        count: int,
        seed: int,
        greedy: bool = False,
        listener: Listener | None = None,
    ) -> Samples:
        """See ``RolloutEngine``; a response's seed is derived from ``seed`` and its place.

        Raises:
            EngineUnavailable: no server answers, or responses do not come.
            WeightsDiffer: a server does not hold the policy's weights.
            ServerRefused: a server serves another model, or cannot be used.
        """
        repeated = self._sampled.repeated(prompts, count)
        own = ranks.own(len(repeated))
        version = self._version()
        rows = range(len(repeated))[own]
        rollout = Rollout(repeated, rows, seed, greedy, version.name, version.adapter, self._at_once)

        def show(ended: int) -> None:
            preemption.heed()
            progress.phase("waiting for responses", ended, len(rollout.rows))

        def draw(found: dict[int, Response], failed: set[VllmServer]) -> Round:
            ready = self._some_ready(version)
            engine_record.note_sampled(**vars(self._origin(version)))
            show(len(found))
            new = Round(self._sampled, rollout, found, listener, show=show)
            self._draw(new, [server for server in ready if server not in failed] or ready, version)
            return new

        samples = _drawn(rollout, draw, is_missing=ranks.any_rank)
        # for greedy samples vLLM reports log-probabilities at temperature 1
        if greedy and self.codec.generation.temperature != 1.0:
            samples = self._sampled.at_temperature(repeated[own], samples)
        limit = self.codec.generation.max_response_tokens
        return of_all_ranks(samples, own, count=len(repeated), max_length=limit)

    def hold(self) -> Origin:
        """See ``SamplesBeside``; the servers keep these weights until the next ``take_weights``, ``generate`` or ``hold``."""
        self._held = self._version()
        self._some_ready(self._held)
        return self._origin(self._held)

    def sample_own(
        self,
        repeated: list[list[int]],
        mine: slice,
        *,
        seed: int,
        on_token: Callable[[int, int], None],
        listener: Listener | None = None,
    ) -> Samples:
        """See ``SamplesBeside``. A server that loses the weights meanwhile is left out, since the policy has other
        weights by now. If no server has them any longer, and the stage has one process, its servers are restarted and
        given the kept files.

        Raises:
            EngineUnavailable: no server has the weights any longer, or responses do not come.
            WeightsDiffer: a restarted server does not hold the weights.
        """
        assert self._held is not None
        version, rows = self._held, range(len(repeated))[mine]
        rollout = Rollout(repeated, rows, seed, False, version.name, version.adapter, self._at_once)

        def show(ended: int) -> None:
            on_token(ended, 0)

        def draw(found: dict[int, Response], failed: set[VllmServer]) -> Round:
            held, faults = _answers(self._servers, VllmServer.version)
            holding = [server for server, name in held.items() if name == version.name]
            self._end_hung(faults)
            if not holding:
                holding = self._started_again(version, partial(show, len(found)))
            if not holding:
                raise EngineUnavailable(
                    f"no server of {self._place} has the weights any longer from which it sampled: {_named(faults) or 'they have others'}"
                )
            new = Round(self._sampled, rollout, found, listener, show=show)
            self._draw(new, [server for server in holding if server not in failed] or holding, version)
            return new

        # in this thread ranks must not exchange messages: the training does
        return _drawn(rollout, draw, is_missing=bool)

    def release(self) -> None:
        """See ``SamplesBeside``."""
        if self._kept is not None:
            self._kept.files.close()
        self._kept = None

    def weights(self) -> dict[str, Tensor]:
        """See ``SamplesBeside``; returns the weights in the files that are kept for the stage's servers, in the
        servers' type."""
        if self._held is None or self._kept is None or self._kept.version != self._held.name:
            return {}
        files = sorted(self._kept.folder.glob("*.safetensors"))
        return {name: each for file in files for name, each in load_file(file).items()}

    def _draw(self, new: Round, servers: Sequence[VllmServer], version: _Version) -> None:
        """Draw missing responses; afterwards the servers prove again that they hold these weights. Other weights under
        the same name may have come meanwhile, which no response would show.

        Raises:
            WeightsDiffer: a server holds other weights under this name.
        """
        new.draw(servers)
        failed = {server for server, _ in new.faults}
        ask = partial(VllmServer.logprobs, rows=self._sampled.fixed_rows, adapter=version.adapter)
        read, faults = _answers([each for each in servers if each not in failed], ask)
        named, more_faults = _answers(list(read), VllmServer.version)  # after the rows, so that it read them
        for server, name in named.items():
            if name == version.name:
                self._sampled.prove(read[server], version.own, place=server.url, outcome=DRAWN)
        self._end_hung([*new.faults, *faults, *more_faults])

    def _started_again(self, held: _Version, look: Callable[[], None]) -> list[VllmServer]:
        """Restart the stage's servers that have ended, and give them the kept weights; returns the servers that prove
        these."""
        kept = self._kept
        if self._own is None or kept is None or kept.version != held.name:
            return []
        self._servers = self._own.running(look)
        given, _ = _answers(
            self._servers, lambda server: server.take_weights(kept.folder, version=kept.version)
        )
        proved, _ = self._compared(list(given), held)
        return list(proved)

    def _compared(
        self, servers: Sequence[VllmServer], version: _Version
    ) -> tuple[dict[VllmServer, float], Faults]:
        """Have servers prove that they hold these weights; returns the mean |Δ| of each, and the faults of servers that
        failed.

        Raises:
            WeightsDiffer: a server holds other weights.
        """
        ask = partial(VllmServer.logprobs, rows=self._sampled.fixed_rows, adapter=version.adapter)
        read, faults = _answers(servers, ask)
        gaps = {
            server: self._sampled.prove(logprobs, version.own, place=server.url).gap
            for server, logprobs in read.items()
        }
        compared, more_faults = _answers(
            list(read), lambda server: self._checksums.compare(_place(server), server.checksums)
        )
        return {server: gaps[server] for server in compared}, [*faults, *more_faults]

    def _origin(self, version: _Version) -> Origin:
        """Return the record of the policy's present weights."""
        return Origin(digest_of(version.own), self._gap, engine_record.ended_iterations())

    def _version(self) -> _Version:
        """Return the version of the policy's present weights, the same on all ranks."""
        own = self._sampled.logprobs()
        digest = ranks.agreed(int(digest_of(own), 16))
        name = f"{self._num_updates}-{digest:0{DIGITS}x}{self._mark}"
        return _Version(name, own, None if self._sampled.adapters is None else ADAPTER + name)

    @property
    def _mark(self) -> str:
        """Return the end of the versions that only this engine gives."""
        return f"-{self._token % 2**32:08x}"

    def _some_ready(self, version: _Version) -> list[VllmServer]:
        """Wait until a server is ready, and return all that are.

        Raises:
            EngineUnavailable: no server is ready within ``PATIENCE_SECONDS``.
        """
        began = time.monotonic()
        while True:
            ready, faults = self._ready(version)
            if not ranks.any_rank(not ready):
                return ready
            if self._own is not None and ranks.any_rank(bool(_slow(faults))):
                began = time.monotonic()  # they were restarted, not more often than OwnServers allows
            elif ranks.any_rank(time.monotonic() - began >= PATIENCE_SECONDS):
                raise EngineUnavailable(
                    f"no server of {self._place} could sample for {PATIENCE_SECONDS:g} s: {_named(faults)}"
                )
            progress.phase("waiting for servers")
            time.sleep(PAUSE_SECONDS)

    def _ready(self, version: _Version) -> tuple[list[VllmServer], Faults]:
        """Return the servers that hold the weights, and why others do not; the first rank gives and proves them."""
        if self._own is not None:
            self._end_hung_of_all_ranks()
            self._servers = self._own.running()
        is_first = ranks.rank() == 0
        asked = self._asked(version) if is_first else _Asked()
        given, faults = self._give(asked, version)
        ready, faults = self._proved(asked, given, faults, version) if is_first else ([], [])
        ranks.wait()
        if not is_first:
            held, faults = _answers(self._servers, VllmServer.version)
            ready = [server for server, found in held.items() if found == version.name]
        self._end_hung(faults)
        return ready, faults

    def _end_hung(self, faults: Faults) -> None:
        """End the stage's own servers that took too long, so that they are restarted; only the first rank can do
        this."""
        if self._own is not None:
            for server in _slow(faults):
                self._hung.add(server)
                self._own.kill(server)

    def _end_hung_of_all_ranks(self) -> None:
        """End servers that took too long for another rank than the first."""
        assert self._own is not None
        if ranks.world_size() > 1 and self._servers:
            is_hung = ranks.any_of(*[server in self._hung for server in self._servers])
            for server, flag in zip(self._servers, is_hung, strict=True):
                if flag:
                    self._own.kill(server)
        self._hung.clear()

    def _asked(self, version: _Version) -> _Asked:
        """Return what the servers hold, and which of them can be given the weights."""
        held, faults = _answers(self._servers, VllmServer.version)
        others = [server for server, found in held.items() if found != version.name]
        ours = self.codec.tokenizer.encode(TEXT, add_special_tokens=False) if others else []
        checked, new_faults = _answers(others, partial(self._check, ours=ours))
        based = {server for server in checked if held[server].endswith(self._mark)}
        holding = [server for server in held if server not in others]
        return _Asked(holding, list(checked), based, [*faults, *new_faults])

    def _give(self, asked: _Asked, version: _Version) -> tuple[dict[VllmServer, None], Faults]:
        """Give servers the newest weights; all ranks call this, since each may hold a part of them."""
        some, without_base = ranks.any_of(bool(asked.others), not asked.based >= set(asked.others))
        if not some:
            return {}, []
        progress.phase("giving weights to servers")
        self._num_given += 1
        self.release()
        with ExitStack() as files:
            name = f"{version.name}-{self._num_given}"
            folder = files.enter_context(update_folder(self._folder, name))
            adapter: tuple[str, Path] | None = None
            if version.adapter is not None:
                written = adapter_files(self._sampled.model.causal_lm, self._weights, folder / "adapter")
                adapter = version.adapter, files.enter_context(written)
            whole: Path | None = None
            if adapter is None or without_base:
                weights = base_weights(self._weights)
                hashed = self._checksums.begin(weights.values(), map(_place, asked.others))
                precision = self._sampled.precision
                written = weight_files(weights, folder / "weights", precision=precision, hashed=hashed)
                whole = files.enter_context(written)

            def give(server: VllmServer) -> None:
                has_base = adapter is not None and server in asked.based
                server.take_weights(None if has_base else whole, version=version.name, adapter=adapter)

            answers = _answers(asked.others, give)
            if self._keeps and whole is not None:
                self._kept = _Kept(version.name, whole, files.pop_all())
            return answers

    def _proved(
        self, asked: _Asked, given: Mapping[VllmServer, None], faults: Faults, version: _Version
    ) -> tuple[list[VllmServer], Faults]:
        """Return the servers that prove that they hold the weights, and the faults of the others.

        Raises:
            WeightsDiffer: a server holds other weights.
        """
        gaps, new_faults = self._compared([*asked.holding, *given], version)
        if gaps:
            self._gap = max(gaps.values())
            log.info(
                "%d of %d servers hold the policy's weights %s: mean |Δ| at most %.2g nats per token",
                *(len(gaps), len(self._servers), version.name, self._gap),
            )
        all_faults = [*asked.faults, *faults, *new_faults]
        for _, fault in all_faults:
            engine_record.note_failure()
            log.warning("%s", fault)
        return list(gaps), all_faults

    def _check(self, server: VllmServer, *, ours: list[int]) -> None:
        """Compare the server's model and tokenizer with the policy's, before its weights are replaced.

        Args:
            ours: ids of ``TEXT`` by the policy's tokenizer.

        Raises:
            ServerRefused: the server serves another model, or has other settings.
        """
        try:
            described = server.describe()
        except ServerRefused as error:
            raise ServerRefused(f"{self._place}: {error}") from error
        who = f"{self._place}: {server.url} serves {described.name}"
        differences = _differences(self._config(), described.config)
        if differences:
            raise ServerRefused(
                f"{who}, which is another model than the policy: {', '.join(differences)}; name a server of the policy's model"
            )
        for field, found, wanted, option in (
            ("dtype", described.dtype, self._sampled.precision, "--dtype"),
            ("logprobs_mode", described.logprobs_mode, "processed_logprobs", "--logprobs-mode"),
        ):
            if found != wanted:
                raise ServerRefused(
                    f"{who} with {field}={found}, and this stage needs {wanted}; start it with {option} {wanted}"
                )
        if described.max_tokens < self._sampled.most_tokens:
            raise ServerRefused(
                f"{who} with at most {described.max_tokens} tokens of a prompt and its response, and this stage needs "
                f"{self._sampled.most_tokens}; start it with --max-model-len {self._sampled.most_tokens}"
            )
        self._check_adapters(described, who)
        theirs = server.tokenized(TEXT)
        if theirs is not None and theirs != ours:
            raise ServerRefused(
                f"{who} with another tokenizer than the policy's: it reads {TEXT!r} as {theirs}, and the policy's as {ours}"
            )
        log.info("%s; its weights are replaced by the policy's", who)

    def _check_adapters(self, described: Described, who: str) -> None:
        room = self._sampled.adapters
        if room is None:
            return
        start = HOW_TO_SERVE_ADAPTERS.format(rank=room.max_rank, targets=" ".join(room.targets))
        rank, targets = described.max_lora_rank, described.lora_targets
        if rank is None or rank < room.max_rank:
            takes = "no adapters" if rank is None else f"adapters of rank {rank} at most"
            raise ServerRefused(
                f"{who} with {takes}, and the policy's need room for rank {room.max_rank}; start it as {start}"
            )
        if targets is None or not targets.issuperset(room.targets):
            has = "all layers, the output head too" if targets is None else " ".join(sorted(targets))
            raise ServerRefused(
                f"{who} with adapters for {has}, and the policy's are for {' '.join(room.targets)}; start it as {start}"
            )

    def _config(self) -> dict[str, Any]:
        return dict(json.loads(self._sampled.model.causal_lm.config.to_json_string(use_diff=False)))


def _drawn(
    rollout: Rollout,
    draw: Callable[[dict[int, Response], set[VllmServer]], Round],
    *,
    is_missing: Callable[[bool], bool],
) -> Samples:
    """Draw and return this rank's responses in rounds; each round uses servers that did not fail in the one before.

    Args:
        is_missing: returns whether another round is needed, given whether this rank misses responses.

    Raises:
        EngineUnavailable: responses do not come.
    """
    found: dict[int, Response] = {}
    faults: Faults = []
    count_prompts(*[sum(len(each) for each in {tuple(rollout.prompts[row]) for row in rollout.rows})] * 2)
    for _ in range(1 + MAX_FAILED_ROUNDS):
        faults = draw(found, {server for server, _ in faults}).faults
        if not is_missing(bool(rollout.missing(found))):
            return samples_of([found[row] for row in rollout.rows])
        time.sleep(PAUSE_SECONDS)
    raise EngineUnavailable(
        f"{len(found)} of {len(rollout.rows)} responses are there after {1 + MAX_FAILED_ROUNDS} rounds; "
        f"{faults[-1][1] if faults else 'another rank misses some'}"
    )


def _named_servers(rollout: Sampling) -> list[VllmServer]:
    """Return the servers that somebody else runs.

    Raises:
        ValueError: the variable of the servers' key is not set, or holds no key.
    """
    key = api_key(rollout.api_key_variable, "rollout.api_key_variable")
    return [VllmServer(url, key=key, seconds=rollout.request_seconds) for url in rollout.url or ()]


def _answers(
    servers: Sequence[VllmServer], ask: Callable[[VllmServer], Answer]
) -> tuple[dict[VllmServer, Answer], Faults]:
    """Ask several servers at once, and return the answers by server, and the faults of those that failed."""

    def answer(server: VllmServer) -> tuple[Answer | None, ServerFailed | None]:
        try:
            return ask(server), None
        except ServerFailed as error:
            return None, error

    if not servers:
        return {}, []
    with ThreadPoolExecutor(len(servers)) as threads:
        found = dict(zip(servers, threads.map(answer, servers), strict=True))
    answers = {server: cast(Answer, each) for server, (each, fault) in found.items() if fault is None}
    return answers, [(server, fault) for server, (_, fault) in found.items() if fault is not None]


def _place(server: VllmServer) -> str:
    return f" at {server.url}"


def _slow(faults: Faults) -> set[VllmServer]:
    """Return the servers that took too long."""
    return {server for server, error in faults if isinstance(error, ServerTimedOut)}


def _named(faults: Faults) -> str:
    return "; ".join(str(error) for _, error in faults)


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return the differing fields among those that both configurations have, since versions of transformers add
    fields."""
    found: list[str] = []
    for name in sorted(ours.keys() & theirs.keys()):
        own, other = ours[name], theirs[name]
        if _OF_NO_EFFECT.fullmatch(name) or own == other:
            continue
        if name.endswith("_config") and isinstance(own, dict) and isinstance(other, dict):
            found += [f"{name}.{each}" for each in _differences(own, other)]
        else:
            found.append(f"{name} is {other} there and {own} here")
    return found


def _weights_folder(rollout: Sampling, codec: Codec) -> Path:
    """Return the folder for weights. In a shared folder, each stage gets its own, the same in all of its attempts.

    Raises:
        ValueError: there is no such folder.
    """
    if rollout.weights_folder is None:
        if codec.scratch is None:
            raise ValueError("servers need a folder for weights; set rollout.weights_folder")
        return codec.scratch / "weights"
    shared = Path(rollout.weights_folder)
    if not shared.is_dir():
        raise ValueError(
            f"rollout.weights_folder={shared} is no folder of this machine; make it, or leave it out"
        )
    return shared / f"vantage-{hashlib.sha256(str(codec.scratch).encode()).hexdigest()[:16]}"
