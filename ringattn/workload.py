"""What is asked (``Workload``) and what may be chosen for it (``Tunables``): plain frozen data, no torch.

Legend: B batch, S local sequence length, H query heads, Hkv key/value heads, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from .arguments import integer, is_integer, is_list
from .errors import FieldError, InputError
from .wording import plural

Mode = Literal["train", "infer"]
HeadOffset = Literal["interleaved", "blocked"]

INPUT_DTYPES = ("bf16", "fp16", "fp32", "fp64")
COMPUTE_DTYPES = ("bf16", "fp16", "tf32", "fp32", "fp64")  # from the least to the most precise
GATHERS = ("view", "copy")
CHECKPOINTS = ("none", "selective", "full", "offload")
POOL_STRATEGIES = ("shape", "bucket")
SCHEDULES = ("local", "ring", "all-gather", "ulysses", "ulysses-ring")
LAYOUTS = ("contiguous", "zigzag")
GRAD_WIRES = ("", "compute")
EXCHANGES = ("", "symmetric")

LONGEST = 2**40  # no sequence is, and strides (rate times a position's elements) fit 64 bits

# bf16 holds more range than fp16 and fp16 more digits than bf16: neither is the wider one.
_NOT_NARROWER = {
    "bf16": ("bf16", "tf32", "fp32"),
    "fp16": ("fp16", "tf32", "fp32"),
    "fp32": ("fp32",),
    "fp64": ("fp64",),
}


def not_narrower(input_dtype: str) -> tuple[str, ...]:
    """The compute dtypes that hold at least what ``input_dtype`` holds; TF32 holds less than fp32."""
    return _NOT_NARROWER[input_dtype]


@dataclass(frozen=True, slots=True)
class Branch:
    """One branch of a pattern: segments of ``segment`` positions, every ``rate``-th of which is selected."""

    segment: int
    rate: int


@dataclass(frozen=True, slots=True)
class Pattern:
    """Which positions each head attends over. No branches means dense: one segment, every position.

    ``head_offset`` is the rule that gives a key/value head its first position in a segment: ``interleaved``
    is ``kv_head % rate`` (LongNet, arXiv:2307.02486, section 3.2), ``blocked`` is
    ``kv_head // ceil(Hkv / rate)`` (the rule of torchscale's implementation).
    """

    branches: tuple[Branch, ...] = ()
    head_offset: HeadOffset = "interleaved"

    def __post_init__(self) -> None:
        if self.head_offset not in ("interleaved", "blocked"):
            raise FieldError(f"is {self.head_offset!r}; use 'interleaved' or 'blocked'", field="head_offset")
        for branch in self.branches:
            for name, value in (("segment_lengths", branch.segment), ("dilation_rates", branch.rate)):
                if not is_integer(value) or not 1 <= value <= LONGEST:
                    raise FieldError(f"holds {value!r}; every entry must be an integer >= 1 and <= 2**40", field=name)
        branches = tuple(Branch(int(branch.segment), int(branch.rate)) for branch in self.branches)
        object.__setattr__(self, "branches", branches)

    @classmethod
    def of(
        cls,
        segment_lengths: Sequence[int] | None,
        dilation_rates: Sequence[int] | None,
        head_offset: HeadOffset = "interleaved",
    ) -> Pattern:
        """The pattern of two equally long lists, or dense for two ``None``; raises InputError otherwise."""
        if segment_lengths is None and dilation_rates is None:
            return cls((), head_offset)
        if segment_lengths is None or dilation_rates is None:
            raise InputError("segment_lengths and dilation_rates go together; give both, or neither for dense")
        for name, entries in (("segment_lengths", segment_lengths), ("dilation_rates", dilation_rates)):
            if not is_list(entries):
                raise FieldError(f"is {entries!r}; give a list of integers, one per branch", field=name)
        segments, rates = tuple(segment_lengths), tuple(dilation_rates)
        if len(segments) != len(rates) or not segments:
            raise FieldError(
                f"has {plural(len(segments), 'entry')} and dilation_rates {len(rates)}; "
                "give two lists of one length >= 1",
                field="segment_lengths",
            )
        return cls(tuple(Branch(w, r) for w, r in zip(segments, rates, strict=True)), head_offset)

    @property
    def dense(self) -> bool:
        return not self.branches

    def resolved(self, seq_len: int) -> tuple[Branch, ...]:
        """The branches for ``seq_len`` positions; dense is the one branch (seq_len, 1)."""
        return self.branches or (Branch(max(seq_len, 1), 1),)

    def __str__(self) -> str:
        if self.dense:
            return "dense"
        segments = ",".join(str(b.segment) for b in self.branches)
        rates = ",".join(str(b.rate) for b in self.branches)
        return f"[{segments}]/[{rates}]" + ("" if self.head_offset == "interleaved" else " blocked")


@dataclass(frozen=True, slots=True)
class Workload:
    """One question put to the machine: these shapes, this pattern, with or without gradients.

    ``seq_len`` is the local length on one of ``world`` ranks, ``dtype`` the input dtype by its short name.
    ``total_length`` is the length of the whole sequence, where it is not ``world * seq_len``. ``kv_heads=0`` means as
    many as query heads.
    """

    mode: Mode
    causal: bool
    seq_len: int
    heads: int
    head_dim: int
    dtype: str
    kv_heads: int = 0  # 0 stands for `heads` and is replaced at once
    batch: int = 1
    pattern: Pattern = field(default_factory=Pattern)
    world: int = 1
    total_length: int = 0

    def __post_init__(self) -> None:
        if self.kv_heads == 0:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.mode not in ("train", "infer"):
            raise FieldError(f"is {self.mode!r}; use 'train' or 'infer'", field="mode")
        if self.dtype not in INPUT_DTYPES:
            raise FieldError(f"is {self.dtype!r}; use one of {', '.join(INPUT_DTYPES)}", field="dtype")
        for name in ("seq_len", "heads", "kv_heads", "head_dim", "batch", "world"):
            object.__setattr__(self, name, integer(name, getattr(self, name)))
        object.__setattr__(self, "total_length", integer("total_length", self.total_length, least=0))
        if self.heads % self.kv_heads:
            raise FieldError(f"is {self.heads}, not a multiple of kv_heads, {self.kv_heads}", field="heads")

    @property
    def train(self) -> bool:
        return self.mode == "train"

    @property
    def total(self) -> int:
        """Positions of the whole sequence, on all ranks."""
        return self.total_length or self.world * self.seq_len

    def at(self, seq_len: int) -> Workload:
        return replace(self, seq_len=seq_len)

    def __str__(self) -> str:
        heads = f"H{self.heads}" + (f"/{self.kv_heads}" if self.kv_heads != self.heads else "")
        causal = "causal" if self.causal else "full"
        world = f" world={self.world}" if self.world > 1 else ""
        shape = f"B{self.batch} S{self.seq_len} {heads} D{self.head_dim} {self.dtype}"
        return f"{self.mode} {self.pattern} {causal} {shape}{world}"


@dataclass(frozen=True, slots=True)
class BranchTunables:
    """How one branch runs: the kernels of its two directions and how dilated rows reach them.

    ``backward`` is ignored by nothing: a plan for inference holds the empty string there.
    """

    forward: str
    backward: str = ""
    gather: str = "view"

    def __post_init__(self) -> None:
        if self.gather not in GATHERS:
            raise FieldError(f"is {self.gather!r}; use one of {', '.join(GATHERS)}", field="gather")


ParamValue = int | bool | str


@dataclass(frozen=True, slots=True)
class Tunables:
    """One complete choice for a workload, as the search proposes it and a profile stores it.

    ``branches`` has one entry per branch of the pattern (one for dense). ``window_tokens`` bounds the positions
    whose workspace is alive at a time (None: all). ``pool_threshold_mib`` None turns the workspace pool off.
    ``params`` are sorted ``("kernel.name", value)`` pairs handed to the kernel called ``kernel``.

    Over several ranks ``schedule`` says how rows travel and ``layout`` how the sequence is cut (empty at one rank).
    ``ulysses`` is the number of consecutive ranks that exchange heads under "ulysses-ring", 0 elsewhere;
    ``head_groups`` cuts the heads of an all-gather or Ulysses in groups that travel one after the other (0: one).
    Gradients of keys travel in the input dtype, or where ``grad_wire`` is "compute" in the wider compute dtype.
    Heads are exchanged by the group's all-to-all, or where ``exchange`` is "symmetric" by copies into the memory of
    the peers.
    """

    dtype: str
    branches: tuple[BranchTunables, ...]
    checkpoint: str = "selective"
    window_tokens: int | None = None
    pattern_cache: bool = True
    pool_threshold_mib: int | None = None
    pool_strategy: str = "shape"
    compile: bool = False
    schedule: str = "local"
    layout: str = ""
    ulysses: int = 0
    head_groups: int = 0
    grad_wire: str = ""
    exchange: str = ""
    params: tuple[tuple[str, ParamValue], ...] = ()

    def __post_init__(self) -> None:
        allowed = (
            ("dtype", self.dtype, COMPUTE_DTYPES),
            ("checkpoint", self.checkpoint, CHECKPOINTS),
            ("pool_strategy", self.pool_strategy, POOL_STRATEGIES),
            ("schedule", self.schedule, SCHEDULES),
            ("layout", self.layout, ("", *LAYOUTS)),
            ("grad_wire", self.grad_wire, GRAD_WIRES),
            ("exchange", self.exchange, EXCHANGES),
        )
        for name, value, values in allowed:
            if value not in values:
                raise FieldError(f"is {value!r}; use one of {', '.join(v or repr(v) for v in values)}", field=name)
        if not self.branches:
            raise FieldError("is empty; a plan has one entry per branch, and one for dense", field="branches")
        for name in ("window_tokens", "pool_threshold_mib", "ulysses", "head_groups"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, integer(name, value, least=0, instead="null or "))
        if self.window_tokens == 0:
            raise FieldError("is 0; it must be null or an integer >= 1", field="window_tokens")
        if tuple(sorted(self.params)) != self.params:
            raise FieldError("must be sorted by name", field="params")

    @property
    def kernels(self) -> frozenset[str]:
        """The names of all kernels of the plan, of either direction."""
        return frozenset(name for b in self.branches for name in (b.forward, b.backward) if name)

    def params_of(self, kernel: str) -> dict[str, ParamValue]:
        """The parameters meant for ``kernel``, without its prefix."""
        prefix = kernel + "."
        return {name.removeprefix(prefix): value for name, value in self.params if name.startswith(prefix)}


def describe(tunables: Tunables) -> str:
    """One choice as a short line: what differs from branch to branch, then what is not the plainest value.

    >>> describe(Tunables("bf16", (BranchTunables("cudnn", "flash"),)))
    'cudnn/flash bf16'
    """
    names = [f"{b.forward}/{b.backward}" if b.backward else b.forward for b in tunables.branches]
    gathers = [b.gather for b in tunables.branches]
    parts = [names[0] if len(set(names)) == 1 else ",".join(names), tunables.dtype]
    if set(gathers) != {"view"}:
        parts.append("copy" if set(gathers) == {"copy"} else "gather=" + ",".join(g[0] for g in gathers))
    if tunables.checkpoint != "selective":
        parts.append(f"checkpoint={tunables.checkpoint}")
    if tunables.window_tokens is not None:
        parts.append(f"window={tunables.window_tokens}")
    if not tunables.pattern_cache:
        parts.append("no-pattern-cache")
    if tunables.pool_threshold_mib is not None:
        parts.append(f"pool>={tunables.pool_threshold_mib}MiB/{tunables.pool_strategy}")
    if tunables.compile:
        parts.append("compile")
    if tunables.schedule != "local":
        parts.append(f"{tunables.schedule}/{tunables.layout}" if tunables.layout else tunables.schedule)
    parts += [f"{name}={getattr(tunables, name)}" for name in _RING_FIELDS if getattr(tunables, name)]
    parts += [f"{name}={value}" for name, value in tunables.params]
    return " ".join(parts)


def kernels_described(description: str) -> frozenset[str]:
    """The kernels of the choice that ``describe`` wrote: how a profile names the candidates that failed."""
    pairs = description.partition(" ")[0].split(",")
    return frozenset(name for pair in pairs for name in pair.split("/") if name)


_RING_FIELDS = ("ulysses", "head_groups", "grad_wire", "exchange")


def nearest_bucket(seq_len: int, measured: Sequence[int]) -> int | None:
    """The measured length nearest to ``seq_len`` in log2, or None beyond [shortest/sqrt 2, longest*sqrt 2].

    Tuner and runtime both use this function. Ties go to the shorter length.
    """
    if not measured:
        return None
    lengths = sorted(measured)
    if seq_len * math.sqrt(2) < lengths[0] or seq_len > lengths[-1] * math.sqrt(2):
        return None
    return min(lengths, key=lambda n: (abs(math.log2(n) - math.log2(seq_len)), n))
