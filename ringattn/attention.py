"""Defines ``RingAttention``. Plans are made at init and picked when a shape is new; ``forward`` looks up and runs.

Legend: B batch, S sequence, H query heads, Hkv key/value heads, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ringattn.autograd.function import Runner, outside_graphs, runner_of, without_autocast
from ringattn.autograd.transforms import attend_traced, transforms_active
from ringattn.decoding.methods import DecodingMethods
from ringattn.geometry.layout import resolve_layout
from ringattn.hardware.kernel_faults import Combination
from ringattn.maps.module import AttentionMaps
from ringattn.planning.module_setup import (
    ModuleSetup,
    check_module,
    check_scores,
    device_of,
    group_size,
    set_up,
    wishes_of,
)
from ringattn.planning.plan import Conditions
from ringattn.planning.preference import Launch, Preference, check_preference
from ringattn.planning.self_check import asked_of_kernels, faults_among
from ringattn.planning.table import ModuleShape, PlanTable, Row, build_table
from ringattn.planning.unmeasured_workloads import record_path
from ringattn.profile.schema import Profile
from ringattn.runtime.dropout_program import check_dropping, dropout_refusal
from ringattn.runtime.inputs import check_dtypes, check_inputs, check_total_length, check_types
from ringattn.runtime.packed.documents import TENSORS_ALONE, Extent, extent_of, given_of
from ringattn.runtime.packed.documents_program import load_program
from ringattn.runtime.program import Program
from ringattn.runtime.ranges import HasRanges
from ringattn.runtime.sinks import check_sinks, with_sinks

from .arguments import integer
from .autograd import torch_compile as compiled
from .dtypes import DTYPE_NAMES
from .errors import InputError
from .planned_module import PlannedModule
from .sharded_module import ShardedModule, SomeDocuments
from .workload import HeadOffset, Pattern, describe, score_options

if TYPE_CHECKING:
    from ringattn.distributed.context import RingContext
    from ringattn.distributed.program import RingProgram


class RingAttention(DecodingMethods, ShardedModule, AttentionMaps, PlannedModule, HasRanges):
    """Exact dense or dilated attention over one sequence, run as this machine's hardware profile says.

    q is (B, S, H, D), k and v are (B, S, Hkv, D); out is like q, in its dtype. A pattern of branches
    (segment w, rate r) selects, per head, every r-th position of every segment; branches are merged by their
    log-sum-exp, exactly (LongNet, arXiv:2307.02486). No pattern is dense attention.

    Args:
        num_heads: H.
        head_dim: D.
        num_kv_heads: Hkv, a divisor of H; None is H.
        segment_lengths: w of each branch; None, as for dilation_rates, is dense.
        dilation_rates: r of each branch, as many as segment_lengths.
        causal: a position attends to itself and earlier ones only.
        scale: factor on the logits, > 0; None is 1 / sqrt(D).
        dropout: probability, < 1, that a weight is dropped in training mode; the others are divided by 1 - p. For dense
            attention on one device without lse, where a kernel does it in one block; refused elsewhere. Steps over a
            cache take no gradient and drop nothing.
        head_offset: first selected position of key/value head h: ``"interleaved"`` h % r, ``"blocked"``
            h // ceil(Hkv / r).
        profile: ``"auto"`` finds this machine's, a path or Profile names one (and raises where it cannot run), None is
            the built-in heuristic alone.
        backend: a kernel name, or (forward name, backward name). Beats the profile; raises where ineligible.
        dtype: None is the input dtype, or a wider one that the heuristic knows to be better; ``"auto"`` the fastest
            that the profile measured within its error bound; or a torch.dtype, its name (``"bf16"``), or ``"tf32"``.
        checkpoint: ``"none"``, ``"selective"``, ``"full"`` or ``"offload"``; None as the profile says. Raises where no
            plan for training could follow it (offload on a CPU, none without a branch that gathers).
        max_seq_len: longer sequences raise InputError; None is no limit.
        device: where it will run; None is the current CUDA device, else the CPU. Tensors elsewhere raise.
        process_group: None: this rank holds the whole sequence, also where torch.distributed is initialised. A
            ProcessGroup or one-dimensional DeviceMesh: its ranks hold it together, S being what is local. Every rank
            builds the module, in the same order among modules of the group.
        layout: which positions a rank holds: ``"contiguous"``, ``"zigzag"`` (chunks i and 2 * world - 1 - i, balanced
            under a causal mask), or ``"auto"``: that of the profile's plans for so many ranks; without any, zigzag for
            causal dense attention in a ring, else contiguous. See ``shard``, ``unshard`` and ``positions``.
        prefer: of the plans that the profile holds for a length the fastest (``"time"``), the leanest (``"memory"``)
            or ``"balanced"``, where half the memory is worth a factor sqrt(2) in time; None: the one its probe chose.
        window: a position attends to no more than so many positions, those that end with its own (causal dense
            attention); None is no limit. Over several ranks only keys that are seen travel.
        softcap: logits s become softcap * tanh(s / softcap); None leaves them.
        head_dim_v: head dimension of v and out (dense attention on one rank); None is head_dim.
        launch: ``"eager"`` takes the plan whose call is over first, host and device; ``"captured"`` the one that needs
            the device the shortest, for calls in a CUDA graph or a compiled model, which hide the host. On a CPU both
            are one.

    Raises:
        InputError: an argument that makes no sense.
        ProfileError: a profile that cannot be read.
        PlanError: nothing that was asked for can run here, with every candidate's reasons.
        DeviceError: no such device.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        causal: bool = False,
        scale: float | None = None,
        dropout: float = 0.0,
        head_offset: HeadOffset = "interleaved",
        profile: Literal["auto"] | str | Path | Profile | None = "auto",
        backend: str | tuple[str, str] | None = None,
        dtype: torch.dtype | str | None = None,
        checkpoint: str | None = None,
        max_seq_len: int | None = None,
        device: torch.device | str | int | None = None,
        process_group: Any = None,
        layout: str = "auto",
        prefer: Preference | None = None,
        launch: Launch = "eager",
        window: int | None = None,
        softcap: float | None = None,
        head_dim_v: int | None = None,
    ) -> None:
        super().__init__()
        world = group_size(process_group)
        self._ring: RingContext | None = None
        if world > 1:
            from ringattn.distributed.context import RingContext  # torch.distributed: only where it is used

            self._ring = RingContext(process_group, device_of(device))
        try:
            check_module(causal, scale, dropout, process_group)
            num_heads, head_dim = integer("num_heads", num_heads), integer("head_dim", head_dim)
            num_kv_heads = num_heads if num_kv_heads is None else integer("num_kv_heads", num_kv_heads)
            max_seq_len = None if max_seq_len is None else integer("max_seq_len", max_seq_len)
            if num_heads % num_kv_heads:
                raise InputError(f"num_heads is {num_heads}, not a multiple of num_kv_heads, {num_kv_heads}")
            check_preference(prefer, launch)
            pattern = Pattern.of(segment_lengths, dilation_rates, head_offset)
            scores = check_scores(causal, pattern, window, softcap, head_dim, head_dim_v, world)
            self.layout = resolve_layout(layout, pattern, causal)  # refuses before a profile is read
            sizes = num_heads, num_kv_heads, head_dim
            self.shape = shape = ModuleShape(*sizes, causal, pattern, max_seq_len, world, *scores)
            self.scale = 1.0 / math.sqrt(head_dim) if scale is None else float(scale)
            deterministic = torch.are_deterministic_algorithms_enabled()
            layout_with = partial(shape.layout, layout)

            def resolve() -> tuple[ModuleSetup, PlanTable]:
                setup, of_ranks = set_up(profile, device, shape), ("", "")
                if self._ring is not None:
                    of_ranks = layout_with(setup.entries, setup.facts), self._ring.watchdog.hosts_reason()
                table = build_table(
                    shape,
                    setup.entries,
                    setup.policy,
                    setup.facts,
                    conditions=Conditions(deterministic, *of_ranks),
                    wishes=wishes_of(backend, dtype, checkpoint),
                    auto_dtype=dtype == "auto",
                    prefer=prefer,
                    launch=launch,
                    dropout=float(dropout),
                    strict=setup.named,
                    place_of=setup.place_of,
                )
                return setup, table

            if self._ring is None:
                self._setup, self.plan = resolve()
            else:
                asked = {"scale": self.scale, "layout": layout, "prefer": prefer, "dropout": float(dropout)}
                asked |= {"backend": backend, "dtype": dtype, "checkpoint": checkpoint, "launch": launch}
                asked |= {"use_deterministic_algorithms": deterministic}
                self._setup, self.plan = self._ring.plan_together(resolve, layout_with, shape, asked)
                self.layout = self._ring.layout
        except Exception as error:
            if self._ring is not None:
                self._ring.not_built(error)
            raise
        self.dropout = float(dropout)
        self._validated: set[Combination] = set()
        self.validates = True  # False where the caller compares each plan with float64 itself, as a probe does
        self.device, self._device_type = self._setup.device, self._setup.device.type
        self._runners: dict[Any, Runner] = {}
        self.traced: dict[Any, Program | RingProgram] = {}
        self._programs: dict[Any, Program | RingProgram] = {}
        self.cross_programs: dict[Any, Any] = {}
        self.digest, self.configuration = compiled.register(self)
        self._logs = self._ring is None or self._ring.comm.rank == 0  # ranks of a group run one plan
        self._record_path = record_path(profile, self.plan.wishes) if self._logs else ""
        if self._logs:
            self._setup.announce(self.dropout)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_lse: bool = False,
        total_length: int | None = None,
        cu_seqlens: SomeDocuments = None,
        lengths: SomeDocuments = None,
        sinks: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend over q (B, S, H, D) with k and v (B, S, Hkv, D), any strides.

        Over several ranks S is what this rank holds, equal on all of them; where they differ, ``total_length`` is the
        length of the whole sequence, of which each rank holds what ``positions`` says.

        ``cu_seqlens`` (N + 1,) packs N documents into one row (B = 1): document n is positions cu_seqlens[n] to
        cu_seqlens[n + 1], the first begins at 0. ``lengths`` (B,) is the number of positions that each row has. Each
        document, or row, is a sequence of its own, from whose start segments count; what lies beyond is padding: never
        attended, 0 in out, -inf in lse, without gradient. Integers in a list or a tensor, whose values are read once
        while it lives and is not written to (from a device, by waiting for it), or ``Documents``.

        ``sinks`` (H,) are one more logit of every query that sees a key, of a key whose value is 0: once in the
        denominator of the softmax, whatever branches and ranks there are, and so in lse. Over several ranks each gives
        the same, and their gradient is that of this rank's queries, to be summed over ranks as a weight's is.

        Returns out (B, S, H, D) in q's dtype, D being that of v; with ``return_lse`` also lse (B, H, S), natural log,
        float32 (float64 for float64), -inf where nothing is selected or every logit is -inf. A loss may use it, for a
        second backward; what is -inf has no gradient. Over several ranks that raises RingAttentionError: use
        lse.detach().
        """
        if self._ring is not None:
            out, lse = outside_graphs(self._over_ranks, q, k, v, cu_seqlens, lengths, total_length, return_lse, sinks)
            return (out, lse) if return_lse else out
        if sinks is not None:
            check_sinks(sinks, self.shape.heads, self.device)
        train, autocast = self.call_mode(q, k, v, sinks, drops=True)
        if total_length is not None:
            check_total_length(total_length, q.shape[1])
        if self.dropout and self.training:
            check_dropping(self.dropout, return_lse, cu_seqlens, lengths)
            arguments = q, k, v, True, autocast, TENSORS_ALONE, False, sinks, self.dropout
            out, lse = outside_graphs(self._eager, *arguments)
        elif torch.compiler.is_compiling() or transforms_active():
            narrow = autocast if self.casts(q, autocast) else None
            out, lse = attend_traced(self, q, k, v, train, narrow, given_of(cu_seqlens, lengths))
            if sinks is not None:
                out, lse = with_sinks(out, lse, sinks)
        else:
            extent = extent_of(total_length, cu_seqlens, lengths)
            out, lse = self._eager(q, k, v, train, autocast, extent, return_lse, sinks)
        return (out, lse) if return_lse else out

    def __getstate__(self) -> dict[str, Any]:
        """Leave loaded kernels out of copies and pickles, and let compiled graphs tell them apart."""
        emptied: dict[str, Any] = {name: {} for name in ("_runners", "traced", "_programs", "cross_programs")}
        return {**self.__dict__, **emptied, "digest": "", "configuration": ""}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.digest, self.configuration = compiled.register(self)

    def extra_repr(self) -> str:
        s = self.shape
        kv = f", kv_heads={s.kv_heads}" if s.kv_heads != s.heads else ""
        size = f"{s.head_dim}" + (f"/{s.head_dim_v}" if s.head_dim_v else "")
        scores = score_options(s).replace(" ", ", ")
        return f"heads={s.heads}{kv}, head_dim={size}, {s.pattern}, causal={s.causal}{scores}, device={self.device}"

    def program_for(
        self, q: Tensor, k: Tensor, v: Tensor, train: bool, extent: Extent = TENSORS_ALONE, dropout: float = 0.0
    ) -> Program | RingProgram:
        """Return the program for these tensors, after every check of them."""
        packed = extent.documents is not None
        batch, length = check_inputs(q, k, v, self.shape, self.device, packed=packed)
        row = self._validated_row(batch, length, DTYPE_NAMES[q.dtype], train, extent, dropout)
        plan = self.served(row)
        ring = None if plan.tunables.is_local else self._ring
        # A program over several ranks is made for one shape, but for documents.
        one_shape = ring is not None and not packed
        key = (plan.tunables, plan.workload if one_shape else (plan.workload.mode, packed, dropout))
        program = self._programs.get(key)
        if program is None:
            load = load_program if ring is None else ring.program
            program = load(plan, self.scale, ranges=self.names_ranges)
            self._programs[key] = program
        program.table = self.plan
        return self._of_documents(program, batch, length, extent) if packed else program

    def _row(self, batch: int, length: int, dtype: str, train: bool, extent: Extent, dropout: float = 0.0) -> Row:
        packed_tokens = 0
        if self._ring is not None:
            batch, length, packed_tokens = self._ring.planned(batch, length, extent)
        elif extent.documents is not None:
            batch, length, packed_tokens = extent.documents.sizes(batch, length)
        total_length = extent.total_length if self._ring is not None and not packed_tokens else 0
        return self.plan.plan_at(length, dtype, train, batch, total_length or 0, packed_tokens, dropout)

    def _validated_row(self, *call: Any) -> Row:
        """Return the row for a call, its kernels validated; a plan with one that fails leaves the table."""
        while True:
            row = self._row(*call)
            if row.plan is None or self.validate_kernels(asked_of_kernels(row.plan, self._setup.facts)):
                return row

    def validate_kernels(self, asked: Iterable[Combination]) -> bool:
        """Make every check of kernels that this machine lacks; False where one fails, which then leaves the table."""
        faults = faults_among(asked, self._validated, self._setup, self.device) if self.validates else []
        if not faults:
            return True
        place_of = self._setup.place_of if self._setup.entries else None
        self.plan = self.plan.without(faults, strict=self._setup.named and bool(place_of), place_of=place_of)
        if self._ring is not None:
            self._ring.replanned()
        return False

    def _planned(self, q: Tensor, train: bool, extent: Extent, narrow: torch.dtype | None) -> str:
        """Describe the plan of a call, for other ranks to compare with theirs."""
        row = self._row(q.shape[0], q.shape[1], DTYPE_NAMES[narrow or q.dtype], train, extent)
        return describe(row.runnable().tunables)

    def casts(self, q: Tensor, autocast: torch.dtype | None) -> bool:
        """Tell whether to compute in autocast's dtype: float64 and an explicit dtype keep theirs."""
        return autocast is not None and q.dtype is not torch.float64 and self.plan.wishes.dtype is None

    def _eager(
        self, q: Tensor, k: Tensor, v: Tensor, train: bool, autocast: torch.dtype | None, extent: Extent,
        with_lse: bool, sinks: Tensor | None, dropout: float = 0.0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Run a call of one rank."""
        looks = (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, train)
        key = (looks, q.device, k.device, v.device, with_lse, dropout, sinks is None, extent, autocast)
        run = self._runners.get(key)
        if run is None:
            run = self._new_runner(q, k, v, train, key, with_lse)
        return run(q, k, v) if sinks is None else run(q, k, v, sinks)

    def _new_runner(self, q: Tensor, k: Tensor, v: Tensor, train: bool, key: Any, with_lse: bool) -> Runner:
        """Return the function that runs calls with tensors like these, remembered under ``key``."""
        dropout, no_sinks, extent, autocast = key[-4:]
        narrow = autocast if self.casts(q, autocast) else None
        if narrow is not None:
            check_dtypes(q, k, v)
            q, k, v = q.to(narrow), k.to(narrow), v.to(narrow)
        program = self.program_for(q, k, v, train, extent, dropout)
        run = runner_of(program, q, k, v, train, with_lse, sinks=not no_sinks)
        if self._record_path:
            row = self._row(q.shape[0], q.shape[1], DTYPE_NAMES[q.dtype], train, extent, dropout)
            run = self.counted(run, row.runnable())
        if autocast is not None:
            run = without_autocast(run, self._device_type, narrow)
        if len(self._runners) >= compiled.MOST_SHAPES:
            self._runners.clear()
        self._runners[key] = run
        return run

    def _over_ranks(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Any, lengths: Any, total_length: int | None,
        with_lse: bool, sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Run the call in step with the other ranks; an error here is reported to them."""
        assert self._ring is not None
        with self._ring.call():
            if torch.compiler.is_exporting() or transforms_active():
                raise InputError("torch.export and torch.func take no RingAttention over several ranks")
            if sinks is not None:
                check_sinks(sinks, self.shape.heads, self.device)
            train, autocast = self.call_mode(q, k, v, sinks)
            extent = extent_of(total_length, cu_seqlens, lengths)
            check_inputs(q, k, v, self.shape, self.device, packed=extent.documents is not None)
            shapes = (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, train)
            key = (shapes, with_lse, 0.0, sinks is None, extent, autocast)
            run = self._runners.get(key)
            if run is None:
                run = self._new_runner(q, k, v, train, key, with_lse)
            narrow = autocast if autocast is not q.dtype and self.casts(q, autocast) else None
            self._ring.enter(q, train, extent, narrow, self._planned, sinks=sinks is not None)
        return run(q, k, v) if sinks is None else run(q, k, v, sinks)

    def call_mode(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, *, drops: bool = False
    ) -> tuple[bool, torch.dtype | None]:
        """Return whether to train, and autocast's dtype or None; raise for tensors without strides.

        And in training mode with dropout, unless the caller ``drops``.
        """
        if self.dropout and self.training and not drops:
            where = f"over {self.shape.world} ranks" if self._ring is not None else "and in forward alone"
            raise dropout_refusal(self.dropout, where)
        if not (type(q) is type(k) is type(v) is Tensor):  # the runners of shapes know no types
            check_types(q, k, v)
        if not (q.layout is k.layout is v.layout is torch.strided) or q.is_nested or k.is_nested or v.is_nested:
            # Such tensors have no strides, which are read before a new shape is checked.
            check_inputs(q, k, v, self.shape, self.device)
        train = q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad)
        train = train and torch.is_grad_enabled()
        device = self._device_type
        return train, torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
