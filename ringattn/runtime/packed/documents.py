"""Reads where the documents of a batch lie, once for all layers of a model."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ringattn.arguments import integer, is_integer, is_list, shown
from ringattn.errors import InputError
from ringattn.geometry.documents import Document
from ringattn.wording import plural
from ringattn.workload import LONGEST, Workload


class Documents:
    """Documents of a batch on the host, to give a module in place of ``cu_seqlens`` or ``lengths``.

    Plans need the values on the host, and reading a tensor from a device waits for it. A model that makes one of these
    per batch waits once, whatever its number of layers. (So does one that hands every layer the same tensor object:
    what was read of a tensor is remembered until it is freed or written to.)

    Args:
        cu_seqlens: where the documents of a packed batch begin, and where the last one ends: integers that do not
            decrease and start at 0, a list or a tensor (N + 1,). Positions beyond the last are padding.
        lengths: positions that each sequence of a padded batch has, a list or a tensor (B,). Those beyond are padding.

    Raises:
        InputError: neither or both are given, or they hold something else.
    """

    __slots__ = ("_hash", "_placed", "padded", "tensor", "values")

    def __init__(self, cu_seqlens: Any = None, *, lengths: Any = None) -> None:
        if (cu_seqlens is None) == (lengths is None):
            raise InputError("give either cu_seqlens, of packed documents, or lengths, of padded sequences")
        self.padded = cu_seqlens is None
        given = lengths if self.padded else cu_seqlens
        self.values = (_lengths if self.padded else _bounds)(_on_host(self.name, given))
        self.tensor = torch.tensor(self.values, device="cpu")  # what a compiled graph takes
        self._hash = hash((self.padded, self.values))
        self._placed: dict[tuple[int, int], tuple[Document, ...]] = {}

    @property
    def name(self) -> str:
        """The argument that they are given by."""
        return "lengths" if self.padded else "cu_seqlens"

    @property
    def digest(self) -> str:
        """Short text that other documents do not have, the same in every process."""
        return f"{plural(len(self.values) - (not self.padded), 'document')} {self._hash & 0xFFFFFFFF:08x}"

    def placed(self, batch: int, length: int) -> tuple[Document, ...]:
        """Return the documents in a batch of so many sequences of this length; InputError where they do not fit."""
        placed = self._placed.get((batch, length))
        if placed is None:
            placed = self._placed[batch, length] = self._in_rows(batch, length)
        return placed

    def sizes(self, batch: int, length: int) -> tuple[int, int, int]:
        """Return the number of documents in such a batch, the longest one's positions, and those of all; at least 1."""
        sizes = [document.length for document in self.placed(batch, length)] or [1]
        return len(sizes), max(sizes), sum(sizes)

    def sized(self, workload: Workload, batch: int, length: int) -> Workload:
        """Return a workload with their sizes."""
        count, longest, tokens = self.sizes(batch, length)
        return replace(workload, batch=count, seq_len=longest, packed_tokens=tokens)

    def _in_rows(self, batch: int, length: int) -> tuple[Document, ...]:
        if self.padded:
            if len(self.values) != batch:
                raise InputError(f"lengths has {plural(len(self.values), 'entry')} and q batch size {batch}")
            if max(self.values) > length:
                raise InputError(f"lengths holds {max(self.values)}, and q has {plural(length, 'position')}")
            return tuple(Document(row, 0, count) for row, count in enumerate(self.values) if count)
        if batch != 1:
            raise InputError(f"cu_seqlens is for packed documents in one row, and q has batch size {batch}")
        if self.values[-1] > length:
            raise InputError(f"cu_seqlens ends at {self.values[-1]}, and q has {plural(length, 'position')}")
        ends = zip(self.values, self.values[1:], strict=False)
        return tuple(Document(0, begin, end) for begin, end in ends if begin < end)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Documents):
            return NotImplemented
        return self is other or (self._hash, self.padded, self.values) == (other._hash, other.padded, other.values)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Documents({'lengths=' if self.padded else ''}{list(self.values)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self.padded, self.values)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class Given(NamedTuple):
    """Documents as a graph holds them: ``values`` are cu_seqlens, or lengths where they are ``padded``."""

    values: Tensor | None = None
    padded: bool = False


NO_DOCUMENTS = Given()


def _one_of(cu_seqlens: Any, lengths: Any) -> tuple[Any, bool]:
    """Return the argument that is not None, and whether it is ``lengths``; InputError where both are given."""
    if cu_seqlens is not None and lengths is not None:
        raise InputError("cu_seqlens and lengths are both given; use the first for packed documents, else the other")
    return (lengths, True) if cu_seqlens is None else (cu_seqlens, False)


def given_of(cu_seqlens: Any, lengths: Any) -> Given:
    """Return the argument that is not None as a tensor, whose values nobody reads; torch.compile traces this."""
    if cu_seqlens is None and lengths is None:
        return NO_DOCUMENTS
    given, padded = _one_of(cu_seqlens, lengths)
    if isinstance(given, Documents):
        if given.padded != padded:
            raise InputError("the Documents are of the other argument, of cu_seqlens and lengths")
        return Given(given.tensor, padded)
    if not isinstance(given, Tensor):
        read = _lengths if padded else _bounds
        given = torch.tensor(read(_on_host("lengths" if padded else "cu_seqlens", given)), device="cpu")
    return Given(given, padded)


class Extent(NamedTuple):
    """Length over all ranks of a call's sequences, and documents in them, as far as the tensors do not say them."""

    total_length: int | None = None
    documents: Documents | None = None


TENSORS_ALONE = Extent()


def _made(padded: bool, values: tuple[int, ...]) -> Documents:
    return Documents(lengths=values) if padded else Documents(values)


# tensor: its version, whether it was lengths, and what was read of it
_read: MutableMapping[Tensor, tuple[int, bool, Documents]] = WeakIdKeyDictionary()


def documents_of(cu_seqlens: Any, lengths: Any) -> Documents:
    """Return the documents of a call's arguments, one of which is None; InputError where they make no sense."""
    given, padded = _one_of(cu_seqlens, lengths)
    if isinstance(given, Documents):
        if given.padded != padded:
            raise InputError(f"{'lengths' if padded else 'cu_seqlens'} is {given!r}; pass it as {given.name}")
        return given
    if not isinstance(given, Tensor) or given.is_inference():  # which counts no versions
        return Documents(lengths=given) if padded else Documents(given)
    known = _read.get(given)
    if known is None or known[:2] != (given._version, padded):
        made = Documents(lengths=given) if padded else Documents(given)
        known = _read[given] = given._version, padded, made
    return known[2]


def extent_of(total_length: Any, cu_seqlens: Any, lengths: Any) -> Extent:
    """Return what a call says of its sequences; InputError where it makes no sense."""
    alone = cu_seqlens is None and lengths is None
    if alone and total_length is None:
        return TENSORS_ALONE  # nearly every call, which makes nothing for it
    total = None if total_length is None else integer("total_length", total_length, most=LONGEST)
    if alone:
        return Extent(total)
    return Extent(total, documents_of(cu_seqlens, lengths))


def _on_host(name: str, given: Any) -> list[Any]:
    if isinstance(given, Tensor):
        if given.is_cuda and torch.cuda.is_current_stream_capturing():
            raise InputError(
                f"{name} is on {given.device}, and a CUDA graph cannot wait for its values; give Documents"
            )
        if given.dtype not in (torch.int32, torch.int64):
            raise InputError(f"{name} is a tensor of {given.dtype}; it must be torch.int32 or torch.int64")
        if given.is_meta:
            raise InputError(f"{name} is on meta, where tensors hold no data; give a list of integers, or Documents")
        if given.dim() != 1 or given.layout is not torch.strided:
            raise InputError(f"{name} has shape {tuple(given.shape)}; it must be a dense tensor with one dimension")
        values: list[Any] = given.tolist()
        return values
    if not is_list(given):
        raise InputError(f"{name} is {given!r}; give a list of integers, a tensor or Documents")
    return list(given)


def _bounds(values: Sequence[Any]) -> tuple[int, ...]:
    if len(values) < 2:
        raise InputError(f"cu_seqlens has {plural(len(values), 'entry')}; it needs the start and the end of a document")
    if not is_integer(values[0]) or values[0] != 0:
        raise InputError(f"cu_seqlens starts at {shown(values[0])}; it must start at 0")
    bounds = [0]
    for value in values[1:]:
        if not is_integer(value) or not bounds[-1] <= value <= LONGEST:
            raise InputError(
                f"cu_seqlens holds {shown(value)} after {bounds[-1]}; it must hold integers, none below the last and "
                "none over 2**40"
            )
        bounds.append(int(value))
    return tuple(bounds)


def _lengths(values: Sequence[Any]) -> tuple[int, ...]:
    if not values:
        raise InputError("lengths is empty; it must have an entry per sequence")
    return tuple(integer("lengths", value, least=0, most=LONGEST) for value in values)
