"""Attention that obeys this machine's hardware profile: build it, run it both ways, print the plan it obeyed.

python examples/attend.py                                         # dense
python examples/attend.py --segments 512,1024,2048 --rates 1,2,4  # dilated
"""

from __future__ import annotations

import argparse

import torch

from ringattn import RingAttention


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


parser = argparse.ArgumentParser(description="Run attention by this machine's profile and print the plan it obeyed.")
on_gpu = torch.cuda.is_available()  # the defaults are shapes that `ringtune probe` measures
parser.add_argument("--seq-len", type=int, default=2048)
parser.add_argument("--heads", type=int, default=16 if on_gpu else 4)
parser.add_argument("--head-dim", type=int, default=128 if on_gpu else 64)
parser.add_argument("--segments", type=integers, help="segment lengths, such as 512,1024,2048")
parser.add_argument("--rates", type=integers, help="dilation rates, such as 1,2,4")
args = parser.parse_args()
if (args.segments is None) != (args.rates is None):
    parser.error("--segments and --rates go together")

device = "cuda" if on_gpu else "cpu"
dtype = torch.bfloat16 if on_gpu else torch.float32

attn = RingAttention(
    num_heads=args.heads,
    head_dim=args.head_dim,
    segment_lengths=args.segments,  # None for both lists is dense attention
    dilation_rates=args.rates,
    causal=True,
    profile="auto",  # the profile that `ringtune which` names
    device=device,
)

torch.manual_seed(0)
shape = (1, args.seq_len, args.heads, args.head_dim)  # batch, sequence, heads, head_dim
q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))

out = attn(q, k, v)
out.square().sum().backward()

print("out  ", tuple(out.shape), out.dtype)
print("grads", *(f"{x.grad.float().norm():.4g}" for x in (q, k, v)))
print("plan ", attn.plan_for(args.seq_len, dtype, train=True))
