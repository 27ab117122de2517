"""A layer of Prov-GigaPath's slide encoder with the same weights: torchscale's own against ours, time and peak memory.

    TORCHSCALE_FOLDERS=FOLDER[:FOLDER] python benchmarks/encoder_layer.py [--output FOLDER] [--profile auto|none|FILE]
                                                                          [--lengths ...]

Width 768, 16 heads of 48, a feed-forward network of 3072, segments 1024..1048576, rates 1..16, full, bf16, one slide,
eval mode as torchscale applies dropout where it should not. The folders hold torchscale (a checkout) and einops;
torchscale's attention runs on torch's FlashAttention 2. ``error`` is the relative 2-norm of the output's difference
to torchscale's: it attends to the zeros that it pads with, so the lengths that no segment divides differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from common import Clock, Record, looped_ms, median, need_gpus, peak_mib, ratio
from common_kernels import flash_for_torchscale
from torch import Tensor, nn

from ringattn.integrations.gigapath import DILATION_RATES, HEADS, segment_lengths_of
from ringattn.integrations.torchscale import TorchscaleLongNet

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support" / "ringattn"))

WIDTH, LENGTHS = 768, (10_001, 100_003)


def layers(profile: object) -> dict[str, nn.Module]:
    """Return one layer of each, with the same random weights, on the GPU in bfloat16."""
    from torchscale_peer import longnet_of

    theirs = longnet_of(
        encoder_layers=1,
        encoder_embed_dim=WIDTH,
        encoder_ffn_embed_dim=4 * WIDTH,
        encoder_attention_heads=HEADS,
        segment_length=str(segment_lengths_of()),
        dilated_ratio=str(list(DILATION_RATES)),
    ).to("cuda", torch.bfloat16)
    sys.modules["torchscale.component.multihead_attention"].flash_attn_func = flash_for_torchscale
    return {"module": TorchscaleLongNet.of(theirs, profile=profile), "torchscale": theirs}


def measure(record: Record, clock: Clock, encoders: dict[str, nn.Module], length: int) -> None:
    x, dout = (torch.randn(1, length, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()

    def output_of(encoder: nn.Module) -> Tensor:
        return encoder(src_tokens=None, token_embeddings=x)["encoder_out"]

    def forward_of(encoder: nn.Module) -> Callable[[], object]:
        def step() -> Tensor:
            with torch.no_grad():
                return output_of(encoder)

        return step

    def both_of(encoder: nn.Module) -> Callable[[], object]:
        wanted = [x, *(p for p in encoder.parameters() if p.requires_grad)]
        return lambda: torch.autograd.grad(output_of(encoder), wanted, dout, allow_unused=True)

    forward = {name: forward_of(encoder) for name, encoder in encoders.items()}
    both = {name: both_of(encoder) for name, encoder in encoders.items()}
    mine, theirs = (step().double() for step in forward.values())
    error = float((mine - theirs).norm() / theirs.norm())
    for direction, steps in (("forward", forward), ("forward+backward", both)):
        times = clock.blocks_ms(steps, blocks=11, warmup=2)
        peaks = {name: round(peak_mib(step)) for name, step in steps.items()}
        record.add(
            work=f"GigaPath's layer, S{length} {direction}",
            module_over_torchscale=ratio(times, "module", "torchscale"),
            memory_over_torchscale=peaks["module"] / peaks["torchscale"],
            ms={name: round(median(values), 3) for name, values in times.items()},
            wall_ms={name: round(looped_ms(step, 20), 3) for name, step in steps.items()},
            peak_mib=peaks,
            error=error,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="folder for encoder_layer.json")
    parser.add_argument("--profile", default="auto", help="auto, none (heuristic) or a profile file")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    arguments = parser.parse_args()
    need_gpus()
    record, clock = Record("encoder_layer", arguments.output), Clock()
    encoders = layers(None if arguments.profile == "none" else arguments.profile)
    for length in arguments.lengths:
        measure(record, clock, encoders, length)


if __name__ == "__main__":
    main()
