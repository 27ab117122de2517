"""Makes calls with queries at other positions than the keys: checks, the plan, autograd.

Legend: B batch, Sq queries, Sk keys, H query heads, Hkv key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from ringattn.arguments import integer
from ringattn.autograd.function import Runner, runner_of, without_autocast
from ringattn.autograd.out_of_memory import note_plan
from ringattn.autograd.transforms import transforms_active
from ringattn.dtypes import DTYPE_NAMES
from ringattn.errors import InputError
from ringattn.hardware.kernel_faults import Combination
from ringattn.planning.plan import Plan
from ringattn.planning.table import ModuleShape, PlanTable, Row
from ringattn.planning.unmeasured_workloads import Arguments, Result
from ringattn.runtime.inputs import check_dtypes, check_inputs, check_length
from ringattn.workload import Mode

from .blocks import Extent
from .kernel_choice import BlockKernels, rounded
from .one_block import OneBlock
from .program import CrossProgram

if TYPE_CHECKING:
    from ringattn.distributed.context import RingContext

Align = Literal["end", "start"]
T = TypeVar("T")
_MOST_PROGRAMS = 256
FEW_QUERIES = 16  # beyond, kernels for whole sequences have the work that they are made for


class CrossModule(Protocol):
    """Module as calls with queries of other positions need it."""

    shape: ModuleShape
    plan: PlanTable
    scale: float
    device: torch.device
    cross_programs: dict[Any, Any]
    _ring: RingContext | None

    def validate_kernels(self, asked: Iterable[Combination], /) -> bool: ...

    def call_mode(self, q: Tensor, k: Tensor, v: Tensor, /) -> tuple[bool, torch.dtype | None]: ...

    def casts(self, q: Tensor, autocast: torch.dtype | None, /) -> bool: ...

    def served(self, row: Row, /) -> Plan: ...

    def reporting(self) -> AbstractContextManager[None]: ...

    def counted(self, run: Callable[Arguments, Result], plan: Plan, /) -> Callable[Arguments, Result]: ...


def check_align(align: object) -> None:
    if align not in ("end", "start"):
        raise InputError(f"align is {align!r}; use 'end', where the last query is at the last key, or 'start'")


def cross(
    module: CrossModule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    align: Align,
    window: int | None = None,
    with_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return out (B, Sq, H, D) and lse (B, H, Sq) of q over k and v (B, Sk, Hkv, D); see ``RingAttention.cross``.

    lse may be None where it is not asked for.
    """
    if module.shape.world > 1:
        with module.reporting():  # others may be in a call that waits for this rank
            raise InputError(
                "cross attention over several ranks is not supported; use a KVCache, whose keys the ranks hold "
                "together, or process_group=None"
            )
    check_align(align)
    if window is not None and not (module.shape.causal and module.shape.pattern.dense):
        raise InputError(f"window is {window!r}, and a sliding window is of causal dense attention")
    window = window_of(module.shape, None if window is None else integer("window", window))
    if torch.compiler.is_exporting() or transforms_active():
        raise InputError("torch.export and torch.func take no queries at other positions than the keys")
    if torch.compiler.is_compiling():
        return torch.compiler.disable(_cross)(module, q, k, v, align, window, with_lse)  # type: ignore[no-untyped-call, no-any-return]
    return _cross(module, q, k, v, align, window, with_lse)


def window_of(shape: ModuleShape, window: int | None) -> int | None:
    """Return the window of a call: the module's, if it has one."""
    if shape.window and window not in (None, shape.window):
        raise InputError(f"window is {window} and the module's {shape.window}; leave it out, or give the module none")
    return shape.window or window


def _cross(
    module: CrossModule, q: Tensor, k: Tensor, v: Tensor, align: Align, window: int | None, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    train, autocast = module.call_mode(q, k, v)
    looks = None if train or autocast is not None else looks_of(module, q, k, v, align, window, with_lse)
    run: Runner | None = module.cross_programs.get(looks)
    if run is not None:
        check_length(k.shape[1], module.shape.max_seq_len)
        return run(q, k, v)
    narrow = autocast if module.casts(q, autocast) else None
    if narrow is not None:
        check_dtypes(q, k, v)
    check_inputs(q, k, v, module.shape, module.device, cross=True)
    queries, keys = q.shape[1], k.shape[1]
    extent = Extent(keys - queries if align == "end" else 0, queries, 0, keys, window)
    if looks is not None:
        run = remember(module, looks, run_over_all(module, q, k, v, extent, with_lse))
        return run(q, k, v)
    run = attend_at(module, q, k, v, extent, train, narrow)
    if autocast is not None:
        run = without_autocast(run, module.device.type, narrow)
    return run(q, k, v)


def looks_of(
    module: CrossModule, q: Tensor, k: Tensor, v: Tensor, align: Align, window: int | None, with_lse: bool
) -> tuple[Any, ...] | None:
    """Return what calls have in common that one function runs; None where queries do not see every key.

    A cache has more keys at every step, in tensors with other strides: of these the next lengths up to a rounded one
    are alike.
    """
    queries, keys, shape = q.shape[1], k.shape[1], module.shape
    every = not shape.causal or (queries == 1 and align == "end" and (window is None or window >= keys))
    if not every or not shape.pattern.dense or keys == 0 or k.shape != v.shape:
        return None
    of_keys = (k.shape[0], k.shape[2:], k.stride(3), v.stride(3), k.dtype, v.dtype, k.device, v.device)
    return ("whole", with_lse, q.shape, q.stride(), q.dtype, q.device, of_keys, rounded(keys))


def remember(module: CrossModule, key: tuple[Any, ...], made: T) -> T:
    """Return what was made, kept for the next call."""
    if len(module.cross_programs) >= _MOST_PROGRAMS:
        module.cross_programs.clear()
    module.cross_programs[key] = made
    return made


def attend_at(
    module: CrossModule, q: Tensor, k: Tensor, v: Tensor, extent: Extent, train: bool, narrow: torch.dtype | None = None
) -> Runner:
    """Return the function that attends with tensors like these at these positions, computing from dtype ``narrow``."""
    program, plan = _program_at(module, q, extent, train, narrow)
    return module.counted(runner_of(program, q, k, v, train, with_lse=True), plan)


def run_over_all(module: CrossModule, q: Tensor, k: Tensor, v: Tensor, extent: Extent, with_lse: bool) -> Runner:
    """Return the function for calls that look alike, without gradients, in which every query sees every key."""
    blocks, plan = _program_at(module, q, extent, False, None)
    program = OneBlock(blocks, module.scale, q, k.shape[2])
    return module.counted(runner_of(program, q, k, v, False, with_lse), plan)


def run_steps(module: CrossModule, query: Tensor, key: Tensor, value: Tensor) -> Runner | None:
    """Return the function for calls that look like this one of a query (B, H, 1, D), which takes tensors of that order.

    key and value are (B, Hkv, Sk, D), and a call gives out (B, 1, H, D) and None. None where ``cross`` has to see every
    call: the query may not see every key, or keys may come to be more than ``max_seq_len``.
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    keys, most = k.shape[1], module.shape.max_seq_len
    if module.shape.world > 1 or looks_of(module, q, k, v, "end", None, False) is None:
        return None
    if most is not None and rounded(keys) > most:
        return None
    check_inputs(q, k, v, module.shape, module.device, cross=True)
    blocks, plan = _program_at(module, q, Extent(keys - 1, 1, 0, keys, None), False, None)
    program = OneBlock(blocks, module.scale, q, k.shape[2])
    run = runner_of(program, q, k, v, False, False)
    entry = program.heads_first(q, k, v) if q.dtype is program.dtype else None

    def step(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, None]:
        if entry is None:
            return run(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))[0], None
        try:
            return entry(query, key, value), None
        except Exception as error:
            note_plan(error, program, query.transpose(1, 2))
            raise

    return module.counted(step, plan)


def _program_at(
    module: CrossModule, q: Tensor, extent: Extent, train: bool, narrow: torch.dtype | None
) -> tuple[CrossProgram, Plan]:
    length = max(extent.queries, extent.keys, 1)
    mode: Mode = "train" if train else "decode" if extent.queries <= FEW_QUERIES else "infer"
    program, plan = program_of(module, q.shape[0], length, DTYPE_NAMES[narrow or q.dtype], mode)
    return program.at(extent), plan


def program_of(module: CrossModule, batch: int, length: int, dtype: str, mode: Mode) -> tuple[CrossProgram, Plan]:
    """Return the plan for so many positions, all of them on this rank, after its program; "decode": for a few queries.

    Plans with equal tunables share a program.
    """
    key = ("plan", batch, rounded(length), dtype, mode)
    found: tuple[CrossProgram, Plan] | None = module.cross_programs.get(key)
    if found is None:
        if mode == "decode":
            row = module.plan.decode_at(rounded(length), dtype, batch)
        else:
            row = module.plan.local_at(rounded(length), dtype, mode == "train", batch)
        plan = module.served(row)
        found = remember(module, key, (program_for(module, plan), plan))
    return found


def program_for(module: CrossModule, plan: Plan) -> CrossProgram:
    """Return the program of a plan."""
    plan, batch = plain_steps(plan), plan.workload.batch
    key = (plan.tunables, plan.workload.mode, batch)
    program: CrossProgram | None = module.cross_programs.get(key)
    if program is None:
        kernels = BlockKernels(plan, module.plan, module.scale, module.validate_kernels)
        program = remember(module, key, CrossProgram(plan, module.scale, kernels))
    return program


def plain_steps(plan: Plan) -> Plan:
    """Return the plan without what belongs to its own steps between kernels, of which there are none here."""
    checkpoint = "selective" if plan.tunables.checkpoint == "none" else plan.tunables.checkpoint
    kernels = plan.tunables.kernels
    params = tuple(pair for pair in plan.tunables.params if pair[0].rpartition(".")[0] in kernels)
    tunables = replace(
        plan.tunables, checkpoint=checkpoint, window_tokens=None, pool_threshold_mib=None, pool_strategy="shape",
        compile=False, launch="eager", params=params,
    )  # fmt: skip
    return replace(plan, tunables=tunables)
