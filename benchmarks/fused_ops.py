"""The fused steps between kernels on one GPU: what they move a second, against a plain copy, and their host time.

    python benchmarks/fused_ops.py [--output FOLDER] [--lengths 65536 262144] [--blocks 16 32 64]

LongNet's segments 2048..32768 and rates 1..16, H16 D128 bf16, the two highest rates copied, windows of 65536: gather
of q, k, v for the copied calls, gather of dout, out and lse for calls of rate > 1, merge of all partial results, sum
of all partial gradients. Bytes are counted once each: every row read, every row written. block=0 is the default.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from common import Clock, Record, median, need_gpus

from ringattn.geometry.calls import Geometry, LayoutKey, PlacedCall, Window, build_geometry
from ringattn.runtime.fused.merge_triton import TritonOps
from ringattn.runtime.merge import GradJob, GradPartial, Partial
from ringattn.runtime.workspace import Lease
from ringattn.workload import Pattern

HEADS, HEAD_DIM = 16, 128
PATTERN = Pattern.of([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])
GATHERS = ("view", "view", "view", "copy", "copy")
WINDOW = 65536
Step = Callable[[], object]


class Work:
    """Inputs and partial results of one length, and the steps over them with their bytes."""

    def __init__(self, length: int, heads: int = HEADS, head_dim: int = HEAD_DIM) -> None:
        window = WINDOW if length > WINDOW else None
        self.geometry: Geometry = build_geometry(
            LayoutKey(PATTERN, GATHERS, window, 1, length, heads, heads, batch_folds=True)
        )
        self.lease = Lease(torch.device("cuda"), None, "shape")
        self.q, self.k, self.v, self.dout = (self._random(1, length, heads, head_dim) for _ in range(4))
        self.lse = torch.randn(1, heads, length, device="cuda")
        self.row_bytes = head_dim * self.q.element_size()
        self.positions = length * heads
        # One window's partial results serve all windows: they are too large for the L2 all the same.
        self.partials = [Partial(placed, *self._rows(placed.call)) for placed in self.geometry.windows[0].calls]
        grads = [[GradPartial(p, self._rows(p.call)[0]) for p, *_ in self.partials] for _ in range(3)]
        self.jobs = [GradJob(parts, target) for parts, target in zip(grads, (self.q, self.k, self.v), strict=True)]
        self.partial_rows = _rows_of([placed for window in self.geometry.windows for placed in window.calls])

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def _rows(self, call) -> tuple[torch.Tensor, torch.Tensor]:
        heads = call.kv_heads
        out = self._random(call.batch * call.segments, call.rows, heads, self.q.shape[3])
        return out, torch.randn(out.shape[0], heads, call.rows, device="cuda")

    def steps(self, ops: TritonOps) -> dict[str, tuple[Step, int]]:
        geometry, lease = self.geometry, self.lease
        calls = [placed for window in geometry.windows for placed in window.calls]
        copied = [placed for placed in calls if placed.call.copied]
        dilated = [placed for placed in calls if placed.call.rate > 1]
        inputs = (self.q, self.k, self.v)
        results = (self.dout, self.q)

        def gather() -> None:
            for placed in copied:
                ops.gather(geometry, placed, inputs, lease)

        def gather_backward() -> None:
            for placed in dilated:
                ops.gather_backward(geometry, placed, results, self.lse, lease)

        def merge() -> None:
            for window in geometry.windows:
                ops.merge(geometry, window, _placed(self.partials, window), self.q, self.lse, lease)

        def add() -> None:
            for window in geometry.windows:
                jobs = [job._replace(partials=_placed(job.partials, window)) for job in self.jobs]
                ops.scatter_sum(geometry, window, jobs, lease)

        row, both_ways = self.row_bytes, 2
        return {
            "gather": (gather, 3 * both_ways * _rows_of(copied) * row),
            "gather_backward": (gather_backward, both_ways * _rows_of(dilated) * (2 * row + 4)),
            "merge": (merge, (self.partial_rows + self.positions) * (row + 4)),
            "sum": (add, 3 * (self.partial_rows + self.positions) * row),
        }


def _rows_of(calls: Sequence[PlacedCall]) -> int:
    return sum(c.call.batch * c.call.segments * c.call.rows * c.call.kv_heads for c in calls)


def _placed(partials: Sequence, window: Window) -> list:
    return [partial._replace(placed=placed) for partial, placed in zip(partials, window.calls, strict=True)]


def measure(record: Record, clock: Clock, length: int, blocks: list[int]) -> None:
    work = Work(length)
    source, target = torch.empty_like(work.q), torch.empty_like(work.q)
    steps: dict[str, Step] = {"copy": lambda: target.copy_(source)}
    moved = {"copy": 2 * source.nbytes}
    for block in blocks:
        chosen = block or None
        ops = TritonOps(merge_block=chosen, sum_block=chosen, gather_block=chosen)
        for name, (step, nbytes) in work.steps(ops).items():
            steps[f"{name} block={block}"] = step
            moved[f"{name} block={block}"] = nbytes
    times = clock.blocks_ms(steps, blocks=7, warmup=2)
    copy_rate = moved["copy"] / median(times["copy"])
    for name in sorted(times):
        ms = median(times[name])
        record.add(
            work=f"S{length} {name}",
            ms=ms,
            gb_per_s=round(moved[name] / ms / 1e6),
            of_copy=moved[name] / ms / copy_rate,
        )


def host_us(step: Step, calls: int = 200) -> float:
    rounds = []
    for _ in range(6):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            step()
        rounds.append((time.perf_counter() - begin) / calls * 1e6)
    return statistics.median(rounds[1:])


def measure_host(record: Record) -> None:
    """Time launches on shapes small enough for the device to keep up."""
    work = Work(32768, head_dim=16)
    steps = work.steps(TritonOps())
    calls = [partial.placed.call for partial in work.partials]
    launches = {"gather": sum(c.copied for c in calls), "gather_backward": sum(c.rate > 1 for c in calls)}
    for name, (step, _) in steps.items():
        step()
        record.add(work=f"host, {len(calls)} calls, {name}", us_per_launch=host_us(step) / launches.get(name, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="folder for fused_ops.json")
    parser.add_argument("--lengths", type=int, nargs="+", default=[65536, 262144], help="multiples of 65536")
    parser.add_argument("--blocks", type=int, nargs="+", default=[16, 32, 64])
    args = parser.parse_args()
    need_gpus()
    torch.manual_seed(0)
    record, clock = Record("fused_ops", args.output), Clock()
    measure_host(record)
    for length in args.lengths:
        measure(record, clock, length, [0, *args.blocks])
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
