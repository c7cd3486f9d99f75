"""Methods that a server of vLLM needs in its workers so that a stage can give it weights.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs \\
        --worker-extension-cls vantage.tasks.rollout.vllm_worker.VantageWorker

vLLM imports this file in the server's processes, where the rest of Vantage may be missing. So it imports only vLLM and
vLLM's dependencies, and only inside functions.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

REVISION = 3
"""Number of these methods' interface; a stage refuses a server with another number, which has this file from another
version of Vantage."""


class VantageWorker:
    """Base class that vLLM adds to its workers; ``/collective_rpc`` calls these methods by name."""

    vllm_config: Any
    reload_weights: Any
    get_model: Any

    def vantage_describe(self) -> dict[str, Any]:
        """Return the model's configuration, and the settings that a stage depends on."""
        model, lora = self.vllm_config.model_config, self.vllm_config.lora_config
        return {
            "revision": REVISION,
            "config": json.loads(model.hf_config.to_json_string(use_diff=False)),
            "dtype": str(model.dtype).removeprefix("torch."),
            "logprobs_mode": str(getattr(model.logprobs_mode, "value", model.logprobs_mode)),
            "max_model_len": int(model.max_model_len),
            "max_lora_rank": None if lora is None else int(lora.max_lora_rank),
            "lora_target_modules": None if lora is None else lora.target_modules,
        }

    def vantage_take_weights(self, folder: str, contents: str) -> None:
        """Replace all weights but adapters by those of the safetensors files in ``folder``, whatever the server was
        started with.

        Args:
            contents: JSON of file name → number of its tensors. vLLM keeps the old value of a missing weight, and only
            warns. So nothing is replaced unless all files are complete.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file has another number of tensors.
        """
        expected: dict[str, int] = json.loads(contents)
        files = [Path(folder) / name for name in expected]
        for file, count in zip(files, expected.values(), strict=True):
            _check(file, count)
        self.reload_weights(weights_iterator=_weights(files))
        pack_again(self.get_model())

    def vantage_checksums(self, names: str) -> dict[str, str]:
        """Return the sha256 of some of vLLM's parameters.

        Args:
            names: JSON of their names.
        """
        return digests_of(self.get_model(), json.loads(names))


def digests_of(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Return the sha256 of the parameters with these names, without the parts of a name that layers with adapters add to it."""
    from vllm.model_executor.model_loader.weight_checksum import compute_tensor_digests

    digests: dict[str, str] = compute_tensor_digests(_Some(model, frozenset(names)))
    return digests


class _Some:
    """Some of a model's parameters, for a function that goes through all parameters of a model."""

    def __init__(self, model: Any, names: frozenset[str]) -> None:
        self._model, self._names = model, names

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        for name, weight in self._model.named_parameters():
            if name.replace(".base_layer.", ".") in self._names:
                yield name, weight


def _check(file: Path, count: int) -> None:
    from safetensors import safe_open

    remedy = "set rollout.weights_folder to a folder that the stage and all servers see under the same path"
    if not file.is_file():
        raise FileNotFoundError(
            f"this server does not see {file.name} in {file.parent}, which the stage has written; {remedy}"
        )
    with safe_open(file, framework="pt") as opened:
        found = len(opened.keys())
    if found != count:
        raise ValueError(
            f"this server sees {file.name} in {file.parent} with {found} weights, and the stage has written {count}; {remedy}"
        )


def _weights(files: Iterable[Path]) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as opened:
            names = opened.keys()
            yield from ((name, opened.get_tensor(name)) for name in names)


def pack_again(model: Any) -> None:
    """Pack the matrices again that vLLM packs on a CPU when it starts: a reload does not pack that of a tied output
    head."""
    layers = [layer for layer in model.modules() if hasattr(layer, "cpu_linear")]
    if not layers:
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for layer in layers:
        if (
            layer.weight.ndim == 2 and layer.weight.numel()
        ):  # layers without a weight were packed by the reload
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
