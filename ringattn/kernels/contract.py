"""Defines block kernels: the request, the reasons for refusing it, and the loaded kernel.

A block kernel attends over rectangular blocks that are full or causal-diagonal, returns the true log-sum-exp of
every row, and has a backward that takes the *merged* out and LSE. The checks are pure; ``load`` is the only part
that imports, once, when a plan is built.

A logit of -inf, as overflow or an infinite key makes it, has weight 0. A row that has no other gives out 0 and an LSE
of -inf, is nothing to a merge, and has no part in any gradient: its final LSE is -inf, and there exp(s - lse) counts 0.
A row with a logit of +inf or NaN is NaN in out, as in torch's softmax.

What is NaN instead, never a wrong number: gradients where a kernel multiplies 0 by an infinite element of q or k, as
torch's do (math leaves them out); and rows of FlashAttention 2 on full blocks whose last tiles of keys are all -inf,
and of CUTLASS in float32 beside any infinite key: only a wait for the device could tell them from true NaN.

Legend: N blocks, M rows, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, get_args

from ringattn.hardware.facts import HardwareFacts
from ringattn.versions import Release, release
from ringattn.workload import ParamValue, Pattern

if TYPE_CHECKING:
    from torch import Tensor


Feature = Literal["window", "softcap", "head_dim_v", "dropout"]
FEATURE_WORDS: Mapping[Feature, str] = {
    "window": "sliding window",
    "softcap": "softcap",
    "head_dim_v": "head_dim_v other than head_dim",
    "dropout": "dropout",
}

MOST_SEQUENCES = 65535  # CUDA's limit of the second and third grid dimension


@dataclass(frozen=True, slots=True)
class KernelNeed:
    """Request of one branch of a plan to a kernel.

    ``rows`` and ``blocks`` are those of its largest call, ``row_elements`` the distance between neighbouring rows of q
    where they are read in place, in elements. ``dtype`` is the compute dtype. ``queries``: so many query rows against
    ``rows`` keys, as in decoding; 0 is as many. ``software`` are the machine's (name, version) pairs, for rules that
    hold for some releases. ``packed_rows`` is 0, or the rows of all sequences of a call of the varlen entry, ``rows``
    and ``blocks`` then being those of the longest and their number. ``window`` is that of a sliding window,
    ``head_dim_v`` the head dimension of v; 0 is none, and that of q and k.
    """

    vendor: str
    arch: str
    dtype: str
    head_dim: int
    heads: int
    kv_heads: int
    rows: int
    blocks: int
    causal: bool
    backward: bool
    row_elements: int = 0
    deterministic: bool = False
    dropout: bool = False
    packed_rows: int = 0
    queries: int = 0
    window: int = 0
    softcap: bool = False
    head_dim_v: int = 0
    software: tuple[tuple[str, str], ...] = ()

    def release(self, name: str) -> Release | None:
        """Return the version of cudnn, torch or a package by its import name; None where it is not known."""
        return release(dict(self.software).get(name, ""))

    @property
    def features(self) -> tuple[Feature, ...]:
        """Name what is asked beyond plain and causal attention."""
        asked = {
            "window": self.window > 0,
            "softcap": self.softcap,
            "head_dim_v": self.head_dim_v not in (0, self.head_dim),
            "dropout": self.dropout,
        }
        return tuple(feature for feature in get_args(Feature) if asked[feature])

    @property
    def sm(self) -> int:
        """Compute capability as one number (90 for sm_90), 0 where there is none."""
        return int(self.arch.removeprefix("sm_")) if self.arch.startswith("sm_") else 0


Grads = tuple["Tensor", "Tensor", "Tensor"]


class Forward(Protocol):
    """Maps q (N, M, H, D), k and v (N, M, K, D) to out (N, M, H, D) and lse (N, H, M), natural log, fp32 or fp64."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor]: ...


class Backward(Protocol):
    """Maps dout, q, k, v and the merged out and lse to dq, dk, dv of the block.

    lse is contiguous; dout and out too, unless the kernel says ``strided_backward``.
    """

    def __call__(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, /) -> Grads: ...


class WritingBackward(Backward, Protocol):
    """Backward of a kernel that says ``writes_grads``: ``grads``, if given, are written into and returned.

    They may be strided.
    """

    def __call__(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, /, grads: Grads | None = None
    ) -> Grads: ...


class Differentiable(Protocol):
    """Maps the shape of q (N, M, H, D) to a forward that autograd differentiates by itself, or None.

    It is called with grad mode on and saves q, k, v, out and lse. Its own gradient is ``backward`` on them, for dout of
    any strides, and lse is not differentiable.
    """

    def __call__(self, shape: Sequence[int], /) -> Forward | None: ...


def not_differentiable(shape: Sequence[int], /) -> None:
    """Return None: gradients come from ``backward`` alone."""


@dataclass(frozen=True, slots=True)
class CachedRows:
    """Rows of a cache that exist, and the positions that they are. Tensors are (B,) int32, on the device.

    Sequence b has ``lengths[b]`` positions, of which the cache holds those from ``begins[b]`` on; the last
    ``counts[b]`` of them are its queries, and any further rows of q see nothing. None is every row of k, 0, and every
    row of q. A position sees those that ``pattern`` lets it see, of which no more than ``window``; None is no limit,
    and a number is for causal dense attention. ``most`` is the most rows that any sequence may have in the cache.
    """

    pattern: Pattern
    most: int
    lengths: Tensor | None = None
    begins: Tensor | None = None
    counts: Tensor | None = None
    window: int | None = None


class CachedForward(Protocol):
    """Maps q (B, Sq, H, D), k and v (B, S, K, D) to out (B, Sq, H, D) and lse (B, H, Sq), of whatever a cache holds.

    Nothing of it waits for the device, so that a CUDA graph can be replayed while sequences grow.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, rows: CachedRows, /) -> tuple[Tensor, Tensor]: ...


class BoundKernel(NamedTuple):
    """Kernel with causality, scale and parameters fixed: nothing is left to decide at a call.

    ``cached`` attends over a cache in one call; None where it is cut in blocks for ``forward``. ``one_query`` is the
    forward of blocks of one query and several keys; None where ``forward`` runs these as well as others.
    """

    forward: Forward
    backward: Backward
    differentiable: Differentiable = not_differentiable
    cached: CachedForward | None = None
    one_query: Forward | None = None


# Tensors that say which weights a forward dropped: a seed and an offset, or what else its kernel has in their place.
DropoutState = tuple["Tensor", ...]


class DropoutForward(Protocol):
    """Maps q, k and v to out, of weights some of which are dropped and the others divided by 1 - p, lse and the state.

    lse is that of all weights. What is dropped comes from torch's random numbers; see ``Forward`` for the shapes.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor, DropoutState]: ...


class DropoutBackward(Backward, Protocol):
    """Backward that is given the state of its forward; of an empty one nothing was dropped."""

    def __call__(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, state: DropoutState = (), /
    ) -> Grads: ...


class BoundDropout(NamedTuple):
    """Kernel with dropout, for one block whose out and LSE are final."""

    forward: DropoutForward
    backward: DropoutBackward


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """Packed sequences: number n is rows bounds[n] to bounds[n + 1], of which there are 1 to ``longest``.

    ``cu_seqlens`` are the bounds on the device, (N + 1,) int32. The first is 0, the last the number of rows.
    """

    bounds: tuple[int, ...]
    longest: int
    cu_seqlens: Tensor


class VarlenForward(Protocol):
    """Maps q (T, H, D), k and v (T, K, D) of packed sequences to out (T, H, D) and lse (H, T); see ``Forward``."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, /) -> tuple[Tensor, Tensor]: ...


class VarlenBackward(Protocol):
    """Maps dout, q, k, v and the merged out and lse of packed sequences to dq, dk, dv. lse is contiguous."""

    def __call__(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sequences: Sequences, /
    ) -> Grads: ...


class BoundVarlen(NamedTuple):
    """Varlen entry of a kernel with causality, scale and parameters fixed."""

    forward: VarlenForward
    backward: VarlenBackward


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Everything that is fixed when a kernel is bound.

    ``dtype`` is the compute dtype: fp32 and tf32 tensors look alike, and a kernel that has both takes fp32 if it is "".
    A causal row sees the last ``window`` keys up to its own, all of them if that is 0; logits s become
    ``softcap * tanh(s / softcap)``, unless that is 0. ``dropout`` is the probability that a weight is dropped.
    """

    causal: bool
    scale: float
    deterministic: bool = False
    params: Mapping[str, ParamValue] = field(default_factory=dict)
    dtype: str = ""
    window: int = 0
    softcap: float = 0.0
    dropout: float = 0.0


Params = Mapping[str, tuple[ParamValue, ...]]


@dataclass(frozen=True, slots=True)
class BlockKernel:
    """Entry of the table of kernels.

    ``reasons`` is pure and empty when the kernel can run; ``package`` is the import name it needs ("" for torch
    itself). ``params`` lists, per direction and architecture, the values worth searching; the first is the default.
    ``load_varlen`` binds its entry for packed sequences, if it has one, and ``load_dropout`` it with dropout, for one
    block. ``features`` are what it does exactly, both ways, beyond plain and causal attention, and but for dropout by
    either entry.
    ``strided_backward``: its backward reads dout and out in any layout whose last stride is 1; ``writes_grads``: it
    can write gradients where it is told; ``just_in_time``: it is compiled at its first call, which takes seconds;
    ``reads_caches``: it has a ``cached``; ``reads_out_of_bounds``: of what it refuses, where it is known to touch
    memory that is not its own, so that not even
    a process of its own should try it.
    """

    name: str
    package: str
    reasons: Callable[[KernelNeed], tuple[str, ...]]
    load: Callable[[KernelConfig], BoundKernel]
    params: Callable[[KernelNeed], Params] = lambda need: {}
    remedy: str = ""
    strided_backward: bool = False
    writes_grads: bool = False
    just_in_time: bool = False
    reads_caches: bool = False
    reads_out_of_bounds: Callable[[KernelNeed], bool] = lambda need: False
    load_varlen: Callable[[KernelConfig], BoundVarlen] | None = None
    load_dropout: Callable[[KernelConfig], BoundDropout] | None = None
    features: frozenset[Feature] = frozenset()

    def unsupported_reasons(self, need: KernelNeed, facts: HardwareFacts) -> tuple[str, ...]:
        """Return why this kernel cannot serve ``need`` on the machine of ``facts``; empty when it can."""
        if need.packed_rows and self.load_varlen is None:
            return ("has no entry for packed sequences",)
        if need.packed_rows and need.blocks > MOST_SEQUENCES:
            return (f"{need.blocks} packed sequences; a launch grid ends at {MOST_SEQUENCES}",)
        reasons = self.reasons(replace(need, software=facts.software))
        if self.package and not reasons and self.package not in facts.packages:
            reasons += (f"the package {self.package} is not installed" + (f" ({self.remedy})" if self.remedy else ""),)
        return reasons
