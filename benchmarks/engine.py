"""Tokens per second of the loop and of vLLM, one after the other in one process: ``python -m benchmarks.engine``.

The model has SmolLM2-135M's shape and random weights, so responses rarely end early. It needs an environment with vLLM: on a CPU
``make test-engine`` makes one, ``.venv-engine``. Each engine samples twice, and the second time counts.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vantage.models.builtin import write_tokenizer
from vantage.models.folders import load_tokenizer
from vantage.models.policy import PolicyModel
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.rollout import Sampling
from vantage.tasks.data.examples import Codec
from vantage.tasks.rollout.engine import load_engine

SMOLLM2: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def main() -> None:
    """Print a line for each engine: tokens, seconds, tokens per second; and for vLLM the seconds of an update of all weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each response")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    policy = PolicyModel(LlamaForCausalLM(LlamaConfig(**SMOLLM2)).eval())
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        generation = Generation(max_prompt_tokens=asked.prompt, max_response_tokens=asked.tokens)
        codec = Codec(load_tokenizer(Path(folder)), generation, None)
    prompts = torch.randint(3, 49152, (asked.rows, asked.prompt)).tolist()
    for rollout in (Sampling(), Sampling(engine="vllm")):
        engine = load_engine(policy, codec, limits=PassLimits(), precision=asked.precision, rollout=rollout)
        for seed in (1, 2):
            begun = time.perf_counter()
            found = engine.generate(prompts, count=1, seed=seed)
            seconds = time.perf_counter() - begun
        tokens = sum(map(len, found.responses))
        begun = time.perf_counter()
        engine.take_weights(policy.causal_lm.named_parameters())
        update = time.perf_counter() - begun
        print(
            f"{rollout.engine}: {tokens} tokens in {seconds:.2f} s, {tokens / seconds:.0f} tokens/s; update of the weights {update:.2f} s"
        )


if __name__ == "__main__":
    main()
