"""Time per token of transformers' ``generate``: ``attn_implementation="ringtune"`` against ``sdpa``, from one run.

    python benchmarks/generate.py [--output FOLDER] [--profile auto|none|FILE] [--model FOLDER]
    python benchmarks/generate.py --device cpu --tiny

A Llama with random weights (32/8 heads of 128, 4 layers of width 4096 unless ``--layers`` says otherwise) or the model
in a folder generates ``--tokens`` tokens greedily after prompts of every length, in turns and in random order. A
token's time is the median over those of one generation but the first, so that the prompt is not in it; ratios are the
median of the turns' ratios, and below 1 ``ringtune`` is faster. ``--batch`` and ``--padded`` ask for several prompts,
and for such as are padded on the left to their own lengths.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import torch
from common import Record, median, need_gpus, ratio

from ringattn.integrations.transformers import register

LENGTHS = (64, 512, 2048, 4096, 8192)
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
LARGE = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}


class TokenTimes:
    """Streamer of ``generate`` that notes when each token is on the host."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.stamps.append(time.perf_counter())

    def end(self) -> None:
        pass

    def token_ms(self) -> float:
        """Return the median over the tokens after the first, which waits for the prompt."""
        return median([(b - a) * 1e3 for a, b in zip(self.stamps[1:], self.stamps[2:], strict=False)])


def model_of(arguments: argparse.Namespace) -> Any:
    import transformers

    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    if arguments.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype)
    else:
        config = transformers.LlamaConfig(
            vocab_size=256, num_hidden_layers=arguments.layers, max_position_embeddings=2 * max(LENGTHS),
            pad_token_id=0, **(TINY if arguments.tiny else LARGE),
        )  # fmt: skip
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).to(dtype)
    model = model.to(arguments.device).eval()
    model.generation_config.eos_token_id = None  # as many tokens every time
    return model


def prompts(arguments: argparse.Namespace, length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(3, 256, (arguments.batch, length), generator=generator)
    mask = torch.ones_like(ids)
    if arguments.padded:
        for row in range(arguments.batch):
            mask[row, : row * length // (2 * arguments.batch)] = 0
    return {"input_ids": ids.to(arguments.device), "attention_mask": mask.to(arguments.device)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="folder for generate.json")
    parser.add_argument("--profile", default="auto", help="auto, none (heuristic) or a profile file")
    parser.add_argument("--model", help="folder of a saved causal language model, in place of a random Llama")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--tiny", action="store_true", help="a Llama of width 64, for a CPU")
    parser.add_argument("--padded", action="store_true", help="prompts padded on the left, each to a length of its own")
    for option, value in (("layers", 4), ("batch", 1), ("tokens", 64), ("turns", 7)):
        parser.add_argument(f"--{option}", type=int, default=value)
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        need_gpus()
    register(profile=None if arguments.profile == "none" else arguments.profile)
    model, record, order = model_of(arguments), Record("generate", arguments.output), random.Random(0)
    shape = f"B{arguments.batch}{' padded' if arguments.padded else ''} {model.config.num_hidden_layers} layers"
    shape += f" H{model.config.num_attention_heads}/{model.config.num_key_value_heads}"
    names = ("ringtune", "sdpa")
    for length in arguments.lengths:
        inputs = prompts(arguments, length)
        times: dict[str, list[float]] = {name: [] for name in names}
        made: dict[str, torch.Tensor] = {}
        for turn in range(arguments.turns + 1):
            for name in order.sample(names, len(names)):
                model.set_attn_implementation(name)
                streamer = TokenTimes()
                options = {"max_new_tokens": arguments.tokens, "do_sample": False, "streamer": streamer}
                made[name] = model.generate(**inputs, **options)
                if turn:  # the first of both is to warm up
                    times[name].append(streamer.token_ms())
        record.add(
            work=f"{shape} S{length}, {arguments.tokens} tokens",
            ringtune_over_sdpa=ratio(times, "ringtune", "sdpa"),
            ringtune_ms=median(times["ringtune"]),
            sdpa_ms=median(times["sdpa"]),
            same_tokens=float((made["ringtune"] == made["sdpa"]).double().mean()),
        )


if __name__ == "__main__":
    main()
