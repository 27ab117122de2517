"""Nothing hangs: whatever goes wrong on one rank, the others name it within the group's timeout and 5 s."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import Case, assert_equal_to, exact, pattern_of
from pool import Pool
from ring_cases import RingCase, run_ring

from ringattn import RingAttention
from ringattn.block_kernel import BoundKernel
from ringattn.comm import Comm, Message
from ringattn.kernels import KERNELS
from ringattn.watch import BEAT_S, _gone, _leave

TIMEOUT_S = 6.0
CASE = Case(24, 6, 3, 4, causal=True)
Told = tuple[str, str, float]  # (error, its message, seconds until it was raised)


@pytest.fixture
def fragile() -> Iterator[Pool]:
    """Three ranks that a test may break."""
    pool = Pool(3, TIMEOUT_S)
    yield pool
    pool.kill()


def _told(step: Callable[[], object]) -> Told:
    begin = time.monotonic()
    try:
        step()
    except Exception as error:  # noqa: BLE001  the test looks at it
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", time.monotonic() - begin


def _leaves(module: RingAttention, case: Case = CASE) -> list[torch.Tensor]:
    return [module.shard(x.detach()).clone().requires_grad_() for x in case.inputs()]


def _assert_works(schedule: str = "ring") -> None:
    ring = RingCase(CASE, schedule, "zigzag")
    q, k, v = CASE.inputs()
    assert_equal_to(run_ring(ring, ring.module(), q, k, v, CASE.dout()), exact(CASE, q, k, v, CASE.dout()))


# --- a rank dies -------------------------------------------------------------------------------------------------


def _die_or_call(schedule: str, backward: bool) -> Told:
    module = RingCase(CASE, schedule, "zigzag").module()
    leaves = _leaves(module)
    out = module(*leaves)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    told = _told((lambda: out.sum().backward()) if backward else (lambda: module(*leaves)))
    again = _told(lambda: module(*leaves))
    assert again[:2] == told[:2], "the group is of no use any more"
    assert again[2] < 1
    return told


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("schedule", ["ring", "ulysses"])
def test_a_killed_rank_is_named(schedule: str, backward: bool, fragile: Pool) -> None:
    fragile.start(_die_or_call, schedule, backward)
    for error, message, seconds in fragile.results_of([0, 2], TIMEOUT_S + 10):
        assert error == "PeerError"
        assert "rank 1 stopped responding" in message
        assert seconds < TIMEOUT_S + 5


def _die_or_unshard() -> Told:
    """After ranks have compared what they unshard."""
    module = RingCase(CASE, "ring", "zigzag").module()
    assert module._ring is not None
    rows = _leaves(module)[0].detach()
    if dist.get_rank() == 1:
        module._ring.comm.gather_rows = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    return _told(lambda: module.unshard(rows))


def test_a_rank_killed_while_rows_are_unsharded_is_named(fragile: Pool) -> None:
    fragile.start(_die_or_unshard)
    for error, message, seconds in fragile.results_of([0, 2], TIMEOUT_S + 10):
        assert error == "PeerError"
        assert "rank 1 stopped responding" in message
        assert seconds < TIMEOUT_S + 5


def _die_or_listen() -> list[str]:
    """What the log says while this rank does something else."""
    RingCase(CASE, "ring", "zigzag").module()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ringattn").addHandler(handler)
    time.sleep(2 * BEAT_S)  # it has beaten
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + TIMEOUT_S + 4
    while not said and time.monotonic() < deadline:
        time.sleep(0.05)
    return said


def test_a_killed_rank_is_named_where_nobody_waits_for_it(fragile: Pool) -> None:
    """By the thread, that is: the main one may sit in a call of a GPU."""
    fragile.start(_die_or_listen)
    assert fragile.results_of([0, 2], TIMEOUT_S + 10) == [[f"rank 1 {_gone('')}"]] * 2


def _leave_or_call() -> Told:
    module = RingCase(CASE, "ring", "zigzag").module()
    leaves = _leaves(module)
    module(*leaves)
    dist.barrier()
    if dist.get_rank() == 1:
        _leave()
        os._exit(0)
    return _told(lambda: module(*leaves))


def test_a_rank_that_ended_by_itself_is_not_called_killed(fragile: Pool) -> None:
    fragile.start(_leave_or_call)
    for error, message, seconds in fragile.results_of([0, 2], TIMEOUT_S + 10):
        assert error == "PeerError"
        assert "rank 1 has left: its process ended" in message
        assert seconds < TIMEOUT_S + 5


def _build_or_die() -> Told:
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return _told(lambda: RingCase(CASE, "ring", "zigzag").module())


def test_a_rank_that_is_not_there_at_init_is_named(fragile: Pool) -> None:
    fragile.start(_build_or_die)
    for error, message, seconds in fragile.results_of([0, 1], TIMEOUT_S + 10):
        assert error == "PeerError"
        assert "rank 2 did not build the same RingAttention" in message
        assert seconds < TIMEOUT_S + 5


def _sleep_or_call(calls_before: int) -> Told:
    module = RingCase(CASE, "ring", "zigzag").module()
    for _ in range(calls_before):
        module(*_leaves(module))
    if dist.get_rank() == 1:
        time.sleep(TIMEOUT_S + 4)
        return "", "", 0.0
    return _told(lambda: module(*_leaves(module)))


@pytest.mark.parametrize("calls_before", [0, 1], ids=["comparing", "in messages"])
def test_a_rank_that_does_not_call_is_named(calls_before: int, fragile: Pool) -> None:
    fragile.start(_sleep_or_call, calls_before)
    for error, message, seconds in fragile.results_of([0, 2], TIMEOUT_S + 10):
        assert error == "PeerError"
        assert "rank 1 did not make this call" in message
        assert seconds < TIMEOUT_S + 5


def _impatient_or_asleep() -> Told:
    module = RingCase(CASE, "ring", "zigzag").module()
    assert module._ring is not None
    if dist.get_rank() == 1:
        time.sleep(TIMEOUT_S)
        return "", "", 0.0
    if dist.get_rank() == 0:
        module._ring.watch.timeout_s = 1.0
    return _told(lambda: module(*_leaves(module)))


def test_what_one_rank_has_waited_for_in_vain_no_other_waits_for(fragile: Pool) -> None:
    fragile.start(_impatient_or_asleep)
    (first, said, _), (error, message, seconds) = fragile.results_of([0, 2], TIMEOUT_S + 10)
    assert (first, said) == ("PeerError", "rank 1 did not make this call within the group's timeout of 1 s")
    assert (error, message) == ("PeerError", "rank 1 did not make this call in time")
    assert seconds < TIMEOUT_S


def _messages_that_do_not_start() -> list[Told]:
    comm = Comm(dist.group.WORLD)
    x = torch.zeros(4)

    def lost(*_: object, **__: object) -> None:
        raise RuntimeError("connection closed\nby whom")

    batch, all_to_all = dist.batch_isend_irecv, dist.all_to_all_single
    dist.batch_isend_irecv = dist.all_to_all_single = lost
    try:
        exchange = _told(lambda: comm.exchange([Message(x, 1 - comm.rank)], []))
        return [exchange, _told(lambda: comm.all_to_all(x, x.clone(), [8, 8], [8, 8]))]
    finally:
        dist.batch_isend_irecv, dist.all_to_all_single = batch, all_to_all


def test_a_peer_that_is_lost_when_messages_start_is_lost_as_well(ranks: Callable[[int], Pool]) -> None:
    for told in ranks(2).run(_messages_that_do_not_start):
        assert [each[:2] for each in told] == [("CommError", "communication failed: connection closed")] * 2


# --- a rank raises -----------------------------------------------------------------------------------------------


class _Breaking:
    """The math kernel, raising at one of its calls."""

    def __init__(self, at: int, error: Exception) -> None:
        self.at, self.error, self.calls = at, error, 0
        self.original = KERNELS["math"].load

    def load(self, config: object) -> BoundKernel:
        kernel = self.original(config)  # type: ignore[arg-type]

        def breaking(step: Callable[..., object]) -> Callable[..., object]:
            def run(*args: object, **kwargs: object) -> object:
                self.calls += 1
                if self.calls == self.at:
                    raise self.error
                return step(*args, **kwargs)

            return run

        return BoundKernel(breaking(kernel.forward), breaking(kernel.backward))  # type: ignore[arg-type]


def _told_of_a_broken_call(schedule: str, at: int, error: Exception, *, here: bool) -> Told:
    """A forward and a backward, in which the kernel raises ``error`` at one of its calls on the ranks of ``here``."""
    module = RingCase(CASE, schedule, "zigzag").module()
    kernel, breaking = KERNELS["math"], _Breaking(at, error)
    if here:
        object.__setattr__(kernel, "load", breaking.load)
    try:
        leaves = _leaves(module)
        told = _told(lambda: module(*leaves).sum().backward())
    finally:
        object.__setattr__(kernel, "load", breaking.original)
    assert told[0], "the call went through"
    dist.barrier()
    return told


def _one_rank_breaks(schedule: str, at: int, error: Exception) -> Told:
    told = _told_of_a_broken_call(schedule, at, error, here=dist.get_rank() == 1)
    _assert_works(schedule)  # the group is as good as before
    return told


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 6])
def test_an_exception_in_the_middle_of_a_ring(at: int, ranks: Callable[[int], Pool]) -> None:
    told = ranks(3).run(_one_rank_breaks, "ring", at, ValueError("kernel broke"))
    _assert_told(told, "ValueError", "kernel broke")


@pytest.mark.parametrize("schedule", ["all-gather", "ulysses"])
@pytest.mark.parametrize("at", [1, 2])
def test_an_exception_in_other_schedules(schedule: str, at: int, ranks: Callable[[int], Pool]) -> None:
    told = ranks(3).run(_one_rank_breaks, schedule, at, ValueError("kernel broke"))
    _assert_told(told, "ValueError", "kernel broke")


def _all_ranks_break(schedule: str, at: int) -> Told:
    told = _told_of_a_broken_call(schedule, at, ValueError("kernel broke"), here=True)
    if dist.get_rank() == 0:
        time.sleep(2 * BEAT_S)  # while the others wait for it they look for failures, and must not find that one
    _assert_works(schedule)
    return told


@pytest.mark.parametrize("schedule", ["ring", "ulysses"])
@pytest.mark.parametrize("at", [1, 2])
def test_a_failure_of_all_ranks_in_one_call_is_none_of_the_next(
    schedule: str, at: int, ranks: Callable[[int], Pool]
) -> None:
    """Each raised its own error, and one of them later the other's, in a call that the other went on with for good."""
    told = ranks(3).run(_all_ranks_break, schedule, at)
    assert [error for error, _, _ in told] == ["ValueError"] * 3


def _one_of_a_sub_group_breaks() -> Told:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    own = groups[dist.get_rank() % 2]
    ring, kernel, breaking = RingCase(CASE, "ring", "zigzag"), KERNELS["math"], _Breaking(2, ValueError("kernel broke"))
    module = ring.module(group=own)
    if dist.get_rank() == 3:
        object.__setattr__(kernel, "load", breaking.load)
    try:
        leaves = _leaves(module)
        told = _told(lambda: module(*leaves))
    finally:
        object.__setattr__(kernel, "load", breaking.original)
    dist.destroy_process_group(own)
    return told


def test_a_rank_of_a_sub_group_is_named_as_all_ranks_know_it(ranks: Callable[[int], Pool]) -> None:
    told = ranks(4).run(_one_of_a_sub_group_breaks)
    assert [error for error, _, _ in told] == ["", "PeerError", "", "ValueError"]
    assert told[1][1] == "rank 3 failed: ValueError: kernel broke"


def _messages_need_memory() -> Told:
    module = RingCase(CASE, "ring", "zigzag").module()
    assert module._ring is not None

    def exchange(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    if dist.get_rank() == 1:
        module._ring.comm.exchange = exchange  # type: ignore[assignment, method-assign]
    return _told(lambda: module(*_leaves(module)))


def test_memory_for_messages_that_runs_out_is_told_to_those_who_wait(fragile: Pool) -> None:
    """Nothing can be sent any more, so the group is lost; its reason is not."""
    told = fragile.run(_messages_need_memory, limit_s=TIMEOUT_S + 10)
    assert told[1][:2] == ("OutOfMemoryError", "out of memory")
    for rank in (0, 2):
        assert told[rank][0] == "PeerError"
        assert told[rank][1].startswith("rank 1 failed: OutOfMemoryError: out of memory; the process group is aborted")
        assert told[rank][2] < TIMEOUT_S + 5


def _one_rank_breaks_unnoticed() -> tuple[Told, Told]:
    """As on GPUs, where a call returns before it has run, and nobody votes."""
    module = RingCase(CASE, "ring", "zigzag").module()
    assert module._ring is not None
    watch, kernel = module._ring.watch, KERNELS["math"]
    breaking, leaves = _Breaking(1, ValueError("kernel broke")), _leaves(module)
    watch._synchronous = False
    if dist.get_rank() == 1:
        object.__setattr__(kernel, "load", breaking.load)
    try:
        first = _told(lambda: module(*leaves))
        deadline = time.monotonic() + 10 * BEAT_S
        while not first[0] and watch._heard is None and time.monotonic() < deadline:
            time.sleep(0.05)
        dist.barrier()
        second = _told(lambda: module(*leaves))
        assert _told(lambda: module(*leaves))[0] == ""
    finally:
        watch._synchronous = True
        object.__setattr__(kernel, "load", breaking.original)
    dist.barrier()
    _assert_works()
    return first, second


def test_without_a_vote_a_failure_is_told_once_it_is_heard(ranks: Callable[[int], Pool]) -> None:
    told = ranks(3).run(_one_rank_breaks_unnoticed)
    assert [each[:2] for each in told[1]] == [("ValueError", "kernel broke"), ("", "")]
    for both in (told[0], told[2]):  # in the next call, or in this one by a thread that is quick
        assert sorted(each[:2] for each in both) == [("", ""), ("PeerError", "rank 1 failed: ValueError: kernel broke")]


def test_out_of_memory(ranks: Callable[[int], Pool]) -> None:
    told = ranks(3).run(_one_rank_breaks, "ring", 2, torch.OutOfMemoryError("CUDA out of memory"))
    _assert_told(told, "OutOfMemoryError", "CUDA out of memory")


def _assert_told(told: list[Told], error: str, message: str) -> None:
    assert told[1][:2] == (error, message)
    for rank in (0, 2):
        assert told[rank][0] == "PeerError"
        assert told[rank][1] == f"rank 1 failed: {error}: {message}"
        assert told[rank][2] < 5


# --- ranks disagree about a call ---------------------------------------------------------------------------------


def _other_length_at_once() -> Told:
    module = RingCase(CASE, "ring", "zigzag").module()
    leaves = _leaves(module)
    if dist.get_rank() == 1:
        leaves = [x[:, :6] for x in leaves]
    told = _told(lambda: module(*leaves))
    _assert_works()
    return told


def test_another_length_on_one_rank(ranks: Callable[[int], Pool]) -> None:
    for error, message, seconds in ranks(3).run(_other_length_at_once):
        assert error == "InputError"
        assert "rank 0 calls with batch 1, 8 positions of 24 in all" in message
        assert "rank 1 calls with batch 1, 6 positions of 18 in all" in message
        assert seconds < 5


def _bad_input_on_one_rank() -> Told:
    module = RingCase(CASE, "ring", "zigzag").module()
    leaves = _leaves(module)
    if dist.get_rank() == 1:
        leaves[1] = leaves[1].float()
    told = _told(lambda: module(*leaves))
    _assert_works()
    return told


def test_a_bad_input_on_one_rank(ranks: Callable[[int], Pool]) -> None:
    told = ranks(3).run(_bad_input_on_one_rank)
    assert told[1][0] == "InputError"
    for rank in (0, 2):
        assert told[rank][0] == "PeerError"
        assert told[rank][1].startswith("rank 1 failed: InputError: k is torch.float32")
        assert told[rank][2] < 5


def _gradients_on_one_rank() -> Told:
    module = RingCase(CASE, "ring", "zigzag").module()
    leaves = _leaves(module)
    if dist.get_rank() == 1:
        leaves = [x.detach() for x in leaves]
    told = _told(lambda: module(*leaves))
    _assert_works()
    return told


def test_gradients_wanted_on_some_ranks_alone(ranks: Callable[[int], Pool]) -> None:
    for error, message, _ in ranks(3).run(_gradients_on_one_rank):
        assert error == "InputError"
        assert "without gradients" in message


def _otherwise_on_one_rank(change: str) -> Told:
    """A call that goes through and is to differ from the next one on rank 1 alone, which all ranks compare."""
    module = RingCase(CASE, "ring", "zigzag").module()
    leaves = _leaves(module)
    module(*leaves)
    module(*(x[:, :2] for x in leaves))
    here = dist.get_rank() == 1
    if here and change == "dtype":
        leaves = [x.detach().float().requires_grad_() for x in leaves]
    if here and change == "gradients":
        leaves = [x.detach() for x in leaves]
    if here and change == "batch":
        leaves = [torch.cat((x, x)) for x in leaves]
    told = _told(lambda: module(*leaves))
    _assert_works()
    return told


@pytest.mark.parametrize(
    ("change", "told"), [("dtype", "float32"), ("gradients", "without gradients"), ("batch", "batch 2")]
)
def test_what_differs_on_one_rank(change: str, told: str, ranks: Callable[[int], Pool]) -> None:
    for error, message, _ in ranks(3).run(_otherwise_on_one_rank, change):
        assert error == "InputError"
        _, first, other = message.split(" calls with ")
        assert told in other
        assert told not in first


def _comparisons() -> tuple[list[int], list[int]]:
    """How often ranks have compared, after every call, and the calls of which the store still knows."""
    module = RingAttention(6, 4, causal=True, profile=None, device="cpu", process_group=dist.group.WORLD)
    assert module._ring is not None
    watch, counts, calls = module._ring.watch, list[int](), 0
    lockstep = watch.lockstep

    def counting(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        lockstep(*arguments)

    x = torch.randn(1, 8, 6, 4)
    more = x.clone().requires_grad_()
    watch.lockstep = counting  # type: ignore[method-assign]
    try:
        for given, total in ((x, None), (x, None), (x.double(), None), (more, None), (more, 24), (more[:, :7], None)):
            module(given, given, given, total_length=total)
            counts.append(calls)
        with torch.autocast("cpu", torch.bfloat16):
            module(more[:, :7], more[:, :7], more[:, :7])
        counts.append(calls)
    finally:
        del watch.lockstep
    kept = [watch._call_key(module._ring.module, call, watch.rank) for call in range(9)]
    return counts, [call for call, key in enumerate(kept) if watch._store.check([key])]


def test_ranks_compare_whenever_a_call_differs_from_the_last(ranks: Callable[[int], Pool]) -> None:
    """In its dtype, whether it trains, its total length, its shape, or autocast."""
    assert ranks(3).run(_comparisons) == [([1, 1, 2, 3, 4, 5, 6], [7])] * 3


def _autocast_on_one_rank() -> Told:
    module = RingAttention(6, 4, causal=True, profile=None, device="cpu", process_group=dist.group.WORLD)
    q = torch.randn(1, 8, 6, 4)
    with torch.autocast("cpu", torch.bfloat16, enabled=dist.get_rank() == 1):
        told = _told(lambda: module(q, q, q))
    _assert_works()
    return told


def test_autocast_on_one_rank(ranks: Callable[[int], Pool]) -> None:
    """Rows half as wide as the others waited for ended a process."""
    for error, message, _ in ranks(3).run(_autocast_on_one_rank):
        assert error == "InputError"
        assert "in all, float32 under autocast to bfloat16, without gradients" in message


# --- one rank does not begin a call that the others are in -------------------------------------------------------


def _steps(schedule: str, spoil: str, backward: bool = True) -> list[Told]:
    """What a loop that goes on after errors is told, where step 1 of 3 is spoilt on rank 1; right steps are right."""
    case = replace(CASE, heads=4, kv_heads=2) if schedule == "ulysses" else CASE
    module = RingCase(case, schedule, "zigzag").module()
    wanted = exact(case, *case.inputs(), case.dout())
    told = []
    for step in range(4):
        leaves, dout = _leaves(module, case), module.shard(case.dout())

        def run(leaves: list[torch.Tensor] = leaves, dout: torch.Tensor = dout, spoilt: bool = step == 1) -> None:
            if spoilt and dist.get_rank() == 1:
                leaves = _spoilt(leaves, spoil)
                if spoil == "late":
                    time.sleep(3 * BEAT_S)
            if spoilt and dist.get_rank() == 0 and spoil == "late":
                leaves = _spoilt(leaves, "heads")
            out, lse = module(*leaves, return_lse=True)
            grads = torch.autograd.grad(out, leaves, dout) if backward else ()
            whole = [module.unshard(x.detach(), dim=2 if x is lse else 1) for x in (out, lse, *grads)]
            assert_equal_to(whole, list(wanted)[: len(whole)])

        told.append(_told(run))
    return told


def _spoilt(leaves: list[torch.Tensor], how: str) -> list[torch.Tensor]:
    q, k, v = leaves
    spoilt: dict[str, list[Any]] = {
        "dtype": [q, k.float(), v],
        "heads": [q[:, :, :2], k, v],
        "length": [x[:, :6] for x in leaves],
        "gradients": [x.detach() for x in leaves],
        "object": [q, k, "v"],
        "late": leaves,
    }
    return spoilt[how]


SPOILT = {
    "dtype": "k is torch.float32 and q is torch.float64",
    "heads": "num_heads",
    "length": "6 positions of 1",
    "gradients": "without gradients",
    "object": "v is a str",
}


def _assert_only_the_spoilt_step_failed(told: list[list[Told]], rank: int, message: str) -> None:
    for number, steps in enumerate(told):
        assert [error for error, _, _ in steps] == ["", "InputError" if number == rank else "PeerError", "", ""], steps
        assert message in steps[1][1]
        assert steps[1][2] < 5


@pytest.mark.parametrize("schedule", ["ring", "all-gather", "ulysses"])
@pytest.mark.parametrize("spoil", list(SPOILT))
def test_a_call_that_one_rank_does_not_begin_ends_on_all(
    schedule: str, spoil: str, ranks: Callable[[int], Pool]
) -> None:
    """Its next call was taken for the one that it had missed: results were wrong by 0.7, and nobody was told."""
    told = ranks(2 if schedule == "ulysses" else 3).run(_steps, schedule, spoil)
    _assert_only_the_spoilt_step_failed(told, 1, SPOILT[spoil])


def test_a_rank_that_comes_late_misses_a_call_that_another_has_missed(ranks: Callable[[int], Pool]) -> None:
    """The third one is in its messages, and both exchange them with it."""
    _assert_only_the_spoilt_step_failed(ranks(3).run(_steps, "ring", "late"), 0, SPOILT["heads"])


def _over_degrees(spoil: str) -> list[Told]:
    case = replace(CASE, heads=4, kv_heads=2)
    module = RingCase(case, "ulysses-ring", "zigzag", ulysses=2).module()
    told = []
    for step in range(3):
        leaves = _leaves(module, case)
        if step == 1 and dist.get_rank() == 2:
            leaves = _spoilt(leaves, spoil)
        told.append(_told(lambda leaves=leaves: module(*leaves)[0].sum().backward()))  # type: ignore[misc]
    return told


def test_such_a_call_over_two_dimensions(ranks: Callable[[int], Pool]) -> None:
    for number, steps in enumerate(ranks(4).run(_over_degrees, "dtype")):
        assert [error for error, _, _ in steps] == ["", "InputError" if number == 2 else "PeerError", ""]


def _stays_within_ranks() -> list[str]:
    """Rank 1 fails where nothing is sent: the others are not in need of it, and are told nothing later either."""
    case = Case(24, 6, 3, 4, pattern=pattern_of([8], [1]), causal=True)
    module = RingCase(case, "local", "contiguous").module()
    other = RingCase(CASE, "ring", "zigzag").module()
    errors = []
    for step in range(3):
        leaves = _leaves(module, case)
        if step == 1 and dist.get_rank() == 1:
            leaves = _spoilt(leaves, "dtype")
        errors.append(_told(lambda leaves=leaves: module(*leaves))[0])  # type: ignore[misc]
        errors.append(_told(lambda: other(*_leaves(other)))[0])
    return errors


def test_a_call_that_sends_nothing_fails_where_it_fails(ranks: Callable[[int], Pool]) -> None:
    told = ranks(3).run(_stays_within_ranks)
    assert told[1] == ["", "", "InputError", "", "", ""]
    for each in (told[0], told[2]):  # one that has not come yet by then misses it as well
        assert each in ([""] * 6, ["", "", "PeerError", "", "", ""])


def _failures_one_after_the_other() -> list[Told]:
    """First of all ranks, which catch theirs; then of rank 1 alone, for another reason."""
    module = RingCase(CASE, "ring", "zigzag").module()
    leaves = _leaves(module)
    module(*leaves)
    told = [_told(lambda: module(*leaves, total_length=1000)) for _ in range(2)]
    if dist.get_rank() == 1:
        leaves = _spoilt(leaves, "dtype")
    told.append(_told(lambda: module(*leaves)))
    _assert_works()
    return told


def test_what_all_ranks_failed_of_is_no_reason_of_a_later_failure(ranks: Callable[[int], Pool]) -> None:
    for number, (first, second, third) in enumerate(ranks(3).run(_failures_one_after_the_other)):
        assert (first[0], second[0]) == ("InputError", "InputError")
        assert third[0] == ("InputError" if number == 1 else "PeerError")
        assert "k is torch.float32" in third[1]


# --- one rank does not begin a backward that the others are in ---------------------------------------------------


def _backward_steps(ring: RingCase, spoil: str) -> list[Told]:
    """Step 1 of 3 is spoilt on rank 1, between its forward and its backward."""
    module, case = ring.module(), ring.case
    wanted = exact(case, *case.inputs(), case.dout())
    told = []
    for step in range(3):
        spoilt = step == 1 and dist.get_rank() == 1
        leaves, dout = _leaves(module, case), module.shard(case.dout())
        q, k, v = (x * 1 for x in leaves)
        out, lse = module(q, k, v, return_lse=True)
        if spoilt and spoil == "in place":
            with torch.no_grad():
                q.add_(1)

        def run(out: torch.Tensor = out, lse: torch.Tensor = lse, leaves: Any = leaves, dout: Any = dout) -> None:
            grads = torch.autograd.grad(out, leaves, dout, create_graph=spoilt and spoil == "twice")  # noqa: B023
            rows = (out, lse, *grads)
            whole = [module.unshard(x.detach(), dim=2 if x is lse else 1) for x in rows]
            assert_equal_to(whole, list(wanted))

        told.append(_told(run))
    return told


BACKWARDS = {"twice": "double backward", "in place": "modified by an inplace operation"}


@pytest.mark.parametrize("spoil", list(BACKWARDS))
@pytest.mark.parametrize(
    ("schedule", "checkpoint"), [("ring", "selective"), ("ring", "full"), ("ulysses", "none"), ("ulysses", "full")]
)
def test_a_backward_that_one_rank_does_not_begin_ends_on_all(
    schedule: str, checkpoint: str, spoil: str, ranks: Callable[[int], Pool]
) -> None:
    """The others waited for the group's timeout, and heard that no rank had failed."""
    case = replace(CASE, heads=4, kv_heads=2)
    ring = RingCase(case, schedule, "zigzag", checkpoint=checkpoint)
    for number, steps in enumerate(ranks(2).run(_backward_steps, ring, spoil)):
        assert [error for error, _, _ in steps] == [
            "",
            "PeerError" if number == 0 else "RingAttentionError" if spoil == "twice" else "RuntimeError",
            "",
        ], steps
        assert BACKWARDS[spoil] in steps[1][1]
        assert steps[1][2] < 5


# --- ranks are in different calls --------------------------------------------------------------------------------


def _in_another_order(backward: bool) -> tuple[Told, Told]:
    """Two modules of one shape, called, or gone back through, in another order on rank 1."""
    ring = RingCase(CASE, "ring", "zigzag")
    modules = [ring.module(), ring.module()]
    inputs = [_leaves(module) for module in modules]
    outs = [module(*leaves) for module, leaves in zip(modules, inputs, strict=True)]
    first, second = (1, 0) if dist.get_rank() == 1 else (0, 1)

    def go(number: int) -> Told:
        if backward:
            return _told(lambda: outs[number].sum().backward())
        return _told(lambda: modules[number](*inputs[number]))

    told = go(first), go(second)
    _assert_works()
    return told


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_modules_in_another_order_on_one_rank(backward: bool, ranks: Callable[[int], Pool]) -> None:
    """Each took the other's rows: results were wrong by 1 and more."""
    name = "backward" if backward else "forward"
    for told in ranks(2).run(_in_another_order, backward):
        for error, message, seconds in told:
            assert error == "InputError"
            assert re.search(rf"rank \d was in the {name} of the module .* in the same order on every rank", message)
            assert seconds < 5


# --- one rank cannot build its module ----------------------------------------------------------------------------


def _wrongly_built(here: dict[str, Any]) -> Told:
    wrong = here if dist.get_rank() == 1 else {}
    told = _told(lambda: RingAttention(**({"num_heads": 2, "head_dim": 4, "process_group": dist.group.WORLD} | wrong)))
    _assert_works()
    return told


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"num_kv_heads": 3}, "num_heads is 2, not a multiple of num_kv_heads, 3"),
        ({"layout": "nope"}, "layout is 'nope'"),
        ({"segment_lengths": [4]}, "dilation_rates"),
        ({"prefer": "speed"}, "prefer is 'speed'"),
        ({"dropout": 0.1}, "dropout is 0.0 on rank 0 of the group and 0.1 on rank 1"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_a_module_that_one_rank_cannot_build(wrong: dict[str, Any], told: str, ranks: Callable[[int], Pool]) -> None:
    """The others waited for the group's timeout."""
    for number, (error, message, seconds) in enumerate(ranks(2).run(_wrongly_built, wrong)):
        assert error == ("InputError" if number == 1 or "dropout" in wrong else "PeerError")
        assert told in message
        assert seconds < 5


def _deterministic_on_one_rank() -> Told:
    torch.use_deterministic_algorithms(dist.get_rank() == 1)
    try:
        return _told(lambda: RingCase(CASE, "ring", "zigzag").module())
    finally:
        torch.use_deterministic_algorithms(False)


def test_deterministic_algorithms_on_one_rank(ranks: Callable[[int], Pool]) -> None:
    for error, message, _ in ranks(2).run(_deterministic_on_one_rank):
        assert error == "InputError"
        assert "use_deterministic_algorithms is False on rank 0 of the group and True on rank 1" in message


# --- shares that are wrong ---------------------------------------------------------------------------------------


def _total_on_one_rank() -> Told:
    """Shares that are right for one total are not for another."""
    module = RingCase(CASE, "ring", "contiguous").module()
    rows = torch.zeros(1, 5 - dist.get_rank(), 2, 4)
    told = _told(lambda: module.unshard(rows, (9, 11)[dist.get_rank()]))
    _assert_works()
    return told


def test_a_share_that_is_wrong_on_one_rank_is_told_to_those_who_unshard(ranks: Callable[[int], Pool]) -> None:
    told = ranks(2).run(_total_on_one_rank)
    assert told[1][0] == "InputError"
    assert told[0][0] == "PeerError"
    assert told[0][1].startswith("rank 1 failed: InputError: the sequence has 4 positions here; of total_length 11")
    assert told[0][2] < 5


@pytest.mark.parametrize("total_length", [True, 24.0, "24", 0])
def test_a_total_length_that_is_no_length(total_length: object, ranks: Callable[[int], Pool]) -> None:
    for error, message, _ in ranks(2).run(_told_of_a_total, total_length):
        assert error == "InputError"
        assert message == f"total_length is {total_length!r}; it must be an integer >= 1"


def _told_of_a_total(total_length: object) -> Told:
    module = RingCase(CASE, "ring", "zigzag").module()
    return _told(lambda: module(*_leaves(module), total_length=total_length))


def _wrong_share() -> Told:
    module = RingCase(CASE, "ring", "zigzag").module()
    return _told(lambda: module(*(x.detach() for x in _leaves(module)), total_length=23))


def _unshard_uneven(total_length: int | None, dim: int) -> Told:
    module = RingCase(CASE, "ring", "contiguous").module()
    rows = torch.full((1, 5 - dist.get_rank(), 2, 4), float(dist.get_rank()))
    found: list[torch.Tensor] = []
    told = _told(lambda: found.append(module.unshard(rows, total_length, dim)))
    dist.barrier()
    if found:
        assert found[0][0, :, 0, 0].tolist() == [0.0] * 5 + [1.0] * 4
    _assert_works()
    return told


def test_uneven_shares_are_not_unsharded_without_their_total(ranks: Callable[[int], Pool]) -> None:
    """gloo ended the process of one rank, and gave the other rows of nobody."""
    told = ranks(2).run(_unshard_uneven, None, 1)
    assert [error for error, _, _ in told] == ["InputError"] * 2
    assert all("unshards 10 positions in all" in text and "unshards 8 positions" in text for _, text, _ in told)
    assert [error for error, _, _ in ranks(2).run(_unshard_uneven, 9, 1)] == [""] * 2
    assert [error for error, _, _ in ranks(2).run(_unshard_uneven, 9, -3)] == [""] * 2


def test_a_length_that_is_not_the_share_of_the_total(ranks: Callable[[int], Pool]) -> None:
    told = ranks(3).run(_wrong_share)
    wrong = [each for each in told if each[0] == "InputError"]
    assert wrong
    for _, message, _ in wrong:
        assert "of total_length 23 rank" in message
