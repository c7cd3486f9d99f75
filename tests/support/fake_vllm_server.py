"""Serve the endpoints of ``vllm serve`` that Vantage calls over HTTP, with a model of transformers and with faults on
request.

``main`` takes the arguments of vLLM's own. It reads faults from the file named by ``FAKE_VLLM_FAULTS``, and deletes it.
"""

import argparse
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.support.fake_vllm import adapted, checksums_of, flip_last_bit, targets_of
from tests.support.single_row import respond
from vantage.tasks.rollout.vllm_worker import REVISION, VantageWorker

PROGRAM = ("-m", "tests.support.stand_in", "tests.support.fake_vllm_server")
"""Arguments with which Python starts this server in place of vLLM's, after ``WITH_TORCH.listen``."""
GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"


@dataclass
class Faults:
    """Failures that the server is asked for; numbers count the sampled requests from 0, over all starts."""

    hanging: set[int] = field(default_factory=set)
    """Requests that are never answered."""
    failing: set[int] = field(default_factory=set)
    """Requests that are answered with 500."""
    dropped: set[int] = field(default_factory=set)
    """Requests whose connection is closed."""
    aborted: set[int] = field(default_factory=set)
    """Responses that end after one token, as after ``/abort_requests``."""
    stale: set[int] = field(default_factory=set)
    """Responses that report another version of the weights."""
    stops_at: int | None = None
    """The request at which the server ends, as if it were killed."""
    keeps_old_weights: bool = False
    """Whether updates after the first change nothing but the version."""
    is_elsewhere: bool = False
    """Whether the server sees none of the files that the stage writes: it is on another machine."""
    hidden: set[str] = field(default_factory=set)
    """Names of files that the server does not see yet."""
    loses_adapters: bool = False
    """Whether adapters are taken and applied to nothing."""
    keeps_old_adapter: bool = False
    """Whether adapters after the first change nothing."""
    scaling: float = 1.0
    """Factor by which the scaling of adapters is wrong."""
    forgetting: set[int] = field(default_factory=set)
    """Requests before which the server has forgotten its adapters, as after a restart."""
    failing_updates: set[int] = field(default_factory=set)
    """Updates, from 1, that end with 500 after the weights have changed."""
    flipped: set[int] = field(default_factory=set)
    """Updates, from 1, after which the last bit of one number of the weights is another."""
    overtaken: set[int] = field(default_factory=set)
    """Requests after which another client gives the server other weights."""
    has_no_worker: bool = False
    """Whether the server was started without the methods of ``vllm_worker``."""
    has_no_tokenizer: bool = False
    unknown: set[str] = field(default_factory=set)
    """Paths that the server does not know: those of another program, or of vLLM without its switches."""
    failing_share: float = 0.0
    """Share of requests to ``/v1/completions`` and ``/tokenize`` that fail, in turns: 500, a closed connection, no log-probabilities."""
    hanging_paths: set[str] = field(default_factory=set)
    """Paths of which no request is answered."""
    failing_paths: set[str] = field(default_factory=set)
    """Paths of which each request is answered with 500, as by a server whose engine is dead."""
    speaks_otherwise: bool = False
    """Whether every answer is an empty object, as of another program."""


@dataclass
class Seen:
    """Requests that the server received."""

    seeds: list[int] = field(default_factory=list)
    """Seed of each sampled request, in order."""
    prompts: list[list[int]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    """Versions of the weights that it was given."""
    dtypes: set[torch.dtype] = field(default_factory=set)
    """Types of the weights in the files that it read."""
    sent: list[int] = field(default_factory=list)
    """Bytes of each update: of whole weights, or of an adapter."""
    adapters: list[str] = field(default_factory=list)
    """Names of the adapters, in order."""
    read: list[list[int]] = field(default_factory=list)
    """Ids of the requests to ``/v1/completions`` that were answered as they should be."""
    completed: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    """Ids and seed of the requests to ``/v1/completions`` that were answered with a response."""
    num_asked: int = 0
    """Requests to ``/v1/completions`` and ``/tokenize``."""
    num_failed: int = 0
    """The requests of these that failed."""
    asked_names: list[list[str]] = field(default_factory=list)
    """Names of each request for the checksums of some parameters."""
    folders: set[str] = field(default_factory=set)
    paths: list[str] = field(default_factory=list)
    disconnected: int = 0
    """Streams that the client closed before their end."""


class FakeServer:
    """A server on a port of this machine; ``start`` after ``stop`` uses the same port."""

    def __init__(
        self,
        model: Path,
        *,
        key: str | None = None,
        dtype: str = "float32",
        max_tokens: int = 512,
        host: str = "127.0.0.1",
        port: int = 0,
        lora: tuple[int, list[str] | None] | None = None,
    ) -> None:
        """Serve a model. ``lora`` has the largest rank of adapters, and the layers that may have one."""
        self.lora = lora
        self.faults, self.seen = Faults(), Seen()
        self._folder, self._key = model, key
        self.dtype, self.max_tokens, self.logprobs_mode = dtype, max_tokens, "processed_logprobs"
        self._host, self._port = host, port
        self.is_program, self.revision = port > 0, REVISION
        self._lock = threading.Lock()
        self._num_updates = 0
        self._released = threading.Event()
        self.start()

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self._port}"

    def start(self) -> None:
        """Start to serve, with other weights than any policy's."""
        torch.manual_seed(99)
        self.config = AutoConfig.from_pretrained(self._folder)
        self.model = AutoModelForCausalLM.from_config(self.config).eval()
        if not self.is_program:
            self.tokenizer = AutoTokenizer.from_pretrained(self._folder)
        self.version, self.is_paused, self._was_loaded = "default", False, False
        self.loaded: dict[str, Any] = {}
        """Adapter's name → the model with it."""
        self.last: Any = None
        """The model with the adapter that was taken last."""
        served = self

        class Handler(_Handler):
            server_of = served

        self._http = ThreadingHTTPServer((self._host, self._port), Handler)
        self._http.daemon_threads, self._http.block_on_close = True, False
        self._port = self._http.server_address[1]
        self._open: set[Any] = set()
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the server and its connections."""
        self._released.set()
        self._http.shutdown()
        self._http.server_close()
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    @torch.no_grad()
    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Load weights as vLLM does: those that do not come stay as they are, without an error."""
        self._num_updates += 1
        self.seen.sent.append(sum(weight.nbytes for weight in weights.values()))
        self.seen.dtypes |= {weight.dtype for weight in weights.values()}
        own = dict(self.model.named_parameters())
        if not (self.faults.keeps_old_weights and self._was_loaded):
            for name, weight in weights.items():
                own[name].copy_(weight)
        self._was_loaded = True
        if self._num_updates in self.faults.flipped:
            flip_last_bit(self.model)
        if self._num_updates in self.faults.failing_updates:
            raise RuntimeError(f"update {self._num_updates} is broken")

    @contextmanager
    def view_of(self, folder: str) -> Iterator[str]:
        """Yield the folder as the server sees it."""
        with TemporaryDirectory() as seen:
            for file in [] if self.faults.is_elsewhere else Path(folder).iterdir():
                if file.name not in self.faults.hidden:
                    (Path(seen) / file.name).symlink_to(file)
            yield seen

    def take_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter under a name; the server has room for one."""
        assert self.lora is not None and self.is_paused and not self.loaded
        rank, targets = self.lora
        assert json.loads((folder / "adapter_config.json").read_text())["r"] <= rank
        assert targets is None or targets_of(folder) <= {*targets}
        self.seen.sent.append((folder / "adapter_model.safetensors").stat().st_size)
        self.seen.adapters.append(name)
        self.seen.folders.add(str(folder))
        if self.faults.keeps_old_adapter and len(self.seen.adapters) > 1:
            self.loaded[name] = self.last
        elif self.faults.loses_adapters:
            self.loaded[name] = self.model
        else:
            self.loaded[name] = adapted(self.model, folder, factor=self.faults.scaling)
        self.last = self.loaded[name]

    def model_of(self, body: dict[str, Any]) -> Any:
        """Return the model that a request names; None: there is none of this name."""
        return self.model if "model" not in body else self.loaded.get(body["model"])

    def drawn(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return the number of the request, and its choice."""
        sampling = body["sampling_params"]
        assert sampling["ignore_eos"] and not sampling["detokenize"] and sampling["logprobs"] == 0
        with self._lock:
            assert not self.is_paused
            number = len(self.seen.seeds)
            self.seen.seeds.append(sampling["seed"])
            self.seen.prompts.append(body["token_ids"])
            self.seen.bodies.append(body)
            found = respond(
                self.model_of(body),
                body["token_ids"],
                max_new_tokens=sampling["max_tokens"],
                temperature=sampling["temperature"],
                eos_token_ids=sampling["stop_token_ids"],
                seed=sampling["seed"],
            )
            version = "1-another" if number in self.faults.stale else self.version
            if number in self.faults.overtaken:
                self.overtake()
        ids, logprobs = found.ids, found.logprobs
        reason = "stop" if found.ended else "length"
        if number in self.faults.aborted:
            ids, logprobs, reason = ids[:1], logprobs[:1], "abort"
        return number, choice(ids, logprobs, reason, version)

    def completed(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request for a response with its ids, as vLLM writes it."""
        assert body["return_token_ids"] and body["ignore_eos"]
        assert (body["temperature"], body["top_p"], body["top_k"]) == (1.0, 1.0, -1)
        with self._lock:
            found = respond(
                self.model,
                body["prompt"],
                max_new_tokens=body["max_tokens"],
                temperature=1.0,
                eos_token_ids=body["stop_token_ids"],
                seed=body["seed"],
            )
            self.seen.completed.append((tuple(body["prompt"]), body["seed"]))
        reason = "stop" if found.ended else "length"
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(found.ids)}
        chosen = {"index": 0, "text": "", "finish_reason": reason, "token_ids": found.ids}
        return {"choices": [chosen], "usage": usage}

    @torch.no_grad()
    def read(self, ids: list[int], model: Any = None) -> list[Any]:
        """Return log-probabilities of the prompt's own ids."""
        with self._lock:
            logprobs = (model or self.model)(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
        own = [
            {str(token): {"logprob": logprobs[at, token].item(), "rank": 1, "decoded_token": None}}
            for at, token in enumerate(ids[1:])
        ]
        return [None, *own]

    def next_fault(self) -> str | None:
        """Count a request; returns its fault."""
        seen, share = self.seen, self.faults.failing_share
        with self._lock:
            seen.num_asked += 1
            if int(seen.num_asked * share) == int((seen.num_asked - 1) * share):
                return None
            seen.num_failed += 1
            return ("status", "connection", "content")[seen.num_failed % 3]

    def overtake(self) -> None:
        """Change weights and version, as another client would."""
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.add_(0.01)
        self.version = "1-of-another"


class _Worker(VantageWorker):
    """The methods of a server's worker, with this server's model in place of vLLM's."""

    def __init__(self, server: FakeServer) -> None:
        self.get_model = lambda: server.model
        self.reload_weights = lambda weights_iterator: server.load(dict(weights_iterator))


def choice(ids: list[int], logprobs: list[float], reason: str | None, version: str | None) -> dict[str, Any]:
    """Return one choice as vLLM writes it."""
    content = [{"token_id": id, "logprob": logprob} for id, logprob in zip(ids, logprobs, strict=True)]
    spans = None if version is None else [{"version": version, "start": 0, "end": len(ids)}]
    return {
        "index": 0,
        "finish_reason": reason,
        "token_ids": ids,
        "logprobs": {"content": content},
        "weight_versions": spans,
    }


class _Handler(BaseHTTPRequestHandler):
    server_of: FakeServer
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.server_of._open.add(self.connection)

    def finish(self) -> None:
        self.server_of._open.discard(self.connection)
        with suppress(OSError, ValueError):
            super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing."""

    def do_GET(self) -> None:
        self._serve(None)

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self._serve(json.loads(self.rfile.read(length)) if length else {})

    def _serve(self, body: dict[str, Any] | None) -> None:
        served, url = self.server_of, urlsplit(self.path)
        served.seen.paths.append(url.path)
        guarded = url.path.startswith(("/v1", "/inference"))
        if guarded and served._key and self.headers.get("Authorization") != f"Bearer {served._key}":
            return self._answer(401, {"error": "Unauthorized"})
        try:
            self._route(url.path, body or {}, parse_qs(url.query))
        except (BrokenPipeError, ConnectionError):
            self.close_connection = True
        except Exception as error:
            self._answer(500, {"error": {"message": str(error)}})
        return None

    def _route(self, path: str, body: dict[str, Any], query: dict[str, list[str]]) -> None:
        served = self.server_of
        if path in served.faults.unknown:
            self._answer(404, {"detail": "Not Found"})
        elif path in served.faults.hanging_paths:
            served._released.wait(60)
            raise ConnectionError
        elif path in served.faults.failing_paths:
            self._answer(500, {"error": {"message": "EngineCore encountered an issue"}})
        elif served.faults.speaks_otherwise:
            self._answer(200, {})
        elif path == "/v1/models":
            name = str(served._folder)
            models = [{"id": "served", "root": name, "max_model_len": served.max_tokens}]
            models += [{"id": each, "parent": "served"} for each in served.loaded]
            self._answer(200, {"data": models})
        elif path == "/v1/unload_lora_adapter" and served.lora:
            del served.loaded[body["lora_name"]]
            self._answer(200, "Success", is_text=True)
        elif path == "/v1/load_lora_adapter" and served.lora:
            served.take_adapter(body["lora_name"], Path(body["lora_path"]))
            self._answer(200, "Success", is_text=True)
        elif path == "/health":
            self._answer(200, None)
        elif path == "/weight_info":
            self._answer(200, {"weight_version": served.version})
        elif path == "/update_weight_version":
            served.version = body["new_version"]
            served.seen.versions.append(body["new_version"])
            self._answer(200, {"success": True})
        elif path == "/pause":
            assert query == {"mode": ["abort"]}
            served.is_paused = True
            self._answer(200, {"status": "paused"})
        elif path == "/resume":
            served.is_paused = False
            self._answer(200, {"status": "resumed"})
        elif path == "/reset_prefix_cache":
            assert served.is_paused
            self._answer(200, {"success": True})
        elif path == "/weight_checker":
            assert body == {"action": "checksum"}
            with served._lock:
                self._answer(200, {"checksums": checksums_of(served.model)})
        elif path == "/collective_rpc":
            self._answer(200, {"results": [self._rpc(body["method"], body["kwargs"])]})
        elif path in ("/tokenize", COMPLETIONS) and (fault := served.next_fault()):
            self._fail(fault)
        elif path == "/tokenize":
            self._tokenize(body)
        elif path == COMPLETIONS:
            self._complete(body)
        elif path == GENERATE:
            self._generate(body)
        else:
            self._answer(404, {"detail": "Not Found"})

    def _rpc(self, method: str, arguments: dict[str, str]) -> Any:
        served = self.server_of
        if served.faults.has_no_worker:
            raise RuntimeError(f"Method {method!r} is not implemented")
        if method == "vantage_describe":
            return {
                "revision": served.revision,
                "config": json.loads(served.config.to_json_string(use_diff=False)),
                "dtype": served.dtype,
                "logprobs_mode": served.logprobs_mode,
                "max_model_len": served.max_tokens,
                "max_lora_rank": served.lora and served.lora[0],
                "lora_target_modules": served.lora and served.lora[1],
            }
        if method == "vantage_checksums":
            names = json.loads(arguments["names"])
            served.seen.asked_names.append(names)
            held = {name.rpartition(":")[2]: each for name, each in checksums_of(served.model).items()}
            return {name: held[name] for name in names}
        assert method == "vantage_take_weights" and served.is_paused
        served.seen.folders.add(arguments["folder"])
        with served._lock, served.view_of(arguments["folder"]) as folder:
            return _Worker(served).vantage_take_weights(**arguments | {"folder": folder})

    def _tokenize(self, body: dict[str, Any]) -> None:
        if self.server_of.faults.has_no_tokenizer:
            self._answer(400, {"error": {"message": "no tokenizer"}})
        else:
            ids = self.server_of.tokenizer.encode(body["prompt"], add_special_tokens=False)
            self._answer(200, {"count": len(ids), "tokens": ids})

    def _fail(self, fault: str) -> None:
        """Fail as a busy server does."""
        if fault == "connection":
            self.connection.close()
            raise ConnectionError
        self._answer(500 if fault == "status" else 200, {"choices": [{"prompt_logprobs": [None]}]})

    def _complete(self, body: dict[str, Any]) -> None:
        """Return the log-probabilities of a prompt's own ids, as vLLM does."""
        served = self.server_of
        if body["model"] != "served":
            return self._answer(404, {"error": {"message": f"The model {body['model']!r} does not exist."}})
        if "prompt_logprobs" not in body:
            return self._answer(200, served.completed(body))
        assert (body["max_tokens"], body["prompt_logprobs"]) == (1, 0)
        found = {"index": 0, "text": "", "prompt_logprobs": served.read(body["prompt"])}
        served.seen.read.append(body["prompt"])
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": 1}
        return self._answer(200, {"choices": [found], "usage": usage})

    def _generate(self, body: dict[str, Any]) -> None:
        served = self.server_of
        if len(served.seen.seeds) in served.faults.forgetting:
            served.faults.forgetting.discard(len(served.seen.seeds))
            served.loaded.clear()
            served.version = "default"
        if served.model_of(body) is None:
            message = f"The model `{body['model']}` does not exist."
            return self._answer(404, {"error": {"message": message, "type": "NotFoundError"}})
        if "prompt_logprobs" in body["sampling_params"]:
            vocab_size = served.config.vocab_size
            if max(body["token_ids"]) >= vocab_size:
                return self._answer(400, {"error": {"message": "out of vocabulary"}})
            drawn = choice([0], [0.0], "length", served.version)
            read = served.read(body["token_ids"], served.model_of(body))
            return self._answer(200, {"choices": [drawn], "prompt_logprobs": read})
        number, drawn = served.drawn(body)
        faults = served.faults
        if number == faults.stops_at and served.is_program:
            os._exit(1)
        if number == faults.stops_at:
            threading.Thread(target=served.stop, daemon=True).start()
            time.sleep(0.1)
            raise ConnectionError
        if number in faults.hanging:
            served._released.wait(60)
            raise ConnectionError
        if number in faults.dropped:
            self.connection.close()
            raise ConnectionError
        if number in faults.failing:
            return self._answer(500, {"error": {"message": f"request {number} is broken"}})
        if body.get("stream"):
            self._stream(drawn)
        else:
            self._answer(200, {"choices": [drawn], "prompt_logprobs": None})
        return None

    def _stream(self, drawn: dict[str, Any]) -> None:
        """Send a chunk for each token; the last one has the versions."""
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        logprobs = [each["logprob"] for each in drawn["logprobs"]["content"]]
        ids = drawn["token_ids"]
        try:
            for at, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
                is_last = at + 1 == len(ids)
                version = drawn["weight_versions"][0]["version"] if is_last else None
                part = choice([token], [logprob], drawn["finish_reason"] if is_last else None, version)
                self.wfile.write(f"data: {json.dumps({'choices': [part]})}\n\n".encode())
                time.sleep(0.001)
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.server_of.seen.disconnected += 1

    def _answer(self, status: int, content: Any, *, is_text: bool = False) -> None:
        data = b"" if content is None else (content if is_text else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving(model: Path, *, replicas: int = 1, **settings: Any) -> Iterator[list[FakeServer]]:
    """Run servers of the model's shape inside the block."""
    servers = [FakeServer(model, **settings) for _ in range(replicas)]
    try:
        yield servers
    finally:
        for server in servers:
            server.stop()


def main() -> None:
    """Serve until the process is killed."""
    arguments = argparse.ArgumentParser()
    for name in ("model", "host", "port", "load-format", "dtype", "max-model-len", "logprobs-mode"):
        arguments.add_argument(f"--{name}", required=True)
    for name in (
        "generation-config",
        "worker-extension-cls",
        "max-num-seqs",
        "max-lora-rank",
        "tensor-parallel-size",
    ):
        arguments.add_argument(f"--{name}")
    for name in (
        "enable-scale-out",
        "skip-tokenizer-init",
        "enforce-eager",
        "enable-lora",
        "no-enable-chunked-prefill",
    ):
        arguments.add_argument(f"--{name}", action="store_true")
    arguments.add_argument("--lora-target-modules", nargs="+")
    given = arguments.parse_args()
    assert given.load_format == "dummy" and given.skip_tokenizer_init and given.enable_scale_out
    assert os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert os.environ["VLLM_SERVER_DEV_MODE"] == "1" and "RANK" not in os.environ
    torch.set_num_threads(1)
    server = FakeServer(
        Path(given.model),
        key=os.environ["VLLM_API_KEY"],
        dtype=given.dtype,
        max_tokens=int(given.max_model_len),
        host=given.host,
        port=int(given.port),
        lora=(int(given.max_lora_rank), given.lora_target_modules) if given.enable_lora else None,
    )
    server.logprobs_mode = given.logprobs_mode
    server.faults.has_no_tokenizer = True
    file = Path(os.environ.get("FAKE_VLLM_FAULTS", "/nowhere"))
    with suppress(FileNotFoundError):
        faults = json.loads(file.read_text())
        file.unlink()
        for name, value in faults.items():
            setattr(server.faults, name, set(value) if isinstance(value, list) else value)
    threading.Event().wait()
