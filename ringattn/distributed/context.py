"""What a module over several ranks has beside its plans: the group, the layout, and every call kept in step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn.arguments import integer
from ringattn.errors import InputError, RingAttentionError
from ringattn.geometry.layout import Share, assemble, check_dim, length_of, shares
from ringattn.hardware.facts import HardwareFacts
from ringattn.planning.plan import Plan
from ringattn.planning.setup import Setup
from ringattn.planning.table import ModuleShape, PlanTable
from ringattn.profile.schema import PlanEntry
from ringattn.wording import plural

from .agreement import plan_together
from .comm import Comm, CommError
from .peer_errors import BY_THE_PLAN
from .program import RingProgram
from .symmetric_exchange import BlockPool
from .watchdog import watch_of

Runner = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class RingContext:
    """One module's part in a group. Not copied with a module: copies share it."""

    def __init__(self, process_group: Any, device: torch.device) -> None:
        group: dist.ProcessGroup = getattr(process_group, "get_group", lambda: process_group)()
        self.comm = Comm(group)
        self._device = device
        self.watch = watch_of(group, device)
        self.module = self.watch.new_module()
        self.layout = ""  # until ranks have agreed on it
        self._calls = 0
        self._agreed = 0  # the last call that ranks compared
        self._looks: tuple[Any, ...] = ()
        self._last: Callable[[], object] = lambda: None  # the messages of the last call that ranks compared
        self._told = ""  # the same in words
        self.parts = lru_cache(maxsize=1024)(lambda total: shares(self.layout, total, self.comm.size))

    def share(self, total: int) -> Share:
        parts: tuple[Share, ...] = self.parts(total)
        return parts[self.comm.rank]

    def total_of(self, local_length: int, total_length: int | None) -> int:
        """Positions of the whole sequence; InputError where this rank's share of it has another length."""
        if total_length is None:
            return local_length * self.comm.size
        total_length = integer("total_length", total_length)
        expected = length_of(self.share(total_length))
        if local_length != expected:
            raise InputError(
                f"the sequence has {plural(local_length, 'position')} here; of total_length {total_length} rank "
                f"{self.comm.rank} of {self.comm.size} holds {expected} in {self.layout} layout"
            )
        return total_length

    def enter(
        self,
        inputs: Sequence[Tensor],
        run: Runner,
        train: bool,
        total_length: int | None,
        narrow: torch.dtype | None,
        planned: Callable[[Tensor, bool, int | None, torch.dtype | None], str],
    ) -> None:
        """Begins a call, which ``run`` is: where it differs from the last, ranks wait for each other and compare.

        ``narrow`` is the dtype that autocast has the inputs, q, k and v, converted to. ``planned`` says what plan this
        rank runs them by: a kernel that is wrong on one rank alone must not leave ranks with different plans.
        """
        q = inputs[0]
        looks = (q.shape[:2], q.dtype, train, total_length, narrow)
        if looks == self._looks:
            self.watch.begin(self.module, self._calls, self._told)
            return
        told = self._text(q, train, total_length, narrow) + BY_THE_PLAN + planned(q, train, total_length, narrow)
        self._compare(told)
        self._told, self._looks = told, looks
        self._last = partial(_run_on_zeros, run, tuple(x.shape for x in inputs), q.dtype, q.device)

    def replanned(self) -> None:
        """This rank's plans have changed: the next call is compared, whatever it looks like."""
        self._looks = ()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Counts a call. One that this rank does not begin is told to the others, who may be in its messages."""
        self._calls += 1
        try:
            yield
        except Exception as error:
            self.watch.miss(error, (self.module, self._calls), self._last)
            raise

    def _compare(self, told: str) -> None:
        """Waits until every rank begins this call, and raises on all of them where one tells something else."""
        self.watch.begin(self.module, self._calls, told, comparing=True)
        self.watch.lockstep(self.module, self._calls, told)
        if self._agreed:
            self.watch.forget(self.module, self._agreed)
        self._agreed = self._calls

    def _text(self, q: Tensor, train: bool, total_length: int | None, narrow: torch.dtype | None) -> str:
        """What a call looks like, the same on every rank of a right one."""
        total = self.total_of(q.shape[1], total_length)
        length = plural(q.shape[1], "position") if total_length is None else "a share"
        dtype = str(q.dtype)[6:] + (f" under autocast to {str(narrow)[6:]}" if narrow else "")
        gradients = "with" if train else "without"
        return f"calls with batch {q.shape[0]}, {length} of {total} in all, {dtype}, {gradients} gradients"

    def plan_together(
        self,
        resolve: Callable[[], tuple[Setup, PlanTable]],
        layout_with: Callable[[Sequence[PlanEntry], HardwareFacts], str],
        shape: ModuleShape,
        asked: Mapping[str, Any],
    ) -> tuple[Setup, PlanTable]:
        """The plans that every rank runs, and with them the layout; see ``agreement``. ``asked`` must be equal, too."""
        named = {field.name: str(getattr(shape, field.name)) for field in fields(shape)}
        arguments = (*named.items(), *((name, str(value)) for name, value in asked.items()))
        setup, table = plan_together(self.watch, self.comm.group, self.module, arguments, resolve, layout_with)
        self.layout = table.conditions.layout
        return setup, table

    def planned_length(self, local_length: int, total_length: int | None) -> int:
        """The local length that plans are looked up by: the same on every rank, also where lengths differ."""
        return -(-self.total_of(local_length, total_length) // self.comm.size)

    def program(self, plan: Plan, scale: float) -> RingProgram:
        parts, batch = self.parts(plan.workload.total), plan.workload.batch
        return RingProgram(
            plan, scale, self.comm, parts, batch, self.watch, self.module, lambda: self._calls, self._blocks
        )

    def _blocks(self) -> BlockPool:
        from .peer_memory import blocks_of

        return blocks_of(self.comm.group, self._device, self.watch)

    def unshard(self, x: Tensor, total_length: int | None, dim: int) -> Tensor:
        """Every rank's rows in order. Ranks compare what they hold first: messages of unequal sizes end a process."""
        with self.call():
            check_dim(x, dim)
            total = self.total_of(x.shape[dim], total_length)
            dim %= x.ndim
            shape = ", ".join("rows" if number == dim else str(n) for number, n in enumerate(x.shape))
            self._compare(f"unshards {plural(total, 'position')} in all, of ({shape}) in {str(x.dtype)[6:]}")
        parts = self.parts(total)
        sizes = [(*x.shape[:dim], length_of(part), *x.shape[dim + 1 :]) for part in parts]
        try:
            return assemble(self.comm.gather_rows(x, sizes), parts, dim)
        except CommError as error:
            raise self.watch.lost(error) from error

    @staticmethod
    def outside_graphs(call: Callable[..., tuple[Tensor, Tensor]], *arguments: Any) -> tuple[Tensor, Tensor]:
        """A call that torch.compile leaves alone: a graph breaks around it."""
        if torch.compiler.is_compiling():
            # Not as a decorator: that imports torch._dynamo, 1.1 of the 3 s in which a rank starts.
            call = torch.compiler.disable(call)  # type: ignore[no-untyped-call]
        return call(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> RingContext:
        return self

    def __reduce__(self) -> Any:
        raise RingAttentionError(
            "a RingAttention over several ranks cannot be pickled: a process group belongs to its process; "
            "save its arguments, or its state_dict"
        )


def _run_on_zeros(run: Runner, shapes: Sequence[torch.Size], dtype: torch.dtype, device: torch.device) -> None:
    with torch.no_grad():
        run(*(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes))
