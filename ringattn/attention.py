"""``RingAttention``: the module people use.

Everything is decided before a call: the table of plans at init, and once per new shape which row of it serves.
``forward`` looks the answer up and runs it.

Legend: B batch, S sequence, H query heads, Hkv key/value heads, D head dimension.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from ringattn.autograd.function import Runner, differentiable
from ringattn.autograd.transforms import transforms_active
from ringattn.geometry.layout import Share, Span, check_dim, check_own, positions, resolve_layout, shard
from ringattn.hardware.facts import HardwareFacts
from ringattn.hardware.kernel_faults import Combination
from ringattn.planning.plan import Conditions, Plan
from ringattn.planning.preference import Preference, check_preference
from ringattn.planning.self_check import asked_of_kernels, faults_of
from ringattn.planning.setup import (
    Setup,
    check_module,
    device_of,
    group_size,
    say_once,
    set_up,
    warn_of_empty_heads,
    wishes_of,
)
from ringattn.planning.table import ModuleShape, PlanTable, Row, build_table
from ringattn.planning.validation_memory import user_memory
from ringattn.profile.schema import PlanEntry, Profile
from ringattn.runtime.graphed import GraphedProgram
from ringattn.runtime.program import Program

from .arguments import input_dtype, integer, is_integer
from .autograd import torch_compile as compiled
from .autograd import transforms
from .dtypes import DTYPE_NAMES, TORCH_DTYPES
from .errors import InputError, PlanError
from .wording import plural
from .workload import HeadOffset, Pattern, describe

if TYPE_CHECKING:
    from ringattn.distributed.context import RingContext
    from ringattn.distributed.program import RingProgram


class RingAttention(nn.Module):
    """Exact dense or dilated attention over one sequence, run the way this machine's hardware profile says.

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
        dropout: probability in training mode; refused there with each kernel's reason where no kernel can do it
            exactly across blocks. Ignored in eval mode.
        head_offset: first selected position of a key/value head h: ``"interleaved"`` h % r, ``"blocked"``
            h // ceil(Hkv / r).
        profile: ``"auto"`` finds this machine's, a path or Profile names one (and raises where it cannot run),
            None uses the built-in heuristic alone.
        backend: a kernel name, or (forward name, backward name). Beats the profile; raises where ineligible.
        dtype: None computes in the input dtype unless the heuristic knows a wider one to be the better one;
            ``"auto"`` in the fastest dtype that the profile measured within its error bound; or a torch.dtype, its
            name (``"bf16"``, ``"bfloat16"``), or ``"tf32"``.
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
            check_preference(prefer)
            pattern = Pattern.of(segment_lengths, dilation_rates, head_offset)
            resolve_layout(layout, pattern, causal)  # what makes no sense is refused before a profile is read
            shape = ModuleShape(num_heads, num_kv_heads, head_dim, causal, pattern, max_seq_len, world)
            self.scale = 1.0 / math.sqrt(head_dim) if scale is None else float(scale)
            deterministic = torch.are_deterministic_algorithms_enabled()

            def layout_with(entries: Sequence[PlanEntry], facts: HardwareFacts) -> str:
                return shape.layout(layout, entries, facts)

            def resolve() -> tuple[Setup, PlanTable]:
                setup = set_up(profile, device, shape)
                table = build_table(
                    shape,
                    setup.entries,
                    setup.policy,
                    setup.facts,
                    conditions=Conditions(
                        deterministic,
                        layout_with(setup.entries, setup.facts) if world > 1 else "",
                        self._ring.watch.apart() if self._ring is not None else "",
                    ),
                    wishes=wishes_of(backend, dtype, checkpoint),
                    auto_dtype=dtype == "auto",
                    prefer=prefer,
                    strict=setup.named,
                    place_of=setup.place_of,
                )
                return setup, table

            self._setup: Setup
            self.plan: PlanTable
            if self._ring is None:
                self._setup, self.plan = resolve()
                self.layout = resolve_layout(layout, pattern, causal)
            else:
                asked = {"scale": self.scale, "layout": layout, "prefer": prefer, "dropout": float(dropout)}
                asked |= {"backend": backend, "dtype": dtype, "checkpoint": checkpoint}
                asked["use_deterministic_algorithms"] = deterministic
                self._setup, self.plan = self._ring.plan_together(resolve, layout_with, shape, asked)
                self.layout = self._ring.layout
        except Exception as error:
            if self._ring is not None:
                self._ring.watch.not_built(error)
            raise
        self.shape = shape
        self.dropout = float(dropout)
        self._right: set[Combination] = set()  # of its kernels, validated
        # False: whoever runs this module compares each of its plans with float64 itself, as a probe does.
        self.validates = True
        self.device = self._setup.device
        self._device_type = self.device.type
        self._runners: dict[Any, Runner] = {}
        self.traced: dict[Any, Program | RingProgram] = {}
        self._programs: dict[Any, Program | RingProgram] = {}
        self._digest, self._configuration = compiled.register(self)
        if self._speaks():
            self._setup.announce()
            warn_of_empty_heads(shape)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, return_lse: bool = False, total_length: int | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention over q (B, S, H, D) with k and v (B, S, Hkv, D), any strides.

        Over several ranks S is what this rank holds, equal on all of them; where they differ, ``total_length`` is the
        length of the whole sequence, of which each rank holds what ``positions`` says.

        Returns out (B, S, H, D) in q's dtype; with ``return_lse`` also lse (B, H, S), natural log, float32 (float64
        for float64), -inf where nothing is selected or every logit is -inf. A loss may use it, for a second backward;
        what is -inf has no gradient. Over several ranks its backward raises RingAttentionError: use lse.detach().
        """
        if self._ring is not None:
            out, lse = self._ring.outside_graphs(self._over_ranks, q, k, v, total_length, return_lse)
            return (out, lse) if return_lse else out
        train, autocast = self._mode(q, k, v)
        if total_length is not None and (not is_integer(total_length) or total_length != q.shape[1]):
            raise InputError(f"total_length is {total_length!r}, but this rank holds all {q.shape[1]}; leave it out")
        if torch.compiler.is_compiling() or transforms_active():
            out, lse = self._trace(q, k, v, train, autocast)
        else:
            looks = (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, train)
            key = (looks, q.device, k.device, v.device, return_lse, total_length, autocast)
            run = self._runners.get(key)
            if run is None:
                run = self._new_runner(q, k, v, train, key, return_lse)
            out, lse = run(q, k, v)
        return (out, lse) if return_lse else out

    def positions(self, total_length: int) -> Tensor:
        """Positions (S,) int64 of this rank's rows in a sequence of ``total_length``, for rotary offsets and labels."""
        total_length = integer("total_length", total_length)
        return positions(self._share(total_length), self.device)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's rows of ``x``, which is the whole sequence along ``dim``."""
        check_dim(x, dim)
        return shard(x, self._share(x.shape[dim]), dim)

    def unshard(self, x: Tensor, total_length: int | None = None, dim: int = 1) -> Tensor:
        """The whole sequence from every rank's rows; all ranks call it. Not differentiable."""
        if self._ring is None:
            check_dim(x, dim)
            return x
        return self._ring.unshard(x, total_length, dim)

    def _share(self, total_length: int) -> Share:
        return (Span(0, total_length),) if self._ring is None else self._ring.share(total_length)

    def _speaks(self) -> bool:
        """Whether this rank tells about plans: those of a group run one, and its rank 0 tells for all."""
        return self._ring is None or self._ring.comm.rank == 0

    def plan_for(self, seq_len: int, dtype: torch.dtype | str, train: bool, batch: int = 1) -> Plan:
        """The plan that a call with ``seq_len`` positions of this input dtype obeys; PlanError where it is refused.

        ``dtype`` is a torch.dtype or its name, ``"bf16"`` or ``"bfloat16"``.

        Its ``origin``, printed with it, says whether the profile has it, measured or not, or the heuristic made it.
        """
        seq_len, batch = integer("the sequence length", seq_len), integer("batch", batch)
        self._check_length(seq_len)
        return self.plan.plan_at(seq_len, input_dtype(dtype), train, batch).runnable()

    def explain(self) -> str:
        """Why this plan: the profiles looked at, the tier, the table, and what gave way to what."""
        lines = [*self._setup.trace, "", "plans:", *(f"  {row}" for row in self.plan.rows)]
        lines += [f"  note, {row.dtype} {row.mode}: {row.note}" for row in self.plan.rows if row.note]
        return "\n".join(lines)

    def peer_workspace_bytes(self) -> int:
        """Bytes that a call took at most of memory that peers write into, which torch's allocator does not count."""
        rings = [program for program in self._programs.values() if not isinstance(program, Program)]
        return max((program.workspace_bytes for program in rings), default=0)

    def warmup(
        self,
        lengths: Iterable[int] | int,
        dtype: torch.dtype | str = torch.float32,
        batch_size: int = 1,
        train: bool = False,
    ) -> dict[int, float]:
        """Makes the first call at each length ahead (kernel plans and compilation), through autograd if ``train``.

        ``dtype`` is that of the inputs. Returns the milliseconds that each first call took.
        """
        given = lengths if isinstance(lengths, Iterable) and not isinstance(lengths, str) else [lengths]
        lengths = [integer("the sequence length", length) for length in given]  # all, before the first is run
        for length in lengths:
            self._check_length(length)
        batch_size, dtype = integer("batch_size", batch_size), TORCH_DTYPES[input_dtype(dtype)]
        if not isinstance(train, bool):
            raise InputError(f"train is {train!r}; it must be True or False")
        took_ms = {}
        generator = torch.Generator(self.device)  # its own: a warm-up leaves the program's random numbers alone
        for length in lengths:
            begin = time.perf_counter()
            heads = (self.shape.heads, self.shape.kv_heads, self.shape.kv_heads)
            q, k, v = (
                torch.zeros(batch_size, length, h, self.shape.head_dim, dtype=dtype, device=self.device)
                .normal_(generator=generator)
                .requires_grad_(train)
                for h in heads
            )
            with torch.set_grad_enabled(train):
                out = self.forward(q, k, v)
                assert isinstance(out, Tensor)
                if train:
                    torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            took_ms[length] = (time.perf_counter() - begin) * 1e3
        return took_ms

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles are planned modules without loaded kernels, and compiled graphs know them apart."""
        return {**self.__dict__, "_runners": {}, "traced": {}, "_programs": {}, "_digest": "", "_configuration": ""}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._digest, self._configuration = compiled.register(self)

    def __prepare_scriptable__(self) -> NoReturn:
        """What torch.jit.script asks first."""
        raise InputError("torch.jit.script cannot compile a RingAttention; use torch.export, or torch.compile")

    def extra_repr(self) -> str:
        s = self.shape
        kv = f", kv_heads={s.kv_heads}" if s.kv_heads != s.heads else ""
        return f"heads={s.heads}{kv}, head_dim={s.head_dim}, {s.pattern}, causal={s.causal}, device={self.device}"

    def program_for(
        self, q: Tensor, k: Tensor, v: Tensor, train: bool, total_length: int | None = None
    ) -> Program | RingProgram:
        """The program that serves these tensors, after every check of them."""
        batch, length = self._check(q, k, v)
        row = self._validated_row(batch, length, DTYPE_NAMES[q.dtype], train, total_length)
        plan = row.runnable()
        if (note := self.plan.fallback_note(row)) and self._speaks():
            say_once(logging.WARNING, note)
        key: Hashable = (plan.tunables, plan.workload.mode)
        if self._ring is not None and plan.tunables.schedule != "local":
            key = plan.workload, plan.tunables  # a program over several ranks is made for one shape
        program = self._programs.get(key)
        if program is None:
            if self._ring is None or plan.tunables.schedule == "local":
                kind = GraphedProgram if plan.tunables.launch == "graph" else Program
                program = kind(plan, self.scale)
            else:
                program = self._ring.program(plan, self.scale)
            self._programs[key] = program
        return program

    def _row(self, batch: int, length: int, dtype: str, train: bool, total_length: int | None) -> Row:
        if self._ring is None:
            return self.plan.plan_at(length, dtype, train, batch)
        length = self._ring.planned_length(length, total_length)
        return self.plan.plan_at(length, dtype, train, batch, total_length or 0)

    def _validated_row(self, *call: Any) -> Row:
        """The row for a call, once every kernel of its plan is known to be right; one that is not leaves the table."""
        while True:
            row = self._row(*call)
            asked = asked_of_kernels(row.plan, self._setup.facts) if self.validates and row.plan is not None else ()
            if self._right.issuperset(asked):
                return row
            faults = faults_of(asked, self._setup.facts, self.device, self._setup.resolution)
            if note := user_memory().note:
                say_once(logging.WARNING, note)
            if not faults:
                self._right.update(asked)
                return row
            place_of = self._setup.place_of if self._setup.entries else None
            self.plan = self.plan.without(faults, strict=self._setup.named and bool(place_of), place_of=place_of)
            if self._ring is not None:
                self._ring.replanned()

    def _planned(self, q: Tensor, train: bool, total_length: int | None, narrow: torch.dtype | None) -> str:
        """The plan of a call in words, for other ranks to compare with theirs."""
        row = self._row(q.shape[0], q.shape[1], DTYPE_NAMES[narrow or q.dtype], train, total_length)
        return describe(row.runnable().tunables)

    def _trace(
        self, q: Tensor, k: Tensor, v: Tensor, train: bool, autocast: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        """The call as torch.compile and torch.func see it: one operator or Function, conversions around it."""
        wished = self.plan.wishes.checkpoint
        if train and wished not in (None, "selective"):
            raise InputError(
                f"checkpoint is {wished!r}, but under torch.compile and torch.func q, k, v, out and lse are what is "
                "kept, or less where the compiler decides; use checkpoint=None there"
            )
        dtype = q.dtype
        if self._narrows(q, autocast):
            q, k, v = q.to(autocast), k.to(autocast), v.to(autocast)
        if not torch.compiler.is_compiling():
            self._check(q, k, v)  # as each sample is; what the Function checks has the samples in its batch
            out, lse = transforms.attend(self, q, k, v, train)
        elif torch.compiler.is_exporting():
            self._check(q, k, v)  # a program that nobody can call is not exported
            out, lse = compiled.attend(q, k, v, self._configuration, train)
        else:
            out, lse = compiled.attend(q, k, v, self._digest, train)
        return out.to(dtype), lse

    def _narrows(self, q: Tensor, autocast: torch.dtype | None) -> bool:
        """Whether autocast's dtype is the one to compute in: float64 and an explicit dtype keep theirs."""
        return autocast is not None and q.dtype is not torch.float64 and self.plan.wishes.dtype is None

    def _new_runner(self, q: Tensor, k: Tensor, v: Tensor, train: bool, key: Any, with_lse: bool) -> Runner:
        """What a call with tensors like these runs, remembered under ``key``."""
        total_length, autocast = key[-2:]
        if autocast is None:
            run = self._plain_runner(q, k, v, train, total_length, with_lse)
        else:
            narrow = autocast if self._narrows(q, autocast) else None
            run = self._autocast_runner(q, k, v, train, total_length, narrow, with_lse)
        if len(self._runners) >= compiled.MOST_SHAPES:
            self._runners.clear()
        self._runners[key] = run
        return run

    def _plain_runner(
        self, q: Tensor, k: Tensor, v: Tensor, train: bool, total_length: int | None, with_lse: bool
    ) -> Runner:
        program = self.program_for(q, k, v, train, total_length)
        attend = differentiable(program, q, with_lse) if train else program.attend
        if all(x.stride(-1) == 1 or x.shape[-1] == 1 for x in (q, k, v)):
            return attend
        return lambda q, k, v: attend(*compiled.rows_of(q, k, v))

    def _autocast_runner(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        train: bool,
        total_length: int | None,
        dtype: torch.dtype | None,
        with_lse: bool,
    ) -> Runner:
        """Inputs in autocast's dtype (None: in their own), autocast off inside so that no step of ours is narrowed."""
        device = self._device_type
        if dtype is None:
            attend = self._plain_runner(q, k, v, train, total_length, with_lse)
        else:
            for name, x in (("q", q), ("k", k), ("v", v)):
                _check_dtype(name, x)
            attend = self._plain_runner(q.to(dtype), k.to(dtype), v.to(dtype), train, total_length, with_lse)

        def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            with torch.autocast(device, enabled=False):
                if dtype is None:
                    return attend(q, k, v)
                out, lse = attend(q.to(dtype), k.to(dtype), v.to(dtype))
            return out.to(q.dtype), lse

        return run

    def _over_ranks(
        self, q: Tensor, k: Tensor, v: Tensor, total_length: int | None, with_lse: bool
    ) -> tuple[Tensor, Tensor]:
        """The call in step with the other ranks; what is wrong with it here is told to them."""
        assert self._ring is not None
        with self._ring.call():
            if torch.compiler.is_exporting() or transforms_active():
                raise InputError("torch.export and torch.func take no RingAttention over several ranks")
            train, autocast = self._mode(q, k, v)
            self._check(q, k, v)
            if total_length is not None:
                total_length = integer("total_length", total_length)
            shapes = (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, train)
            key = (shapes, with_lse, total_length, autocast)
            run = self._runners.get(key)
            if run is None:
                run = self._new_runner(q, k, v, train, key, with_lse)
            narrow = autocast if autocast is not q.dtype and self._narrows(q, autocast) else None
            self._ring.enter((q, k, v), run, train, total_length, narrow, self._planned)
        return run(q, k, v)

    def _mode(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[bool, torch.dtype | None]:
        """Whether gradients are wanted, and the dtype of autocast; raises for what has neither, nor strides."""
        if self.dropout and self.training:
            if torch.compiler.is_dynamo_compiling():  # which cannot trace how a PlanError is made, and shows that
                raise InputError(f"dropout is {self.dropout} in training mode; set dropout=0.0, or call eval()")
            raise self._dropout_refusal()
        if not (type(q) is type(k) is type(v) is Tensor):  # the runners of shapes know no types
            for name, x in (("q", q), ("k", k), ("v", v)):
                _check_type(name, x)
        if not (q.layout is k.layout is v.layout is torch.strided) or q.is_nested or k.is_nested or v.is_nested:
            self._check(q, k, v)  # such tensors have no strides, which are read before a new shape is checked
        train = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        device = self._device_type
        return train, torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def _check(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int]:
        """(B, S) of well-formed inputs; InputError names what does not fit."""
        s = self.shape
        if torch._C._get_tracing_state() is not None:
            raise InputError("torch.jit.trace records one shape and plan; use torch.export, or torch.compile")
        for name, x, heads in (("q", q, s.heads), ("k", k, s.kv_heads), ("v", v, s.kv_heads)):
            _check_type(name, x)
            if x.is_nested:
                raise InputError(
                    f"{name} is a nested tensor; call once for each sequence, or for batches of sequences of one length"
                )
            if x.layout is not torch.strided:
                raise InputError(f"{name} has layout {x.layout}; make it a dense tensor with to_dense()")
            if x.dim() != 4:
                raise InputError(f"{name} has shape {tuple(x.shape)}; it must be (batch, sequence, heads, head_dim)")
            if x.shape[2] != heads or x.shape[3] != s.head_dim:
                argument = "num_heads" if name == "q" else "num_kv_heads"
                raise InputError(
                    f"{name} has shape {tuple(x.shape)}; the module has {argument} {heads} and head_dim {s.head_dim}, "
                    f"so it must be (batch, sequence, {heads}, {s.head_dim})"
                )
            if x.is_meta:
                raise InputError(f"{name} is on meta, where tensors hold no data; give it data with to_empty() first")
            if x.device != self.device:
                raise InputError(
                    f"{name} is on {x.device}, the module's plans are for {self.device}; move it there, "
                    "or build the module with the device of its tensors"
                )
            _check_dtype(name, x)
            if x.dtype != q.dtype:
                raise InputError(f"{name} is {x.dtype} and q is {q.dtype}; convert them to one dtype")
            if x.shape[0] != q.shape[0]:
                raise InputError(f"{name} has batch size {x.shape[0]} and q {q.shape[0]}; they must be equal")
            if x.shape[1] != q.shape[1]:
                raise InputError(
                    f"{name} has {plural(x.shape[1], 'position')} and q {q.shape[1]}; cross attention and decoding "
                    "against a cache are not supported, give q, k and v of one length"
                )
        batch, length = q.shape[:2]
        if batch == 0 or length == 0:
            raise InputError(f"q has shape {tuple(q.shape)}; batch and sequence must not be empty")
        self._check_length(length)
        return batch, length

    def _check_length(self, length: int) -> None:
        limit = self.shape.max_seq_len
        if limit is not None and length > limit:
            raise InputError(f"the sequence has {length} positions, more than max_seq_len, {limit}")

    def _dropout_refusal(self) -> PlanError:
        return PlanError(
            f"dropout {self.dropout} in training mode",
            self._setup.dropout_reasons(),
            "Set dropout=0.0, or call eval() for inference",
        )


def _check_type(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise InputError(f"{name} is a {type(x).__name__}; it must be a tensor")
    check_own(name, x)


def _check_dtype(name: str, x: Tensor) -> None:
    if x.dtype not in DTYPE_NAMES:
        raise InputError(f"{name} is {x.dtype}; use one of {', '.join(map(str, DTYPE_NAMES))}")
