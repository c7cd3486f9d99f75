"""Call one server of vLLM by HTTP: its model, the version of its weights, its log-probabilities, and its responses.

All endpoints are vLLM's own (tried with vllm 0.32), those for weights under ``VLLM_SERVER_DEV_MODE=1``. The methods
that ``/collective_rpc`` calls are in ``vantage.tasks.rollout.vllm_worker``.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor

from vantage.tasks.rollout.checksums import by_parameter
from vantage.tasks.rollout.vllm_worker import REVISION
from vantage.tasks.rollout.weight_files import contents_of

CONNECT_SECONDS = 10.0
"""Most seconds until a connection is made."""
ANSWER_SECONDS = 60.0
"""Most seconds for an answer for which the server computes nothing."""

GENERATE = "/inference/v1/generate"
INFO = "/weight_info"
CHECKER = "/weight_checker"
DESCRIBE = "vantage_describe"
"""Method of the worker that a stage calls first."""
SOME_CHECKSUMS = "vantage_checksums"
"""Method of the worker that returns checksums of some parameters."""
WORKER = "vantage.tasks.rollout.vllm_worker.VantageWorker"
ADAPTER = "vantage-"
"""Beginning of the names that a stage gives to adapters; the version of the weights follows."""
UPDATING = "updating"
"""Version of a server while its weights change; it stays if the change is interrupted."""

HOW_TO_SERVE = (
    "start it as docs/rollouts.md describes: VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out "
    f"--logprobs-mode processed_logprobs --worker-extension-cls {WORKER}"
)
HOW_TO_SERVE_ADAPTERS = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve … --enable-lora --max-lora-rank {rank} --lora-target-modules {targets}"


class ServerFailed(RuntimeError):
    """A server did not answer, or answered with an error of its own; another attempt may succeed."""


class ServerTimedOut(ServerFailed):
    """A server took too long."""


class ServerRefused(ValueError):
    """This stage cannot sample with the server; it would refuse the same request again."""


class EngineUnavailable(RuntimeError):
    """No server of the engine answers; the stage goes on from its last checkpoint when one does."""


@dataclass(frozen=True)
class Described:
    """Model of a server, and its settings."""

    name: str
    """The model's name on the server."""
    config: Mapping[str, Any]
    """Configuration of the model, as transformers writes it."""
    dtype: str
    logprobs_mode: str
    max_tokens: int
    """Most tokens of a prompt and its response."""
    max_lora_rank: int | None
    """Largest rank of an adapter; None: the server takes none."""
    lora_targets: frozenset[str] | None
    """Layers that may have an adapter, by the last parts of their names; None: all, or none."""


@dataclass(frozen=True)
class Drawn:
    """A response as a server returned it."""

    ids: list[int]
    logprobs: list[float]
    versions: frozenset[str] | None
    """Versions of the weights from which its tokens were drawn; None: it was cut before the server reported them."""


class VllmServer:
    """A server at ``url``; all calls are bounded in time."""

    def __init__(self, url: str, *, key: str | None, seconds: float) -> None:
        """Prepare to call the server.

        Args:
            key: API key; None: none is sent.
            seconds: most seconds for one response, and for taking weights.
        """
        self.url = url.rstrip("/")
        self._seconds = seconds
        self._settings: dict[str, Any] = {
            "base_url": self.url,
            # Each request has its own connection: a duplicate answer would be read as the answer to the next request.
            "headers": {"Connection": "close"} | ({} if key is None else {"Authorization": f"Bearer {key}"}),
            "trust_env": False,  # a proxy for the internet does not reach these servers
        }
        self._client = httpx.Client(timeout=self._timeout(ANSWER_SECONDS), **self._settings)

    def asynchronous(self, *, at_once: int) -> httpx.AsyncClient:
        """Return a client for ``draw`` and ``version_now`` with as many connections as responses are drawn at once, and one more."""
        limits = httpx.Limits(max_connections=at_once + 1, max_keepalive_connections=0)
        return httpx.AsyncClient(timeout=self._timeout(self._seconds), limits=limits, **self._settings)

    def describe(self) -> Described:
        """Return the server's model and settings.

        Raises:
            ServerFailed: the server does not answer.
            ServerRefused: the server was started without settings that a stage needs.
        """
        self._call("GET", "/health")
        models = self._call("GET", "/v1/models")
        try:
            found = self._rpc(DESCRIBE)[0]
        except ServerFailed as error:
            # a server that lacks the method names it in its error; another error means that it is busy or dead
            if DESCRIBE not in str(error):
                raise
            raise ServerRefused(f"{error}; {HOW_TO_SERVE}") from error
        with self._reading("/collective_rpc"):
            revision = found.get("revision")
        if revision != REVISION:
            raise ServerRefused(
                f"{self.url} has the file vllm_worker.py of another version of Vantage; install this version there, or copy "
                "tasks/rollout/vllm_worker.py again, and start the server again"
            )
        with self._reading("/collective_rpc"):
            model = models["data"][0]
            return Described(
                name=str(model.get("root") or model["id"]),
                config=found["config"],
                dtype=found["dtype"],
                logprobs_mode=found["logprobs_mode"],
                max_tokens=found["max_model_len"],
                max_lora_rank=found["max_lora_rank"],
                lora_targets=frozenset(found["lora_target_modules"] or ()) or None,
            )

    def tokenized(self, text: str) -> list[int] | None:
        """Return the ids of a text by the server's tokenizer, without special tokens; None: it has loaded none."""
        try:
            found = self._call("POST", "/tokenize", {"prompt": text, "add_special_tokens": False})
        except ServerRefused:
            return None
        with self._reading("/tokenize"):
            return list(found["tokens"])

    def version(self) -> str:
        """Return the version of the weights that the server holds."""
        return self._version_in(self._call("GET", INFO))

    async def version_now(self, client: httpx.AsyncClient) -> str:
        """Return the version of the weights that the server holds, as ``version`` does.

        Args:
            client: client of this server.
        """
        with self._answering(INFO):
            response = await client.get(INFO, timeout=self._timeout(ANSWER_SECONDS))
        return self._version_in(self._content(response, INFO, None))

    def _version_in(self, found: Any) -> str:
        with self._reading(INFO):
            return str(found["weight_version"])

    def take_weights(
        self, folder: Path | None, *, version: str, adapter: tuple[str, Path] | None = None
    ) -> None:
        """Replace the server's weights by the files in ``folder``, and clear caches of the old weights; running
        requests end.

        Args:
            folder: folder of the files; None: the server has these weights, and only the adapter is new.
            adapter: name and folder of the adapter that replaces earlier ones; None: the policy has none.

        Raises:
            ServerFailed: the server does not have the weights; its version is then none that a stage gives.
        """
        self._call("POST", "/pause", params={"mode": "abort"})
        try:
            self._call("POST", "/update_weight_version", {"new_version": UPDATING})
            if folder is not None:
                given = {"folder": str(folder), "contents": json.dumps(contents_of(folder))}
                self._rpc("vantage_take_weights", given, seconds=self._seconds)
            if adapter is not None:
                self._take_adapter(*adapter)
            if not self._call("POST", "/reset_prefix_cache").get("success"):
                raise ServerFailed(f"{self.url} still holds prefixes that the old weights computed")
            self._call("POST", "/update_weight_version", {"new_version": version})
        finally:
            self._call("POST", "/resume")

    def checksums(self, names: Sequence[str] | None = None) -> dict[str, str] | None:
        """Return the sha256 of the parameters with these names, or of all; None: this version computes none."""
        if names is not None:
            of_workers = self._rpc(SOME_CHECKSUMS, {"names": json.dumps(list(names))}, seconds=self._seconds)
            with self._reading("/collective_rpc"):
                return by_parameter(
                    [{str(name): str(each) for name, each in found.items()} for found in of_workers]
                )
        try:
            found = self._call("POST", CHECKER, {"action": "checksum"}, seconds=self._seconds)
        except ServerRefused:
            return None
        with self._reading(CHECKER):
            return by_parameter([{str(name): str(each) for name, each in found["checksums"].items()}])

    def _take_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter, which the server reads now, under a new name; remove earlier adapters."""
        models = self._call("GET", "/v1/models")
        with self._reading("/v1/models"):
            before = [each["id"] for each in models["data"] if each["id"].startswith(ADAPTER)]
        for each in before:
            self._call("POST", "/v1/unload_lora_adapter", {"lora_name": each}, is_text=True)
        loading = {"lora_name": name, "lora_path": str(folder)}
        try:
            self._call("POST", "/v1/load_lora_adapter", loading, seconds=self._seconds, is_text=True)
        except ServerRefused as error:
            raise ServerRefused(
                f"{error}; for a policy with adapters, start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and let it read {folder}"
            ) from error

    def logprobs(self, rows: Sequence[list[int]], *, adapter: str | None = None) -> Tensor:
        """Return the log-probability of each id but the first of rows of one length, at temperature 1, float64.

        Args:
            adapter: name of the adapter that is applied; None: none is.
        """
        sampling = {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        read = [
            self._call("POST", GENERATE, _request(row, sampling, adapter), seconds=self._seconds)
            for row in rows
        ]
        with self._reading(GENERATE):
            return torch.tensor(
                [
                    [
                        at[str(token)]["logprob"]
                        for at, token in zip(each["prompt_logprobs"][1:], row[1:], strict=True)
                    ]
                    for each, row in zip(read, rows, strict=True)
                ],
                dtype=torch.float64,
            )

    async def draw(
        self,
        client: httpx.AsyncClient,
        prompt: Sequence[int],
        sampling: Mapping[str, Any],
        *,
        is_complete: Callable[[Sequence[int]], bool] | None,
        adapter: str | None = None,
    ) -> Drawn:
        """Draw one response.

        Args:
            client: client of this server.
            sampling: vLLM's ``SamplingParams``.
            is_complete: returns whether these ids of a response end it; called after each id; None: token ids alone end
                it.
            adapter: name of the adapter that is applied; None: none is.

        Raises:
            ServerFailed, ServerRefused: the response cannot be drawn.
        """
        body = _request(prompt, sampling, adapter)
        with self._answering(GENERATE):
            if is_complete is None:
                response = await client.post(GENERATE, json=body)
                return self._drawn([self._content(response, GENERATE, body)])
            async with client.stream("POST", GENERATE, json={**body, "stream": True}) as response:
                if response.is_error:
                    await response.aread()
                    self._content(response, GENERATE, body)
                return await self._streamed(response, is_complete)

    async def _streamed(
        self, response: httpx.Response, is_complete: Callable[[Sequence[int]], bool]
    ) -> Drawn:
        """Return a response that comes token by token; the server stops when the connection is closed."""
        ids: list[int] = []
        chunks: list[dict[str, Any]] = []
        async for line in response.aiter_lines():
            text = line.removeprefix("data: ")
            if not text or text == "[DONE]":
                continue
            with self._reading(GENERATE):
                chunks.append(json.loads(text))
                new = chunks[-1]["choices"][0]["token_ids"]
            for token in new:
                ids.append(token)
                if is_complete(ids):
                    whole = self._drawn(chunks)
                    return Drawn(ids, whole.logprobs[: len(ids)], whole.versions)
        return self._drawn(chunks)

    def _drawn(self, chunks: Sequence[Mapping[str, Any]]) -> Drawn:
        with self._reading(GENERATE):
            choices = [chunk["choices"][0] for chunk in chunks]
            contents = [content for each in choices for content in each["logprobs"]["content"]]
            spans = choices[-1]["weight_versions"]
            return Drawn(
                ids=[token for each in choices for token in each["token_ids"]],
                logprobs=[content["logprob"] for content in contents],
                versions=None if spans is None else frozenset(each["version"] for each in spans),
            )

    def _rpc(
        self, method: str, arguments: Mapping[str, str] | None = None, *, seconds: float | None = None
    ) -> list[Any]:
        body = {"method": method, "kwargs": dict(arguments or {})}
        found = self._call("POST", "/collective_rpc", body, seconds=seconds)
        with self._reading("/collective_rpc"):
            return list(found["results"])

    def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        params: Mapping[str, str] | None = None,
        seconds: float | None = None,
        is_text: bool = False,
    ) -> Any:
        with self._answering(path):
            timeout = self._timeout(ANSWER_SECONDS if seconds is None else seconds)
            response = self._client.request(method, path, json=body, params=params, timeout=timeout)
        if not response.is_error and (is_text or not response.content):
            return {}
        return self._content(response, path, body)

    def _content(self, response: httpx.Response, path: str, body: Mapping[str, Any] | None) -> Any:
        """Return the JSON of an answer.

        Raises:
            ServerFailed: the answer is an error of the server, or no JSON.
            ServerRefused: the server refuses the request.
        """
        if response.is_error:
            reason = " ".join(response.text.split())[:400]
            message = f"{self.url} answered {path} with {response.status_code}: {reason}"
            if response.status_code == httpx.codes.UNAUTHORIZED:
                raise ServerRefused(
                    f"{message}; put the server's API key into the variable of rollout.api_key_variable"
                )
            adapter = (body or {}).get("model")
            if adapter is not None and adapter in response.text:
                raise ServerFailed(f"{self.url} has no adapter {adapter} any longer: {reason}")
            if response.status_code == httpx.codes.NOT_FOUND:
                raise ServerRefused(f"{message}; {HOW_TO_SERVE}")
            is_temporary = response.is_server_error or response.status_code == httpx.codes.TOO_MANY_REQUESTS
            raise ServerFailed(message) if is_temporary else ServerRefused(message)
        with self._reading(path):
            return response.json()

    @contextmanager
    def _answering(self, path: str) -> Iterator[None]:
        """Hold this context around requests: errors of the connection become ``ServerFailed``."""
        try:
            yield
        except httpx.TimeoutException as error:
            raise ServerTimedOut(
                f"{self.url} did not answer {path} in time ({type(error).__name__})"
            ) from error
        except httpx.HTTPError as error:
            raise ServerFailed(
                f"{self.url} did not answer {path}: {error or type(error).__name__}"
            ) from error

    @contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        """Hold this context around code that reads an answer: missing parts of the answer become ``ServerFailed``."""
        try:
            yield
        except (LookupError, ValueError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise ServerFailed(
                f"{self.url} answered {path} with something else than was asked for ({type(error).__name__}: {error})"
            ) from error

    @staticmethod
    def _timeout(seconds: float) -> httpx.Timeout:
        return httpx.Timeout(seconds, connect=min(CONNECT_SECONDS, seconds))


def _request(prompt: Sequence[int], sampling: Mapping[str, Any], adapter: str | None) -> dict[str, Any]:
    """Return the body of a request to ``GENERATE``, where an adapter is named as a model."""
    body = {"token_ids": list(prompt), "sampling_params": dict(sampling)}
    return body if adapter is None else {**body, "model": adapter}
