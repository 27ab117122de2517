"""Context of a module over several ranks: the group, the layout, and every call kept in step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn.arguments import integer
from ringattn.errors import InputError, RingAttentionError
from ringattn.geometry.documents import document_shards, positions_in
from ringattn.geometry.layout import Shard, assemble, check_dim, length_of, shards_of
from ringattn.hardware.facts import HardwareFacts
from ringattn.planning.module_setup import ModuleSetup
from ringattn.planning.plan import Plan
from ringattn.planning.table import ModuleShape, PlanTable
from ringattn.profile.schema import PlanEntry
from ringattn.runtime.packed.documents import TENSORS_ALONE, Documents, Extent
from ringattn.wording import plural

from .agreement import plan_together, tell_of_error
from .comm import Comm
from .peer_errors import BY_THE_PLAN, is_known, sequence_number
from .program import RingProgram
from .symmetric_exchange import BufferPool
from .watchdog import watchdog_of


def group_of(process_group: Any) -> dist.ProcessGroup:
    """Return the group of a ProcessGroup or a one-dimensional DeviceMesh."""
    group: dist.ProcessGroup = getattr(process_group, "get_group", lambda: process_group)()
    return group


class RingContext:
    """One module's part in a group. Not copied with a module: copies share it."""

    def __init__(self, process_group: Any, device: torch.device) -> None:
        group = group_of(process_group)
        self.comm = Comm(group)
        self._device = device
        self.watchdog = watchdog_of(group, device)
        self.module = self.watchdog.new_module()
        self.layout = ""  # until ranks have agreed on it
        self._calls = 0
        self._compared = 0  # the last call that ranks compared
        self._signature: tuple[Any, ...] = ()  # of that call
        self._description = ""
        self._resolved = False  # whether the other ranks know what this one resolved
        self.shards = lru_cache(maxsize=1024)(lambda total: shards_of(self.layout, total, self.comm.size))

    def shard(self, total: int) -> Shard:
        shards: tuple[Shard, ...] = self.shards(total)
        return shards[self.comm.rank]

    def shards_over(self, total: int, documents: Documents | None) -> tuple[Shard, ...]:
        """Return what each rank holds of a row of so many positions, which may be packed documents."""
        if documents is None or documents.padded or self.layout == "contiguous":
            shards: tuple[Shard, ...] = self.shards(total)
            return shards
        shards = document_shards(documents.placed(1, total), total, self.comm.size)
        if not all(shards):
            raise InputError(
                f"zigzag layout over {self.comm.size} ranks would leave a rank nothing of {documents!r}; use "
                "layout='contiguous', or fewer ranks"
            )
        return shards

    def total_of(self, local_length: int, extent: Extent = TENSORS_ALONE) -> int:
        """Return the length of the whole sequence; InputError where this rank's shard of it has another length."""
        even = local_length * self.comm.size
        if extent == TENSORS_ALONE:
            return even
        total_length = even if extent.total_length is None else integer("total_length", extent.total_length)
        expected = length_of(self.shards_over(total_length, extent.documents)[self.comm.rank])
        if local_length != expected:
            raise InputError(
                f"the sequence has {plural(local_length, 'position')} here; of total_length {total_length} rank "
                f"{self.comm.rank} of {self.comm.size} holds {expected} in {self.layout} layout"
            )
        return total_length

    def enter(
        self,
        q: Tensor,
        train: bool,
        extent: Extent,
        narrow: torch.dtype | None,
        planned: Callable[[Tensor, bool, Extent, torch.dtype | None], str],
        *,
        sinks: bool = False,
    ) -> None:
        """Begin a call with ``q``: where it differs from the last, ranks wait for each other and compare.

        ``narrow`` is the dtype that autocast has the inputs converted to. ``planned`` describes the plan that this
        rank runs them by: a kernel that is wrong on one rank alone must not leave ranks with different plans.
        """

        def describe() -> str:
            with_sinks = ", with sinks" * sinks
            return (
                self._describe(q, train, extent, narrow) + with_sinks + BY_THE_PLAN + planned(q, train, extent, narrow)
            )

        self.enter_as((q.shape[:2], q.dtype, train, extent, narrow, sinks), describe)

    def enter_as(self, signature: tuple[Any, ...], describe: Callable[[], str]) -> None:
        """Begin a call of this signature, which ranks compare by its description where it differs from the last."""
        if signature == self._signature:
            self.watchdog.begin(self.module, self._calls, self._description)
            return
        description = describe()
        self._compare(description)
        self._signature, self._description = signature, description

    def gather_alike(self, x: Tensor, of: Callable[[], str]) -> list[Tensor]:
        """Return every rank's tensor, all of the shape of ``x``, in the order of ranks: the one message of a call.

        ``of`` says what must be equal on all ranks beside that shape; it is compared where the order of calls is.
        """
        with self.watchdog.reporting():
            self.watchdog.compare_order(self.comm, sequence_number(self.module, self._calls, backward=False), of)
            parts = self.gather_equal(x)
        self.watchdog.check()
        return parts

    def replanned(self) -> None:
        """Have the next call compared, whatever its inputs: this rank's plans have changed."""
        self._signature = ()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count a call. One that this rank does not begin aborts the group: others may wait for its messages."""
        self._calls += 1
        with self.watchdog.reporting():
            yield

    def _compare(self, description: str) -> None:
        """Wait until every rank begins this call, and raise on all of them where one describes another."""
        self.watchdog.begin(self.module, self._calls, description)
        self.watchdog.compare(self.module, self._calls, description)
        if self._compared:
            self.watchdog.forget(self.module, self._compared)
        self._compared = self._calls

    def _describe(self, q: Tensor, train: bool, extent: Extent, narrow: torch.dtype | None) -> str:
        """Return the description of a call's inputs, the same on every rank of a right one."""
        total = self.total_of(q.shape[1], extent)
        length = plural(q.shape[1], "position") if extent.total_length is None else "a shard"
        dtype = str(q.dtype)[6:] + (f" under autocast to {str(narrow)[6:]}" if narrow else "")
        gradients = "with" if train else "without"
        packed = "" if extent.documents is None else f"{extent.documents.digest}, "
        return f"calls with batch {q.shape[0]}, {length} of {total} in all, {packed}{dtype}, {gradients} gradients"

    def plan_together(
        self,
        resolve: Callable[[], tuple[ModuleSetup, PlanTable]],
        layout_with: Callable[[Sequence[PlanEntry], HardwareFacts], str],
        shape: ModuleShape,
        asked: Mapping[str, Any],
    ) -> tuple[ModuleSetup, PlanTable]:
        """Return the plans that every rank runs, and set the layout; see ``agreement``. ``asked`` must be equal."""
        named = {field.name: str(getattr(shape, field.name)) for field in fields(shape)}
        arguments = (*named.items(), *((name, str(value)) for name, value in asked.items()))
        self._resolved = True
        setup, table = plan_together(self.watchdog, self.comm.group, self.module, arguments, resolve, layout_with)
        self.layout = table.conditions.layout
        return setup, table

    def not_built(self, error: Exception) -> None:
        """Tell the other ranks, which wait for what this one resolves, of an error that they do not know."""
        if self._resolved or is_known(error):
            self.watchdog.report(error)
        else:
            tell_of_error(self.watchdog, self.comm.group, self.module, error)

    def planned(self, batch: int, local_length: int, extent: Extent) -> tuple[int, int, int]:
        """Return the batch, local length and packed tokens that plans are looked up by, the same on every rank."""
        size = self.comm.size
        total = self.total_of(local_length, extent)
        if extent.documents is None:
            return batch, -(-total // size), 0
        count, longest, positions = extent.documents.sizes(batch, total)
        share = max(2, -(-longest // size))  # of which every layout leaves every rank something
        return count, share, min(count * share, max(share + count - 1, -(-positions // size)))

    def over(self, program: RingProgram, batch: int, local_length: int, extent: Extent) -> RingProgram:
        """Return ``program`` for the documents of a call."""
        assert extent.documents is not None
        total = self.total_of(local_length, extent)
        placed = extent.documents.placed(batch, total)
        padded = positions_in(placed) < batch * total
        return program.over(placed, self.shards_over(total, extent.documents), padded)

    def program(self, plan: Plan, scale: float, *, ranges: bool = False) -> RingProgram:
        """Return the program of a plan, with named ranges around its steps or without."""
        batch = plan.workload.batch
        shards = () if plan.workload.packed else self.shards(plan.workload.total)
        return RingProgram(
            plan, scale, self.comm, shards, batch, self.watchdog, self.module, lambda: self._calls, self._buffer_pool,
            ranges=ranges,
        )  # fmt: skip

    def _buffer_pool(self) -> BufferPool:
        from .peer_memory import buffer_pool_of

        return buffer_pool_of(self.comm.group, self._device, self.watchdog)

    def begin_map(self, what: str, q: Tensor, extent: Extent, narrow: torch.dtype | None) -> int:
        """Begin a call that asks for ``what`` of these inputs, which ranks always compare; return the whole length."""
        self._compare(f"{what}: {self._describe(q, True, extent, narrow)}")
        return self.total_of(q.shape[1], extent)

    def gather_equal(self, x: Tensor) -> list[Tensor]:
        """Return every rank's tensor, which has one shape on all, in the order of ranks."""
        return self.comm.gather_rows(x, [tuple(x.shape)] * self.comm.size)

    def unshard(self, x: Tensor, extent: Extent, dim: int) -> Tensor:
        """Return every rank's rows in order. They compare first: messages of unequal sizes end a process."""
        with self.call():
            check_dim(x, dim)
            total = self.total_of(x.shape[dim], extent)
            dim %= x.ndim
            shape = ", ".join("rows" if number == dim else str(n) for number, n in enumerate(x.shape))
            self._compare(f"unshards {plural(total, 'position')} in all, of ({shape}) in {str(x.dtype)[6:]}")
            shards = self.shards_over(total, extent.documents)
            sizes = [(*x.shape[:dim], length_of(shard), *x.shape[dim + 1 :]) for shard in shards]
            return assemble(self.comm.gather_rows(x, sizes), shards, dim)

    def __deepcopy__(self, memo: dict[int, Any]) -> RingContext:
        return self

    def __reduce__(self) -> Any:
        raise RingAttentionError(
            "a RingAttention over several ranks cannot be pickled: a process group belongs to its process; "
            "save its arguments, or its state_dict"
        )
