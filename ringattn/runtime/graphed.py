"""Replays a plan's launches from CUDA graphs, for shapes that repeat.

A call costs the host one launch a step and the Python between them: 2 to 3 ms for a training step of LongNet's five
branches on an H200's host, where the device needs 0.25 ms at 1024 positions. A graph of them is one launch. Inputs are
copied into tensors of the graph and results out of them, so that any number of calls may be in flight, in any order.

A shape is captured when it comes for the second time; the first call runs as without graphs. The backward of the
latest forward finds everything but dout where that left it, and copies no more. While another capture is
under way, as inside ``torch.cuda.graph``, every call runs so.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ringattn.kernels.contract import not_differentiable
from ringattn.planning.plan import Plan

from .executor import ALL, Grads, Kept, Wanted
from .program import Program

# Directions of shapes that a program keeps captured; who meets more captures the least recently used anew, in 50 ms.
MOST_GRAPHS = 16
# Calls of a shape before all of it is replayed: the forward runs, is captured, and its backward after that.
CALLS_BEFORE_REPLAY = 3

Step = Callable[..., Sequence[Tensor]]
Key = tuple[object, ...]


class _Pool:
    """Memory pool of graphs, which live no longer than it does."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()


class _Device:
    """Memory pool that the graphs of a device share, and the stream that was the last to replay one.

    Temporary memory of one graph is reused by the next, so they never run side by side.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.RLock()
        self._pool: weakref.ref[_Pool] | None = None
        self._last: torch.cuda.Stream | None = None

    def pool(self) -> _Pool:
        """Return the pool of the graphs that there are, or a new one: torch refuses a pool whose last graph is gone."""
        found = None if self._pool is None else self._pool()
        if found is None:
            found = _Pool()
            self._pool = weakref.ref(found)
        return found

    def take_turn(self) -> None:
        """Let the current stream wait for what another one replayed."""
        stream = torch.cuda.current_stream(self.device)
        if self._last is not None and self._last != stream:
            stream.wait_stream(self._last)
        self._last = stream

    def finish(self) -> None:
        """Wait until nothing is being replayed: what a running graph uses may not be freed."""
        if self._last is not None:
            self._last.synchronize()


_devices: dict[torch.device, _Device] = {}
_devices_lock = threading.Lock()


def _shared(device: torch.device) -> _Device:
    with _devices_lock:
        if device not in _devices:
            _devices[device] = _Device(device)
        return _devices[device]


class _Graph:
    """One direction of one shape, captured. ``held_bytes`` is what it keeps allocated, temporary memory included.

    ``inputs`` are copied at every replay; ``placed`` are tensors of another graph, read where they are.
    """

    def __init__(self, step: Step, inputs: Sequence[Tensor], placed: Sequence[Tensor], shared: _Device) -> None:
        self.inputs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs]
        self._placed = placed  # alive as long as what reads them
        _copy(inputs, self.inputs)
        step(*self.inputs, *placed)  # kernels are compiled for these strides outside of the capture
        before = torch.cuda.memory_reserved(shared.device)
        self._pool = shared.pool()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=self._pool.handle, capture_error_mode="thread_local"):
            self.results = list(step(*self.inputs, *placed))
        grown = max(0, torch.cuda.memory_reserved(shared.device) - before)
        held = sum(x.untyped_storage().nbytes() for x in self.inputs)
        self.held_bytes = held + max(grown, sum(x.untyped_storage().nbytes() for x in self.results))

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        _copy(inputs, self.inputs)
        self._graph.replay()
        results = [torch.empty_like(x) for x in self.results]
        _copy(self.results, results)
        return results


class GraphedProgram(Program):
    """Program whose calls are replayed. It keeps q, k, v, out and lse for the backward (checkpoint selective)."""

    def __init__(self, plan: Plan, scale: float) -> None:
        super().__init__(plan, scale)
        assert plan.tunables.keeps_inputs_and_results
        self.differentiable = not_differentiable
        self._graphs: OrderedDict[Key, _Graph | None] = OrderedDict()  # None: met once
        # The graph that ran the latest forward, and the address of the out that was copied from it
        self._latest: tuple[_Graph, int] | None = None

    def without_graphs(self) -> Program:
        """Return the program that launches the same steps one by one."""
        return Program(self.plan, self._scale)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kept: Kept | None = None) -> tuple[Tensor, Tensor]:
        assert kept is None
        run, inputs = super().attend, (q, k, v)
        self._latest = None
        if torch.cuda.is_current_stream_capturing():
            return run(*inputs)
        shared = _shared(q.device)
        with shared.lock, torch.cuda.device(q.device):
            graph = self._graph(_key("forward", inputs), run, inputs, (), shared)
            if graph is None:
                return run(*inputs)
            out, lse = graph.replay(inputs)
            self._latest = graph, out.data_ptr()
        return out, lse

    def gradients(
        self, dout: Tensor | None, saved: Sequence[Tensor], wanted: Wanted = ALL, dlse: Tensor | None = None
    ) -> Grads:
        run = super().gradients
        # A loss of lse is rare, and its scaling is a matter of the call.
        if dout is None or dlse is not None or torch.cuda.is_current_stream_capturing():
            return run(dout, saved, wanted, dlse)

        def step(dout: Tensor, *saved: Tensor) -> list[Tensor]:
            return [grad for grad in run(dout, saved, wanted) if grad is not None]

        q, out = saved[0], saved[3]
        shared = _shared(q.device)
        with shared.lock, torch.cuda.device(q.device):
            inputs: tuple[Tensor, ...] = (dout, *saved)
            placed: Sequence[Tensor] = ()
            key = _key(wanted, inputs)
            latest = self._latest  # read once: a forward in another thread forgets it before it waits for the lock
            if latest is not None and latest[1] == out.data_ptr() and out.numel():
                # Of the latest forward, as in a training loop of one call, its graph still holds all but dout.
                forward = latest[0]
                inputs, placed, key = (dout,), (*forward.inputs, *forward.results), (forward, *key)
            graph = self._graph(key, step, inputs, placed, shared)
            found = iter(step(dout, *saved) if graph is None else graph.replay(inputs))
        dq, dk, dv = (next(found) if each else None for each in wanted)
        return dq, dk, dv

    def held_bytes(self) -> int:
        """Return the bytes that captured graphs keep allocated between calls."""
        return sum(graph.held_bytes for graph in self._graphs.values() if graph is not None)

    def _graph(
        self, key: Key, step: Step, inputs: Sequence[Tensor], placed: Sequence[Tensor], shared: _Device
    ) -> _Graph | None:
        """Return the graph of a key, captured when it is asked for the second time; None the first time."""
        shared.take_turn()
        if key not in self._graphs:
            self._graphs[key] = None
            if len(self._graphs) > MOST_GRAPHS:
                shared.finish()
                self._graphs.popitem(last=False)
            return None
        graph = self._graphs[key]
        if graph is None:
            graph = self._graphs[key] = _Graph(step, inputs, placed, shared)
        self._graphs.move_to_end(key)
        return graph


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy in one launch where the dtypes are one; torch takes a slower way for lists of several."""
    if len({x.dtype for x in sources}) == 1:
        torch._foreach_copy_(list(targets), list(sources))
        return
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def _key(what: object, inputs: Sequence[Tensor]) -> Key:
    return (what, inputs[0].device, *((x.shape, x.dtype) for x in inputs))


def load_program(plan: Plan, scale: float, *, ranges: bool = False) -> Program:
    """Return the program of a plan on one device, launched as the plan says; step by step with named ranges."""
    if plan.tunables.launch == "graph" and not ranges:
        return GraphedProgram(plan, scale)
    return Program(plan, scale, ranges=ranges)
