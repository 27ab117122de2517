"""Shapes and patterns for the fused steps between kernels, and their check against the steps in plain torch.

``python fused_cases.py [CASE ...]`` checks these of ``SMALL``, or all, under Triton's interpreter, in a process of its
own because the switch is read at import, and prints a JSON object: case, then "" or what went wrong.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from interpreted_triton import interpreted as run_script
from interpreted_triton import patch_once
from torch import Tensor

from ringattn.geometry.calls import Geometry, LayoutKey, PlacedCall, Window, build_geometry
from ringattn.geometry.pattern import nests
from ringattn.runtime.merge import GradJob, GradPartial, Partial, TorchOps, as_view
from ringattn.runtime.workspace import Lease
from ringattn.workload import Branch, HeadOffset, Pattern

if TYPE_CHECKING:
    from ringattn.runtime.fused.merge_triton import TritonOps

# Relative to a float32 result: half a unit in the last place is 2^-9 (bf16), 2^-12 (fp16); sums may cancel.
_ROUNDING = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}


@dataclass(frozen=True)
class FusedCase:
    """``branches`` are (segment, rate, gather). ``layout`` is that of inputs and partial results, see ``laid_out``."""

    name: str
    branches: tuple[tuple[int, int, str], ...]
    length: int
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 8
    window: int | None = None
    rule: HeadOffset = "interleaved"
    folds: bool = True
    layout: str = "plain"
    block: int = 64
    lse: float = 0.0  # is added to every random one
    then: str = ""  # another layout, on the same geometry: nothing is remembered of the first
    walks: bool = False  # one program of merge and sum handles several blocks, as it does on long sequences

    @property
    def geometry(self) -> Geometry:
        pattern = Pattern(tuple(Branch(w, r) for w, r, _ in self.branches), self.rule)
        assert self.window is None or nests(pattern, self.window)
        gathers = tuple(gather for *_, gather in self.branches)
        sizes = (self.batch, self.length, self.heads, self.kv_heads)
        return build_geometry(LayoutKey(pattern, gathers, self.window, *sizes, self.folds))


# Blocks of 64 make one program of the whole length. Segments that are multiples of four blocks are aligned.
SMALL = (
    FusedCase("one branch, odd addresses", ((64, 1, "view"),), 40, batch=2, head_dim=18, layout="odd"),
    FusedCase("aligned", ((16, 1, "view"), (16, 2, "copy")), 32, block=4, walks=True),
    FusedCase(
        "aligned but for the tail",
        ((16, 1, "view"), (16, 2, "copy"), (32, 4, "view")),
        43,
        block=4,
        walks=True,
    ),
    FusedCase("the longer segment ends nowhere", ((16, 1, "view"), (43, 3, "copy")), 42, block=4, walks=True),
    FusedCase("windows", ((16, 1, "view"), (16, 2, "copy")), 37, window=16, block=4, lse=4e5),
    FusedCase("grouped heads, copied", ((24, 1, "view"), (24, 3, "copy")), 40, 1, 4, 2, lse=-4e3, then="sliced"),
    FusedCase("grouped heads, in place", ((24, 1, "view"), (24, 2, "view")), 40, 1, 4, 2, layout="heads first"),
    FusedCase("one group, slices of wider rows", ((20, 4, "copy"), (9, 3, "view")), 50, 1, 3, 1, layout="sliced"),
    FusedCase("columns of heads", ((32, 2, "copy"), (20, 2, "view")), 50, 1, 4, 4),
    FusedCase("rows of heads, the last one short", ((40, 4, "copy"), (30, 4, "view")), 61, 1, 5, 5),
    FusedCase("more heads than offsets and fewer", ((32, 8, "copy"), (20, 3, "copy")), 59, 1, 4, 4, layout="sliced"),
    FusedCase("the blocked rule", ((30, 3, "copy"), (24, 2, "view")), 47, 1, 4, 4, head_dim=24, rule="blocked"),
    FusedCase("rates longer than segments", ((3, 5, "copy"), (2, 9, "view")), 8, 1, 4, 4, layout="heads first"),
    FusedCase("split by batch", ((16, 2, "view"), (8, 1, "view")), 40, 2, folds=False),
    FusedCase("split by segment", ((24, 2, "view"), (25, 3, "copy")), 53, 2, folds=False),
    FusedCase("nothing selected at most positions", ((64, 8, "copy"),), 64, 1, 2, 2, head_dim=20),
    FusedCase("several columns of rows", ((16, 1, "view"), (16, 2, "copy")), 40, 1, 1, 1, head_dim=96),
)

_GIGAPATH = ((1024, 1, "view"), (5792, 2, "copy"), (32768, 4, "copy"), (185363, 8, "copy"), (1048576, 16, "copy"))
_LONGNET = ((2048, 1, "view"), (4096, 2, "view"), (8192, 4, "view"), (16384, 8, "copy"), (32768, 16, "copy"))

# None is the block that the step takes by itself.
LARGE = (
    FusedCase("LongNet", _LONGNET, 65536, 1, 16, 16, 128, block=0),
    FusedCase("LongNet, ragged, grouped", _LONGNET, 50001, 1, 16, 4, 128, block=0),
    FusedCase("LongNet, windows", _LONGNET, 100000, 1, 8, 8, 64, window=32768, block=0),
    FusedCase("GigaPath", _GIGAPATH, 10001, 1, 16, 16, 48, block=0),
    FusedCase("three branches, heads first", ((1024, 1, "view"), (2048, 2, "copy")), 5000, 2, 8, 8, 64, folds=False,
              layout="heads first", block=0),
    FusedCase("head dim 96", ((1024, 1, "view"), (1000, 3, "copy")), 5000, 2, 6, 3, 96, block=0),
    FusedCase("head dim 192", ((512, 1, "view"), (1024, 4, "view")), 3000, 1, 8, 8, 192, block=0),
    FusedCase("head dim 256", ((512, 1, "view"), (1024, 4, "copy")), 3000, 1, 8, 8, 256, block=0),
    FusedCase("head dim 40", ((512, 1, "view"), (768, 5, "copy")), 3000, 1, 7, 7, 40, block=0),
    FusedCase("small blocks", ((512, 1, "view"), (1024, 2, "copy")), 3000, 1, 4, 4, 128, block=16),
)  # fmt: skip


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values, the last stride 1: "plain", "heads first", "sliced" (wider rows), "odd" (2 or 4 bytes off)."""
    if layout == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sliced":
        wider = x.new_empty(*x.shape[:-1], x.shape[-1] + 8)[..., 4 : x.shape[-1] + 4]
        return wider.copy_(x)
    if layout == "odd":
        return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    assert layout == "plain"
    return x.contiguous()


def _lse_laid_out(lse_NHM: Tensor, layout: str) -> Tensor:
    if layout == "heads first":  # as the efficient kernel pads it
        padded = lse_NHM.new_empty(*lse_NHM.shape[:2], -(-lse_NHM.shape[2] // 32) * 32)[:, :, : lse_NHM.shape[2]]
        return padded.copy_(lse_NHM)
    if layout == "sliced":
        return lse_NHM.transpose(1, 2).contiguous().transpose(1, 2)
    return laid_out(lse_NHM, layout)


class FusedCheck:
    """Runs one case through both implementations on one device; raises AssertionError where they differ."""

    def __init__(self, case: FusedCase, ops: TritonOps, device: str, dtype: torch.dtype) -> None:
        self.case, self.ops, self.dtype = case, ops, dtype
        self.geometry = case.geometry
        self.lease = Lease(torch.device(device), None, "shape")
        self._generator = torch.Generator(device).manual_seed(0)
        self._device = device
        self._group = case.heads // case.kv_heads
        # Under the interpreter, which takes 60 ms for a program of a sum, v stays out, which is as k. So does k, where
        # it is as q, but for programs of several blocks.
        self._key_tensors = 2 if device == "cuda" else int(self._group > 1 or case.walks)

    def random(self, *shape: int, layout: str | None = None) -> Tensor:
        x = torch.randn(shape, generator=self._generator, device=self._device).to(self.dtype)
        return laid_out(x, self.case.layout if layout is None else layout)

    def run(self) -> None:
        self._steps()
        if self.case.then:
            self.case = replace(self.case, layout=self.case.then)
            self._steps()

    def _steps(self) -> None:
        self.gathers()
        self.merges()
        self.sums(in_place=False)
        if any(rate == 1 for _, rate, _ in self.case.branches):
            self.sums(in_place=True)

    # --- gather ---

    def gathers(self) -> None:
        case = self.case
        q = self.random(case.batch, case.length, case.heads, case.head_dim)
        keys = [self.random(case.batch, case.length, case.kv_heads, case.head_dim) for _ in range(self._key_tensors)]
        dout = self.random(case.head_dim, layout="plain").expand(q.shape)  # of a sum: every stride but one is 0
        lse = torch.randn(case.batch, case.heads, case.length, generator=self._generator, device=self._device)
        inputs = (q, *keys)
        placed_calls = [placed for window in self.geometry.windows for placed in window.calls]
        first = {placed.branch: placed for placed in reversed(placed_calls)}
        last = {placed.branch: placed for placed in placed_calls}
        for placed in first.values():
            self._gather(placed, inputs if placed.call.copied else inputs[:1])
            self._gather_backward(placed, (), lse)
        for placed in last.values():
            results = (dout, q)
            self._gather_backward(placed, (*results, *inputs) if placed.call.copied else results, lse)

    def _gather(self, placed: PlacedCall, sources: Sequence[Tensor]) -> None:
        made = self.ops.gather(self.geometry, placed, sources, self.lease)
        for rows, expected in zip(made, TorchOps().gather(self.geometry, placed, sources, self.lease), strict=True):
            assert rows.is_contiguous()
            assert torch.equal(rows, expected), "gathered rows differ"

    def _gather_backward(self, placed: PlacedCall, sources: Sequence[Tensor], lse: Tensor) -> None:
        made = self.ops.gather_backward(self.geometry, placed, sources, lse, self.lease)
        expected = TorchOps().gather_backward(self.geometry, placed, sources, lse, self.lease)
        assert made[1].is_contiguous()
        assert torch.equal(made[1], expected[1]), "gathered lse differs"
        for rows, wanted in zip(made[0], expected[0], strict=True):
            assert rows.is_contiguous()
            assert torch.equal(rows, wanted), "gathered rows differ"

    # --- merge ---

    def merges(self) -> None:
        case = self.case
        shape = (case.batch, case.length, case.heads, case.head_dim)
        out = torch.full(shape, torch.nan, dtype=self.dtype, device=self._device)
        lse = torch.full((case.batch, case.heads, case.length), torch.nan, device=self._device)
        wide_out, wide_lse = out.clone().float(), lse.clone()
        for window in self.geometry.windows:
            partials = [self.partial(placed) for placed in window.calls]
            wide = [Partial(placed, x.float(), part_lse) for placed, x, part_lse in partials]
            self.ops.merge(self.geometry, window, partials, out, lse, self.lease)
            TorchOps().merge(self.geometry, window, wide, wide_out, wide_lse, self.lease)
        torch.testing.assert_close(lse, wide_lse, rtol=1e-6, atol=2e-6)
        assert torch.equal(lse.isinf(), wide_lse.isinf())
        self._assert_rounded(out, wide_out)
        assert (out.permute(0, 2, 1, 3)[lse.isinf()] == 0).all(), "a position that nothing selects is 0"

    def partial(self, placed: PlacedCall) -> Partial:
        call = placed.call
        blocks, heads = call.batch * call.segments, call.kv_heads * self._group
        lse = 3 * torch.randn(blocks, heads, call.rows, generator=self._generator, device=self._device) + self.case.lse
        out = self.random(blocks, call.rows, heads, self.case.head_dim)
        empty = torch.rand(lse.shape, generator=self._generator, device=self._device) < 0.2  # every logit was -inf
        lse, out = lse.masked_fill(empty, -torch.inf), out.masked_fill_(empty.transpose(1, 2)[..., None], 0.0)
        return Partial(placed, out, _lse_laid_out(lse, self.case.layout))

    # --- sum ---

    def sums(self, in_place: bool) -> None:
        case, group = self.case, self._group
        q_shape = (case.batch, case.length, case.heads, case.head_dim)
        kv_shape = (case.batch, case.length, case.kv_heads, case.head_dim)
        shapes = (q_shape, *[kv_shape] * self._key_tensors)
        targets = [torch.full(shape, torch.nan, dtype=self.dtype, device=self._device) for shape in shapes]
        if in_place:  # one gradient at a time, as for inputs that need none
            targets = targets[: 3 if self._device == "cuda" else 1]
        wide = [x.clone().float() for x in targets]
        for window in self.geometry.windows:
            jobs, wide_jobs = [], []
            for target, wide_target, heads in zip(targets, wide, (group, 1, 1), strict=False):
                parts = [self.grad(window, placed, target, heads, in_place) for placed in window.calls]
                wide_parts = [GradPartial(placed, x.float()) for placed, x in parts]
                jobs.append(GradJob(parts, target))
                wide_jobs.append(GradJob(wide_parts, wide_target))
            TorchOps().scatter_sum(self.geometry, window, wide_jobs, self.lease)
            if in_place:
                for job in jobs:
                    self.ops.scatter_sum(self.geometry, window, [job], self.lease)
            else:
                self.ops.scatter_sum(self.geometry, window, jobs, self.lease)
        for target, wide_target in zip(targets, wide, strict=True):
            self._assert_rounded(target, wide_target)

    def grad(
        self, window: Window, placed: PlacedCall, target: Tensor, heads: int, in_place: bool = False
    ) -> GradPartial:
        call = placed.call
        grad = self.random(call.batch * call.segments, call.rows, call.kv_heads * heads, self.case.head_dim)
        first_of_rate_1 = next((c.branch for c in window.calls if c.call.rate == 1), None)
        if in_place and placed.branch == first_of_rate_1:  # as by a kernel that writes into the gradient itself
            (view,) = self.geometry.views(placed, heads, target.stride(), target.shape[-1], folded=True)
            grad = as_view(target, view).copy_(grad)
        return GradPartial(placed, grad)

    def _assert_rounded(self, x: Tensor, wide: Tensor) -> None:
        rounding = _ROUNDING[self.dtype]
        torch.testing.assert_close(x.float(), wide, rtol=rounding, atol=1e-5 if self.dtype.itemsize == 2 else 2e-6)


def interpreted() -> dict[str, str]:
    """What the small cases gave under the interpreter, in another process."""
    found: dict[str, str] = json.loads(run_script(__file__))
    return found


def _main() -> None:
    patch_once()
    from ringattn.runtime.fused import merge_triton

    enough = merge_triton._ENOUGH_PROGRAMS
    found = {}
    for number, case in enumerate(SMALL):
        merge_triton._ENOUGH_PROGRAMS = 1 if case.walks else enough
        ops = merge_triton.TritonOps(merge_block=case.block, sum_block=case.block, gather_block=case.block)
        try:
            FusedCheck(case, ops, "cpu", (torch.float32, torch.float16)[number % 2]).run()
            found[case.name] = ""
        except Exception as error:  # noqa: BLE001 - reported to the test, whatever it is
            found[case.name] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
