"""Workloads: what is asked of attention, as plain frozen data without torch.

The two halves of a plan, ``Workload`` and ``Tunables`` (whose table is ``tunables``), are both imported from here.

Legend: B batch, S local sequence length, H query heads, Hkv key/value heads, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Literal

from .arguments import check_dropout, integer, is_integer, is_list
from .errors import FieldError, InputError
from .tunable_rules import ParamValue as ParamValue
from .tunables import TABLE
from .tunables import BranchTunables as BranchTunables
from .tunables import Tunables as Tunables
from .wording import plural

Mode = Literal["train", "infer", "decode"]
HeadOffset = Literal["interleaved", "blocked"]

INPUT_DTYPES = ("bf16", "fp16", "fp32", "fp64")
LONGEST = 2**40  # no sequence is, and strides (rate times a position's elements) fit 64 bits
# Of every number of a workload, and of a row of a profile: what can be asked can be written. Heads of a dilated branch
# are told apart one by one: 2**16 of them take 2 s. The ring of 2**10 ranks takes 15 s to plan, with the square of
# their number, but a job that has more is not refused for it.
MOST = {
    "seq_len": LONGEST,
    "heads": 2**16,
    "kv_heads": 2**16,
    "head_dim": 2**16,
    "batch": LONGEST,
    "world": 2**10,
    "total_length": LONGEST,
    "packed_tokens": LONGEST,
    "window": LONGEST,
    "head_dim_v": 2**16,
}
LARGEST_SOFTCAP = 10**15
_MAY_BE_0 = ("total_length", "packed_tokens", "window", "head_dim_v")
MOST_BRANCHES = 64  # of a pattern: each has kernels of its own to launch

# bf16 holds more range than fp16 and fp16 more digits than bf16: neither is the wider one.
_NOT_NARROWER = {
    "bf16": ("bf16", "fp32"),
    "fp16": ("fp16", "fp32"),
    "fp32": ("fp32",),
    "fp64": ("fp64",),
}


def not_narrower(input_dtype: str) -> tuple[str, ...]:
    """Return the compute dtypes that hold what ``input_dtype`` does; TF32, which is for fp32, holds less than it."""
    return _NOT_NARROWER[input_dtype]


@dataclass(frozen=True, slots=True)
class Branch:
    """One branch of a pattern: segments of ``segment`` positions, every ``rate``-th of which is selected."""

    segment: int
    rate: int


@dataclass(frozen=True, slots=True)
class Pattern:
    """Positions that each head attends over. No branches means dense: one segment, every position.

    ``head_offset`` is the rule that gives a key/value head its first position in a segment: ``interleaved``
    is ``kv_head % rate`` (LongNet, arXiv:2307.02486, section 3.2), ``blocked`` is
    ``kv_head // ceil(Hkv / rate)`` (the rule of torchscale's implementation).
    """

    branches: tuple[Branch, ...] = ()
    head_offset: HeadOffset = "interleaved"

    def __post_init__(self) -> None:
        if self.head_offset not in ("interleaved", "blocked"):
            raise FieldError(f"is {self.head_offset!r}; use 'interleaved' or 'blocked'", field="head_offset")
        if len(self.branches) > MOST_BRANCHES:
            raise FieldError(f"has {len(self.branches)} entries; {MOST_BRANCHES} is the most", field="segment_lengths")
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
        """Return the pattern of two equally long lists, or dense for two ``None``; raises InputError otherwise."""
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

    @property
    def dilated(self) -> bool:
        """True where some branch leaves positions out, so that heads have offsets."""
        return any(branch.rate > 1 for branch in self.branches)

    def resolved(self, seq_len: int) -> tuple[Branch, ...]:
        """Return the branches for ``seq_len`` positions; dense is the one branch (seq_len, 1)."""
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

    Mode "decode" is one query of each sequence, its last position, over ``seq_len`` cached ones.
    ``seq_len`` is the local length on one of ``world`` ranks, ``dtype`` the input dtype by its short name.
    ``total_length`` is the length of the whole sequence, where it is not ``world * seq_len``. ``kv_heads=0`` means as
    many as query heads. Where ``packed_tokens`` is not 0, the question is about ``batch`` documents of at most
    ``seq_len`` positions, and so many together.
    In causal dense attention a position sees no more than ``window``, its own among them; ``softcap`` bounds the logits
    by its tanh; ``head_dim_v`` is the head dimension of v. 0 is none, and that of q and k. ``dropout`` is the
    probability that a weight is dropped in training.
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
    packed_tokens: int = field(default=0, metadata={"omit_default": True})
    window: int = field(default=0, metadata={"omit_default": True})
    softcap: float = field(default=0.0, metadata={"omit_default": True})
    head_dim_v: int = field(default=0, metadata={"omit_default": True})
    dropout: float = field(default=0.0, metadata={"omit_default": True})

    def __post_init__(self) -> None:
        if self.kv_heads == 0:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.mode not in ("train", "infer", "decode"):
            raise FieldError(f"is {self.mode!r}; use 'train', 'infer' or 'decode'", field="mode")
        if self.dtype not in INPUT_DTYPES:
            raise FieldError(f"is {self.dtype!r}; use one of {', '.join(INPUT_DTYPES)}", field="dtype")
        for name, most in MOST.items():
            least = 0 if name in _MAY_BE_0 else 1
            object.__setattr__(self, name, integer(name, getattr(self, name), least=least, most=most))
        fewest, most = self.seq_len + self.batch - 1, self.batch * self.seq_len
        if self.packed_tokens and not fewest <= self.packed_tokens <= most:
            of_them = f"{plural(self.batch, 'document')} of at most {self.seq_len} positions"
            raise FieldError(f"is {self.packed_tokens}; {of_them} have {fewest} to {most}", field="packed_tokens")
        if self.packed_tokens and self.decode:
            of_step = "and a step of decoding has one query of each sequence; leave it 0"
            raise FieldError(f"is {self.packed_tokens}, {of_step}", field="packed_tokens")
        if self.heads % self.kv_heads:
            raise FieldError(f"is {self.heads}, not a multiple of kv_heads, {self.kv_heads}", field="heads")
        check_score_options(self.causal, self.pattern, self.window, self.softcap)
        check_dropout("dropout", self.dropout)
        if self.dropout and not self.train:
            raise FieldError(f"is {self.dropout}, which is of training, and the mode {self.mode!r}", field="dropout")
        if self.head_dim_v == self.head_dim:
            object.__setattr__(self, "head_dim_v", 0)
        if self.head_dim_v and not self.pattern.dense:
            raise FieldError(
                f"is {self.head_dim_v} and head_dim {self.head_dim}; the branches of {self.pattern} are merged in one "
                "size, so pad the smaller with zeros",
                field="head_dim_v",
            )

    @property
    def train(self) -> bool:
        return self.mode == "train"

    @property
    def packed(self) -> bool:
        """True where it is about documents, of lengths that may differ."""
        return self.packed_tokens > 0

    @property
    def decode(self) -> bool:
        return self.mode == "decode"

    @property
    def not_probed(self) -> str:
        """What of it no probe measures, having neither a reference nor contenders for it; "" where one does."""
        asked = (
            ("sliding windows", self.window),
            ("softcaps", self.softcap),
            ("a head_dim_v", self.head_dim_v),
            ("dropout", self.dropout),
        )
        names = [name for name, value in asked if value]
        verb = "is" if names in (["a head_dim_v"], ["dropout"]) else "are"
        return f"{' and '.join(names)} {verb} not probed" if names else ""

    @property
    def total(self) -> int:
        """Positions of the whole sequence, on all ranks."""
        return self.total_length or self.world * self.seq_len

    @property
    def rows_of_tensors(self) -> int:
        """B of q, k and v: documents are packed into one row."""
        return 1 if self.packed else self.batch

    @property
    def positions_of_tensors(self) -> int:
        """S of q, k and v, on all ranks together."""
        return self.packed_tokens or self.total

    def at(self, seq_len: int) -> Workload:
        """Return the same question at another length; documents grow and shrink together."""
        scaled = round(self.packed_tokens * seq_len / self.seq_len)
        least, most = seq_len + self.batch - 1, self.batch * seq_len
        tokens = min(most, LONGEST, max(least, scaled)) if self.packed else 0
        return replace(self, seq_len=seq_len, packed_tokens=tokens)

    def __str__(self) -> str:
        world = f" world={self.world}" if self.world > 1 else ""
        packed = f" packed={self.packed_tokens}" if self.packed else ""
        shape = f"B{self.batch} S{self.seq_len} {head_words(self)} {self.dtype}"
        dropout = f" dropout={self.dropout:g}" if self.dropout else ""
        return f"{self.mode} {attention_words(self)}{dropout} {shape}{packed}{world}"


def attention_words(of: Any) -> str:
    """Return which keys a workload or a module's shape attends to, and how, in a few words."""
    return f"{of.pattern} {'causal' if of.causal else 'full'}{score_options(of)}"


def head_words(of: Any) -> str:
    """Return the heads and head dimension of a workload or a module's shape in two words."""
    heads = f"H{of.heads}" + (f"/{of.kv_heads}" if of.kv_heads != of.heads else "")
    return f"{heads} D{of.head_dim}" + (f"/{of.head_dim_v}" if of.head_dim_v else "")


def score_options(of: Any) -> str:
    """Return the window and softcap of a workload or a module's shape as text, each after a space."""
    window = f" window={of.window}" if of.window else ""
    return window + (f" softcap={of.softcap:g}" if of.softcap else "")


def check_score_options(causal: bool, pattern: Pattern, window: int, softcap: float) -> None:
    """Raise FieldError unless a sliding window and a softcap, 0 where there is none, make sense."""
    if window and not (causal and pattern.dense):
        raise FieldError(
            f"is {window}, which is for causal dense attention, and this is {pattern}"
            f"{'' if causal else ', not causal'}; FlexAttention has other windows",
            field="window",
        )
    is_number = isinstance(softcap, Real) and not isinstance(softcap, bool)
    if not is_number or not 0 <= softcap <= LARGEST_SOFTCAP:
        raise FieldError(
            f"is {softcap!r}; it must be a finite number > 0, or None for no cap, and <= {LARGEST_SOFTCAP}",
            field="softcap",
        )


def describe(tunables: Tunables) -> str:
    """Return one choice as a short line: what differs from branch to branch, then what is not the plainest value.

    >>> describe(Tunables("bf16", (BranchTunables("cudnn", "flash"),)))
    'cudnn/flash bf16'
    """
    return " ".join(word for word, _ in described_words(tunables))


PARAM_MEANING = "parameter of the kernel before the dot"


def described_words(tunables: Tunables) -> list[tuple[str, str]]:
    """Return the words of ``describe``, each with its meaning; "" for that of the kernels, which comes first."""
    names = [f"{b.forward}/{b.backward}" if b.backward else b.forward for b in tunables.branches]
    words = [(names[0] if len(set(names)) == 1 else ",".join(names), "")]
    words.append((tunables.dtype, TABLE["dtype"].meaning))
    words += [(word, entry.meaning) for entry in TABLE.values() if (word := entry.described(tunables))]
    words += [(f"{name}={value}", PARAM_MEANING) for name, value in tunables.params]
    return words


def kernels_described(description: str) -> frozenset[str]:
    """Return the kernels of the choice that ``describe`` wrote: how a profile names the candidates that failed."""
    pairs = description.partition(" ")[0].split(",")
    return frozenset(name for pair in pairs for name in pair.split("/") if name)


def nearest_bucket(seq_len: int, measured: Sequence[int]) -> int | None:
    """Return the measured length nearest to ``seq_len`` in log2, or None beyond [shortest/sqrt 2, longest*sqrt 2].

    Tuner and runtime both use this function. Ties go to the shorter length.
    """
    if not measured:
        return None
    lengths = sorted(measured)
    if seq_len * math.sqrt(2) < lengths[0] or seq_len > lengths[-1] * math.sqrt(2):
        return None
    return min(lengths, key=lambda n: (abs(math.log2(n) - math.log2(seq_len)), n))
