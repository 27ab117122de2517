"""Causal attention over several GPUs: the module by schedule against the no-communication ideal, in one run.

    torchrun --standalone --nproc-per-node 4 benchmarks/ring.py [--output FOLDER] [--lengths 8192 16384]

Each schedule runs as a plan of its own (a profile of one plan), ``heuristic`` as the module chooses without a profile.
The ideal is world x the one-GPU causal time of cudnn at the local length; ``all-to-all`` is one all-to-all each way
over whole heads around cudnn, nothing overlapped. A contender's time is the median of its blocks on the slowest rank;
in every block all contenders run once, in random order that is the same on all ranks. ``ms`` is one step that begins on
idle devices, with what its host needs before the first kernel; ``loop_ms`` is a step of a loop that does not wait for
each, as a program of several layers has it and as a probe times it. Peak memory is what is allocated beyond the inputs
at most.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import looped_ms, machine, need_gpus
from ring_peers import context_parallel, zigzag
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringattn import Profile, RingAttention, Workload, detect
from ringattn.errors import RingAttentionError
from ringattn.workload import BranchTunables, Pattern, Tunables

SDPA = torch.nn.functional.scaled_dot_product_attention  # a peer patches the module's
Step = Callable[[], object]
HEADS, HEAD_DIM = 32, 128
LOOP_MS = 60  # a loop of so long hides its first launches: 0.5 ms of the host
LONGNET = {
    "LongNet [8192..131072]": ([8192, 16384, 32768, 65536, 131072], [1, 2, 4, 8, 16], 32768),
    "LongNet [2048..32768]": ([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16], 65536),
}


@dataclass(frozen=True)
class Contender:
    """Forward alone, and forward + backward, over one set of inputs."""

    forward: Step
    both: Step
    scale: int = 1  # what a time is multiplied by: the ideal is measured on one rank's share
    peer_bytes: Callable[[], int] = lambda: 0  # of memory that torch's allocator does not count


def say(*words: object) -> None:
    if dist.get_rank() == 0:
        print(*words, flush=True)


# --- contenders --------------------------------------------------------------------------------------------------


def inputs_of(length: int, heads: int, kv_heads: int) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())

    def normal(count: int) -> Tensor:
        shape = (1, length, count, HEAD_DIM)
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    return [normal(n).requires_grad_() for n in (heads, kv_heads, kv_heads)], normal(heads)


def contender(call: Callable[..., Any], leaves: list[Tensor], dout: Tensor, scale: int = 1) -> Contender:
    def forward() -> None:
        with torch.no_grad():
            call(*leaves)

    peer_bytes = call.peer_workspace_bytes if isinstance(call, RingAttention) else lambda: 0
    return Contender(forward, lambda: torch.autograd.grad(call(*leaves), leaves, dout), scale, peer_bytes)


def planned(tunables: Tunables, length: int, heads: int, kv_heads: int, pattern: Pattern, world: int) -> RingAttention:
    """Return a module that runs exactly these tunables in training, and the same schedule in inference."""
    workload = Workload("train", True, length, heads, HEAD_DIM, "bf16", kv_heads, pattern=pattern, world=world)
    infer = replace(
        tunables,
        checkpoint="selective",
        branches=tuple(replace(branch, backward="") for branch in tunables.branches),
    )
    facts = detect()
    train_profile = Profile.single(facts, workload, tunables)
    infer_profile = Profile.single(facts, replace(workload, mode="infer"), infer)
    profile = replace(train_profile, plans=(*train_profile.plans, *infer_profile.plans))
    return module(heads, kv_heads, pattern, profile, tunables.layout)


def module(
    heads: int, kv_heads: int, pattern: Pattern, profile: Any, layout: str = "auto", **more: Any
) -> RingAttention:
    lists: dict[str, Any] = {}
    if not pattern.dense:
        lists["segment_lengths"] = [branch.segment for branch in pattern.branches]
        lists["dilation_rates"] = [branch.rate for branch in pattern.branches]
    given = {"process_group": dist.group.WORLD, "layout": layout} | more
    return RingAttention(heads, HEAD_DIM, kv_heads, causal=True, profile=profile, **lists, **given)


class AllToAll(torch.autograd.Function):
    """Naive Ulysses: one all-to-all per tensor, whole heads, nothing overlapped, cudnn in between."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        spread = [spread_heads(x) for x in (q, k, v)]
        result = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *(x.transpose(1, 2) for x in spread), None, True, 0.0, True, False
        )
        ctx.save_for_backward(*spread, result[0], result[1])
        return collect_heads(result[0].transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        state = torch.zeros(1, dtype=torch.int64, device=q.device)
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            spread_heads(dout).transpose(1, 2), *(x.transpose(1, 2) for x in (q, k, v)), out, lse, state, state,
            None, None, None, q.shape[1], k.shape[1], 0.0, True,
        )  # fmt: skip
        return tuple(collect_heads(grad.transpose(1, 2)) for grad in grads)


def spread_heads(x: Tensor) -> Tensor:
    """Turn (1, S, H, D) of this rank into (1, world * S, H / world, D)."""
    world = dist.get_world_size()
    _, length, heads, head_dim = x.shape
    packed = x.view(length, world, heads // world, head_dim).transpose(0, 1).contiguous()
    received = torch.empty_like(packed)
    dist.all_to_all_single(received, packed)
    return received.view(1, world * length, heads // world, head_dim)


def collect_heads(x: Tensor) -> Tensor:
    world = dist.get_world_size()
    _, total, heads, head_dim = x.shape
    packed = x.contiguous().view(world, total // world, heads, head_dim)
    received = torch.empty_like(packed)
    dist.all_to_all_single(received, packed)
    return received.transpose(0, 1).reshape(1, total // world, world * heads, head_dim)


def ideal_call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    heads = [x.transpose(1, 2) for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return SDPA(*heads, is_causal=True).transpose(1, 2)


def exchange_tunables(
    world: int, kv_heads: int, forward: str, backward: str, exchanges: list[str]
) -> dict[str, Tunables]:
    """Return all-to-all over heads in each way, in one to four groups of heads, what it brings kept and not kept."""
    base = Tunables("bf16", (BranchTunables(forward, backward),), schedule="ulysses", layout="contiguous")
    own = kv_heads // world if kv_heads % world == 0 else 0
    return {
        f"ulysses/{groups} {checkpoint} {exchange}": replace(
            base,
            checkpoint=checkpoint,
            head_groups=groups if groups > 1 else 0,
            exchange="" if exchange == "nccl" else exchange,
        )
        for groups in (1, 2, 4)
        if own and own % groups == 0
        for checkpoint in ("none", "selective")
        for exchange in exchanges
    }


def dense_tunables(world: int, kv_heads: int, forward: str, backward: str) -> dict[str, Tunables]:
    """Return every schedule that these heads allow, with a few numbers of head groups."""
    base = Tunables("bf16", (BranchTunables(forward, backward),), layout="zigzag")
    named = {
        "ring": replace(base, schedule="ring"),
        "all-gather": replace(base, schedule="all-gather"),
        "all-gather/4": replace(base, schedule="all-gather", head_groups=4),
    }
    own = kv_heads // world if kv_heads % world == 0 else 0
    for groups in (1, 2, 4):
        if own and own % groups == 0:
            exchange = replace(base, schedule="ulysses", checkpoint="none", head_groups=groups if groups > 1 else 0)
            named[f"ulysses/{groups}"] = exchange
    if own:
        named["ulysses/1 selective"] = replace(base, schedule="ulysses")
        named["ulysses/1 contiguous"] = replace(base, schedule="ulysses", checkpoint="none", layout="contiguous")
    if world > 2 and world % 2 == 0 and kv_heads % 2 == 0:
        named["ulysses 2 x ring"] = replace(base, schedule="ulysses-ring", ulysses=2, checkpoint="none")
    return named


# --- measurement -------------------------------------------------------------------------------------------------


def once_ms(step: Step, flush: Tensor) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    flush.zero_()
    dist.barrier()
    torch.cuda.synchronize()
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def medians_ms(steps: dict[str, Step], blocks: int, flush: Tensor) -> dict[str, tuple[float, float]]:
    """Return the medians of one step alone and of one in a loop, of the slowest rank."""
    order = random.Random(0)
    for step in steps.values():
        for _ in range(3):
            step()
    longest = torch.tensor(max(once_ms(step, flush) for step in steps.values()), device="cuda")
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    calls = min(20, max(3, round(LOOP_MS / longest.item())))
    alone: dict[str, list[float]] = {name: [] for name in steps}
    looped: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(blocks):
        for name in order.sample(list(steps), len(steps)):
            alone[name].append(once_ms(steps[name], flush))
            dist.barrier()
            looped[name].append(looped_ms(steps[name], calls))
    found = torch.tensor(
        [[statistics.median(times[name]) for name in steps] for times in (alone, looped)], device="cuda"
    )
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return {name: (one, many) for name, one, many in zip(steps, *found.tolist(), strict=True)}


def peak_mib(step: Step) -> float:
    """Return what is allocated beyond what was before, on the rank that needs most."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    peak = torch.tensor((torch.cuda.max_memory_allocated() - before) / 2**20, device="cuda")
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return float(peak.item())


def usable(contenders: dict[str, Contender]) -> dict[str, Contender]:
    """Return those that run on every rank; what fails is told, and the rest goes on."""
    found = {}
    for name, each in contenders.items():
        well = torch.ones(1, device="cuda")
        try:
            each.both()
            each.forward()
        except (RuntimeError, RingAttentionError) as error:
            print(f"  rank {dist.get_rank()}: {name}: {type(error).__name__}: {error}", flush=True)
            well.zero_()
        dist.all_reduce(well, op=dist.ReduceOp.MIN)
        if well.item():
            found[name] = each
    return found


def measure(contenders: dict[str, Contender], work: dict[str, Any], base: str, blocks: int, flush: Tensor) -> list[Any]:
    contenders = usable(contenders)
    forward = medians_ms({name: each.forward for name, each in contenders.items()}, blocks, flush)
    both = medians_ms({name: each.both for name, each in contenders.items()}, blocks, flush)
    rows = []
    for name, each in contenders.items():
        row = {**work, "contender": name}
        for way, times in (("forward", forward), ("both", both)):
            for clock, mine, its in zip(("", "_loop"), times[name], times[base], strict=True):
                row[f"{way}{clock}_ms"] = mine * each.scale
                row[f"{way}{clock}_ratio"] = mine * each.scale / (its * contenders[base].scale)
        row["peak_mib"] = peak_mib(each.both) + each.peer_bytes() / 2**20
        rows.append(row)
        shown = (
            f"{way} {row[f'{way}_ms']:8.2f} ms ({row[f'{way}_ratio']:.3f}x, in a loop {row[f'{way}_loop_ratio']:.3f}x)"
            for way in ("forward", "both")
        )
        say(f"  {name:<40} {'   '.join(shown)}   peak {row['peak_mib']:6.0f} MiB")
    return rows


def dense_rows(arguments: argparse.Namespace, length: int, kv_heads: int, flush: Tensor) -> list[Any]:
    world = dist.get_world_size()
    leaves, dout = inputs_of(length, HEADS, kv_heads)
    group = HEADS // kv_heads
    repeated = [
        x.detach().repeat_interleave(n, 2).requires_grad_() for x, n in zip(leaves, (1, group, group), strict=True)
    ]
    contenders = {"ideal": contender(ideal_call, repeated, dout, world)}
    if kv_heads % world == 0:
        contenders["all-to-all"] = contender(AllToAll.apply, leaves, dout)
    contenders["heuristic"] = contender(module(HEADS, kv_heads, Pattern(), None), leaves, dout)
    if arguments.peers:
        contenders["ring-flash-attn zigzag, FA2"] = contender(zigzag(arguments.peers), leaves, dout)
    if arguments.profile:
        contenders["profile"] = contender(module(HEADS, kv_heads, Pattern(), arguments.profile), leaves, dout)
    for pair in arguments.kernels:
        forward, _, backward = pair.partition("+")
        table = dense_tunables(world, kv_heads, forward, backward or forward)
        if arguments.schedules is not None:
            table = {name: each for name, each in table.items() if name.split("/")[0] in arguments.schedules}
        table |= exchange_tunables(world, kv_heads, forward, backward or forward, arguments.exchanges)
        for name, tunables in table.items():
            try:
                attn = planned(tunables, length, HEADS, kv_heads, Pattern(), world)
            except RingAttentionError as error:
                say(f"  {pair} {name}: {error}")
                continue
            contenders[f"{pair} {name}"] = contender(attn, leaves, dout)
    if arguments.peers and kv_heads == HEADS:
        with context_parallel(DeviceMesh("cuda", list(range(world))), length) as attend:
            contenders["context_parallel, cudnn"] = contender(attend, leaves, dout)
            return _measured(arguments, contenders, length, kv_heads, flush)
    return _measured(arguments, contenders, length, kv_heads, flush)


def _measured(
    arguments: argparse.Namespace, contenders: dict[str, Contender], length: int, kv_heads: int, flush: Tensor
) -> list[Any]:
    world = dist.get_world_size()
    say(f"dense causal, {length} positions a GPU, {HEADS}/{kv_heads} heads x {HEAD_DIM}, bf16, {world} GPUs")
    work = {"pattern": "dense", "local_length": length, "heads": HEADS, "kv_heads": kv_heads, "world": world}
    return measure(contenders, work, "ideal", arguments.blocks, flush)


def longnet_rows(arguments: argparse.Namespace, name: str, flush: Tensor) -> list[Any]:
    """Measure against one GPU on a sequence of the local length: its own share of the work."""
    segments, rates, length = LONGNET[name]
    leaves, dout = inputs_of(length, 16, 16)
    pattern = Pattern.of(segments, rates)
    contenders = {
        "one GPU": contender(module(16, 16, pattern, None, process_group=None), leaves, dout),
        "heuristic": contender(module(16, 16, pattern, None), leaves, dout),
    }
    if arguments.profile:
        contenders["profile"] = contender(module(16, 16, pattern, arguments.profile), leaves, dout)
    say(f"{name}, {length} positions a GPU, 16 heads x {HEAD_DIM}, bf16, {dist.get_world_size()} GPUs")
    work = {
        "pattern": str(pattern),
        "local_length": length,
        "heads": 16,
        "kv_heads": 16,
        "world": dist.get_world_size(),
    }
    return measure(contenders, work, "one GPU", arguments.blocks, flush)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="folder for ring_<world>.json")
    parser.add_argument("--lengths", type=int, nargs="*", default=[8192, 16384, 32768])
    parser.add_argument("--gqa-lengths", type=int, nargs="*", default=[8192], help="with 8 key/value heads")
    parser.add_argument(
        "--kernels", nargs="+", default=["cudnn"], help="forward+backward kernels, as cudnn+flash-attn-4"
    )
    parser.add_argument("--schedules", nargs="*", help="of the table only these, as ring ulysses (or none)")
    parser.add_argument("--exchanges", nargs="*", default=[], choices=["nccl", "symmetric"], help="also all-to-all so")
    parser.add_argument("--peers", metavar="FOLDER", help="also public rings; FOLDER holds the package ring_flash_attn")
    parser.add_argument("--profile", help="also the module with this profile: auto, or a file")
    parser.add_argument("--patterns", action=argparse.BooleanOptionalAction, default=True, help="LongNet's, too")
    parser.add_argument("--high-priority", action=argparse.BooleanOptionalAction, default=True, help="NCCL's stream")
    parser.add_argument("--blocks", type=int, default=11)
    arguments = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        sys.exit("ring.py: this process is no rank; start it with: torchrun --standalone --nproc-per-node N ring.py")
    need_gpus(int(os.environ["LOCAL_RANK"]) + 1)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Messages start while attention kernels hold every processor only if their stream goes first.
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=arguments.high_priority)
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", device_id=device, pg_options=options, timeout=timedelta(seconds=120))
    l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    flush = torch.empty(2 * l2_bytes, dtype=torch.uint8, device="cuda")
    say(json.dumps(machine()))
    rows: list[Any] = []
    jobs: list[Callable[[], list[Any]]] = [
        *(lambda n=n: dense_rows(arguments, n, HEADS, flush) for n in arguments.lengths),
        *(lambda n=n: dense_rows(arguments, n, 8, flush) for n in arguments.gqa_lengths),
        *(lambda name=name: longnet_rows(arguments, name, flush) for name in (LONGNET if arguments.patterns else ())),
    ]
    for job in jobs:
        rows += job()
        torch.cuda.empty_cache()
        if arguments.output and dist.get_rank() == 0:
            path = Path(arguments.output) / f"ring_{dist.get_world_size()}.json"
            path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
