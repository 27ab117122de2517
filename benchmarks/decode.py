"""Decoding and chunked prefill of 32/8 heads of 128, bf16: the module against torch's best and the card's own copy.

    python benchmarks/decode.py [--output FOLDER] [--profile auto|none|FILE] [--tiny]

- A step of one sequence with 131,072 cached positions: bytes of keys and values a second, as a share of what a copy of
  as many bytes reads and writes.
- A step of 64 sequences with 8,192 each, beside torch's ``scaled_dot_product_attention`` on every backend it runs on.
- A chunk of 2,048 positions of a prompt behind 131,072, beside the kernels alone that its blocks are made of.

``step`` attends over what is cached; ``step, replayed`` is a CUDA graph of appending one position and attending, as
``step, appended`` is without one. ``host_us`` is what a call costs the host. With ``--tiny`` on any machine, small.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from common import Clock, HostClock, Record, Step, median, need_gpus, ratio
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringattn import RingAttention, detect
from ringattn.kernels.contract import KernelConfig, KernelNeed
from ringattn.kernels.registry import KERNELS

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
BACKENDS = {
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch cudnn": SDPBackend.CUDNN_ATTENTION,
    "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
    "torch math": SDPBackend.MATH,
}


class Case:
    """A module, a full cache and a chunk of queries, its last positions."""

    def __init__(self, attn: RingAttention, batch: int, cached: int, queries: int, room: int = 4096) -> None:
        self.attn, self.device = attn, attn.device
        self.batch, self.cached, self.queries = batch, cached, queries
        self.cache = attn.kv_cache(batch, cached + room, dtype=torch.bfloat16)
        for begin in range(0, cached, 8192):
            new = min(8192, cached - begin)
            self.cache.append(*(self.random(new, KV_HEADS) for _ in range(2)))
        self.q, self.one = self.random(queries, HEADS), self.random(1, KV_HEADS)

    def random(self, positions: int, heads: int) -> Tensor:
        return torch.randn(self.batch, positions, heads, HEAD_DIM, device=self.device, dtype=torch.bfloat16)

    @property
    def key_bytes(self) -> int:
        return 2 * self.batch * self.cached * KV_HEADS * HEAD_DIM * 2

    def rows(self) -> tuple[Tensor, Tensor]:
        """Return what was cached at first, views (B, S, Hkv, D)."""
        return self.cache.rows(self.cached)

    def step(self) -> Tensor:
        return self.attn.decode(self.q, self.cache)  # type: ignore[return-value]

    def appended(self) -> Tensor:
        out = self.attn.prefill(self.q, self.one, self.one, self.cache)
        self.cache.truncate(self.cached)
        return out  # type: ignore[return-value]

    def replayed(self) -> Step | None:
        """Return a step that appends and attends as one CUDA graph; the device takes the position back in it."""
        if self.device.type != "cuda":
            return None
        self.attn.prefill(self.q, self.one, self.one, self.cache)
        self.cache.truncate(self.cached)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.attn.prefill(self.q, self.one, self.one, self.cache)
            self.cache.device_rows(None, 1)[0].sub_(1)
        return graph.replay


def torch_steps(case: Case) -> dict[str, Step]:
    """Return torch's own function with every backend that takes one query for each sequence."""
    q, k, v = (x.transpose(1, 2) for x in (case.q, *case.rows()))
    steps: dict[str, Step] = {}
    for name, backend in BACKENDS.items():

        def step(backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel([backend]):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        try:
            step()
        except RuntimeError as refused:
            print(f"{name}: {str(refused).splitlines()[0]}")
            continue
        steps[name] = step
    return steps


def copy_step(case: Case) -> Step:
    source = torch.empty(case.key_bytes // 2, dtype=torch.bfloat16, device=case.device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def kernel_step(case: Case, name: str) -> Step:
    """Return one kernel alone on the cache, without the module around it."""
    kernel, (k, v) = KERNELS[name].load(KernelConfig(False, HEAD_DIM**-0.5)), case.rows()
    forward = kernel.one_query or kernel.forward
    return lambda: forward(case.q, k, v)


def difference(a: Step, b: Callable[[], Any]) -> float:
    """Return the largest difference of two outs, relative to the 2-norm of a row of the second."""
    first, second = a(), b()
    first, second = (x[0] if isinstance(x, tuple) else x for x in (first, second))
    if second.shape != first.shape:
        second = second.transpose(1, 2)
    return float((first.float() - second.float()).norm() / second.float().norm())


def measure_step(record: Record, clock: Clock, case: Case) -> None:
    steps: dict[str, Step] = {"step": case.step, "step, appended": case.appended, "copy": copy_step(case)}
    replayed = case.replayed()
    if replayed is not None:
        steps["step, replayed"] = replayed
    facts = detect(case.device)
    need = KernelNeed(
        facts.vendor, facts.arch, "bf16", HEAD_DIM, HEADS, KV_HEADS, case.cached, case.batch, False, False, queries=1
    )
    for name, kernel in KERNELS.items():
        if name != "math" and not kernel.unsupported_reasons(need, facts):
            steps[f"kernel {name}"] = kernel_step(case, name)
    torchs = torch_steps(case)
    times = clock.blocks_ms(steps | torchs)
    best = min(torchs, key=lambda name: median(times[name]))
    gigabytes_s = {name: case.key_bytes / median(ms) / 1e6 for name, ms in times.items()}
    copied = 2 * gigabytes_s["copy"]  # read and written
    shares = {name: round(value / copied, 3) for name, value in gigabytes_s.items() if name != "copy"}
    record.add(
        work=f"decode B{case.batch} S{case.cached} H{HEADS}/{KV_HEADS} D{HEAD_DIM} bf16",
        best_of_torch=best,
        torch_over_step=ratio(times, best, "step"),
        copy_gb_s=round(copied),
        share_of_copy=shares,
        host_us=round(host_us(case, clock), 1),
        differs=difference(case.step, torchs[best]),
        ms={name: round(median(values), 4) for name, values in times.items()},
        plan=str(case.attn.plan.decode_at(case.cached, "bf16", case.batch).runnable()),
    )


def host_us(case: Case, clock: Clock, calls: int = 100) -> float:
    """Return the host's time for a step, the mean of so many that are not waited for, which a GPU still queues."""
    clock.wait()
    begin = time.perf_counter()
    for _ in range(calls):
        case.step()
    taken_us = (time.perf_counter() - begin) / calls * 1e6
    clock.wait()
    return taken_us


def measure_chunk(record: Record, clock: Clock, case: Case) -> None:
    """Measure a chunk of queries; its blocks are the keys before it, all of them, and its own, causal."""
    facts, past = detect(case.device), case.cached - case.queries
    k, v = case.rows()
    shape = (HEAD_DIM, HEADS, KV_HEADS)
    steps: dict[str, Step] = {"chunk": case.step}
    for name, kernel in KERNELS.items():
        need = KernelNeed(facts.vendor, facts.arch, "bf16", *shape, past, case.batch, True, False)
        if name in ("math", "xformers") or kernel.unsupported_reasons(need, facts):
            continue
        full, diagonal = (kernel.load(KernelConfig(causal, HEAD_DIM**-0.5)).forward for causal in (False, True))

        def both(full: Any = full, diagonal: Any = diagonal) -> None:
            full(case.q, k[:, :past], v[:, :past])
            diagonal(case.q, k[:, past:], v[:, past:])

        steps[f"{name}, two launches"] = both
    if "flash, two launches" in steps:

        def whole() -> Tensor:
            sizes = (case.queries, case.cached)
            return torch.ops.aten._flash_attention_forward(case.q, k, v, None, None, *sizes, 0.0, True, False)[0]

        if difference(case.step, whole) < 1e-2:  # FlashAttention 2 aligns its mask to the end
            steps["flash, one launch"] = whole
    times = clock.blocks_ms(steps, blocks=9)
    best = min((name for name in steps if name != "chunk"), key=lambda name: median(times[name]))
    record.add(
        work=f"prefill chunk B{case.batch} {case.queries} of S{case.cached} H{HEADS}/{KV_HEADS} D{HEAD_DIM} bf16",
        best_kernel=best,
        chunk_over_kernel=ratio(times, "chunk", best),
        ms={name: round(median(values), 4) for name, values in times.items()},
        plan=str(case.attn.plan.local_at(case.cached, "bf16", False, case.batch).runnable()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="folder for decode.json")
    parser.add_argument("--profile", default="auto", help="auto, none (heuristic) or a profile file")
    parser.add_argument("--tiny", action="store_true", help="small sizes, on a CPU too")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not arguments.tiny:
        need_gpus()
    profile = None if arguments.profile == "none" else arguments.profile
    attn = RingAttention(HEADS, HEAD_DIM, KV_HEADS, causal=True, profile=profile)
    record, clock = Record("decode", arguments.output), Clock() if on_gpu else HostClock()
    long, short, many, queries = (512, 128, 2, 64) if arguments.tiny else (131072, 8192, 64, 2048)
    with torch.no_grad():
        measure_step(record, clock, Case(attn, 1, long, 1))
        measure_step(record, clock, Case(attn, many, short, 1, room=256))
        measure_chunk(record, clock, Case(attn, 1, long, queries))


if __name__ == "__main__":
    main()
