"""Peak memory of training adapters (LoRA, QLoRA) beside training all weights, for a model of SmolLM2-135M's shape.

    python -m benchmarks.lora_memory --workspace DIR

What SFT holds (one network) and what PPO holds (policy, reference, critic, reward model) is loaded by the stages' own
functions, and each trained network takes one step of AdamW on a few tokens, so activations count little. Each arm has a
process of its own, whose most resident memory is measured less what it had before, as in ``benchmarks.estimate_error``.
Weights are random, which takes the same memory. Prints a table in Markdown.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.peak_memory import PeakMemory, use_libraries

ROWS, TOKENS = 2, 32
RANK = 16
ARMS = ("all weights", f"LoRA, rank {RANK}", f"QLoRA, rank {RANK}")
SMOLLM2_135M = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip


def measure(folder: Path, *, trains: str, networks: str) -> dict[str, int]:
    """Return the bytes that one arm takes in this process."""
    import bitsandbytes  # noqa: F401 -- libraries do not count
    import peft  # noqa: F401
    import torch

    from vantage.models.adapters import Adaptation
    from vantage.models.heads import load_critic, values
    from vantage.models.logprobs import response_logprobs
    from vantage.models.sequences import collate
    from vantage.models.stored_models import Training, load_stored_policy
    from vantage.schemas.recipe.lora import Lora
    from vantage.schemas.records.model_files import ModelFiles
    from vantage.tasks.training.optimization import make_optimizer, take_step

    torch.set_num_threads(1)
    training: Training = "all" if trains == "all weights" else Adaptation(Lora(rank=RANK), seed=1)
    files = ModelFiles(rounded(folder) if trains.startswith("QLoRA") else folder)
    use_libraries()
    memory = PeakMemory()
    policy = load_stored_policy(files, training=training)
    trained: list[torch.nn.Module] = [policy]
    frozen: list[torch.nn.Module] = []
    if networks == "PPO":
        trained.append(load_critic(files, seed=1, training=training))
        frozen += [
            load_stored_policy(files, training="nothing"),
            load_critic(files, seed=2, training="nothing"),  # it has the size of a reward model
        ]
    batch = collate([[1] * (TOKENS // 2)] * ROWS, [[5] * (TOKENS // 2)] * ROWS, pad_token_id=0)
    optimizers = [make_optimizer(each, weight_decay=0.0) for each in trained]
    response_logprobs(policy, batch, temperature=1.0).logprobs.sum().backward()
    if networks == "PPO":
        values(trained[1], batch).sum().backward()  # type: ignore[arg-type]
    for module, optimizer in zip(trained, optimizers, strict=True):
        take_step(optimizer, module, learning_rate=1e-4, max_grad_norm=1.0)
    held = {each.data_ptr(): each for module in (*trained, *frozen) for each in module.parameters()}
    return {
        "peak": memory.bytes,
        "weights": sum(each.nbytes + _scales(each) for each in held.values()),
        "moments": sum(
            each.nbytes
            for optimizer in optimizers
            for state in optimizer.state.values()
            for each in state.values()
        ),
    }


def _scales(weight: object) -> int:
    """Return the bytes of the scales of a weight in 4 bits."""
    state = getattr(weight, "quant_state", None)
    return 0 if state is None else int(state.absmax.nbytes)


def make_random(folder: Path) -> Path:
    """Return a Llama of SmolLM2-135M's shape with random weights, and the built-in model's tokenizer."""
    import torch
    from transformers import LlamaForCausalLM

    from vantage.models.builtin import builtin_config, write_tokenizer
    from vantage.models.quantisation import round_folder

    if not folder.is_dir():
        config = builtin_config("tiny")
        config.update(SMOLLM2_135M)
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
        write_tokenizer(folder)
        round_folder(folder, rounded(folder))
    return folder


def rounded(folder: Path) -> Path:
    """Return where the same model is whose weights were rounded to 4 bits."""
    return folder.with_name(f"{folder.name}-nf4")


def main() -> None:
    """Run the console script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument("--arm", nargs=2, help="trained, networks: only this one, in this process")
    arguments = parser.parse_args()
    folder: Path = arguments.workspace / "random"
    if arguments.arm:
        trains, networks = arguments.arm
        print(json.dumps(measure(folder, trains=trains, networks=networks)))
        return
    arguments.workspace.mkdir(parents=True, exist_ok=True)
    make_random(folder)
    print(
        "| networks of | trained | peak, MB | weights | AdamW's moments |\n|---|---|---|---|---|", flush=True
    )
    for networks in ("SFT", "PPO"):
        for trains in ARMS:
            command = [
                sys.executable,
                "-m",
                "benchmarks.lora_memory",
                "--workspace",
                str(arguments.workspace),
            ]
            done = subprocess.run(
                [*command, "--arm", trains, networks],
                capture_output=True,
                text=True,
                check=True,
                # otherwise the C library keeps freed memory that lies between blocks in use
                env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**16)},
            )
            found = json.loads(done.stdout.splitlines()[-1])
            numbers = " | ".join(f"{found[name] / 1e6:,.0f}" for name in ("peak", "weights", "moments"))
            print(f"| {networks} | {trains} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
