"""Bad input gets one line that names the thing, its value and the remedy."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Case, pattern_of

from ringattn import Pattern, RingAttention, Workload
from ringattn.autograd import checkpoint
from ringattn.errors import (
    DeviceError,
    FieldError,
    InputError,
    KernelLoadError,
    PlanError,
    ProfileError,
    RingAttentionError,
)
from ringattn.workload import BranchTunables, Tunables


def tensors(**changed: Any) -> dict[str, Any]:
    """q, k, v of (2, 8, 4 or 2, 16) in float32, but for what changes."""
    made: dict[str, Any] = {name: torch.zeros(2, 8, heads, 16) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    return made | changed


def module(**arguments: Any) -> RingAttention:
    return RingAttention(4, 16, 2, **({"profile": None, "device": "cpu"} | arguments))


def one_line(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text
    assert len(text) < 600
    return text


BAD_TENSORS = {
    "a list": ({"q": [1.0]}, "q is a list; it must be a tensor"),
    "none": ({"k": None}, "k is a NoneType; it must be a tensor"),
    "rank 3": (
        {"v": torch.zeros(8, 2, 16)},
        r"v has shape \(8, 2, 16\); it must be \(batch, sequence, heads",
    ),
    "rank 5": ({"q": torch.zeros(1, 2, 8, 4, 16)}, r"q has shape \(1, 2, 8, 4, 16\); it must be"),
    "a number": ({"q": torch.tensor(1.0)}, r"q has shape \(\); it must be"),
    "heads first": ({"q": torch.zeros(2, 4, 8, 16)}, r"q has shape \(2, 4, 8, 16\); the module has num_heads 4 and"),
    "heads of q for k": ({"k": torch.zeros(2, 8, 4, 16)}, r"k has shape \(2, 8, 4, 16\); .* has num_kv_heads 2"),
    "head_dim": ({"v": torch.zeros(2, 8, 2, 8)}, r"v has .*head_dim 16, so it must be \(batch, sequence, 2, 16\)"),
    "device": ({"k": torch.zeros(2, 8, 2, 16, device="meta")}, "k is on meta, where tensors hold no data; give it"),
    "all on another device": (
        {n: torch.zeros(2, 8, h, 16, device="meta") for n, h in (("q", 4), ("k", 2), ("v", 2))},
        r"q is on meta, where tensors hold no data; give it data with to_empty\(\) first",
    ),
    "sparse": ({"q": torch.zeros(2, 8, 4, 16).to_sparse()}, "q has layout torch.sparse_coo; make it .* with to_dense"),
    "sparse rows": (
        {"k": torch.zeros(2, 8, 2, 16).to_sparse_csr(dense_dim=1)},
        "k has layout torch.sparse_csr; make it a dense tensor with to_dense",
    ),
    "of another library": ({"v": torch.zeros(2, 8, 2, 16).to_mkldnn()}, "v has layout torch._mkldnn; make it a dense"),
    "nested": ({"v": torch.nested.nested_tensor([torch.zeros(8, 2, 16)] * 2)}, "v is a nested tensor; call once for"),
    "jagged": (
        {"q": torch.nested.nested_tensor([torch.zeros(8, 4, 16), torch.zeros(3, 4, 16)], layout=torch.jagged)},
        "q is a nested tensor; call once for each sequence, or for batches of sequences of one length",
    ),
    "integers": ({"q": torch.zeros(2, 8, 4, 16, dtype=torch.int64)}, r"q is torch.int64; use one of torch.bfloat16"),
    "complex": ({"v": torch.zeros(2, 8, 2, 16, dtype=torch.complex64)}, r"v is torch.complex64; use one of"),
    "float8": ({"k": torch.zeros(2, 8, 2, 16).to(torch.float8_e4m3fn)}, r"k is torch.float8_e4m3fn; use one of"),
    "two dtypes": ({"k": torch.zeros(2, 8, 2, 16).half()}, r"k is torch.float16 and q is torch.float32; convert them"),
    "batch": ({"v": torch.zeros(1, 8, 2, 16)}, "v has batch size 1 and q 2; they must be equal"),
    "length": ({"k": torch.zeros(2, 9, 2, 16)}, "k has 9 positions and q 8; give q, k and v of one length, or call"),
    "no positions": (
        {n: torch.zeros(2, 0, h, 16) for n, h in (("q", 4), ("k", 2), ("v", 2))},
        r"q has shape \(2, 0, 4, 16\); batch and sequence must not be empty",
    ),
    "no batch": (
        {n: torch.zeros(0, 8, h, 16) for n, h in (("q", 4), ("k", 2), ("v", 2))},
        r"q has shape \(0, 8, 4, 16\); batch and sequence must not be empty",
    ),
    "too long": (
        {n: torch.zeros(2, 17, h, 16) for n, h in (("q", 4), ("k", 2), ("v", 2))},
        "the sequence has 17 positions, more than max_seq_len, 16",
    ),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", BAD_TENSORS)
def test_bad_tensors(name: str, autocast: bool, training: bool) -> None:
    changed, message = BAD_TENSORS[name]
    if autocast and name == "two dtypes":
        pytest.skip("autocast converts them")
    inputs = tensors(**changed)
    if training:
        for key, x in inputs.items():
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                inputs[key] = x.detach().requires_grad_()
    attn = module(max_seq_len=16)
    for _ in range(2):  # an error is not remembered as a plan
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
            pytest.raises(InputError, match=message) as raised,
        ):
            attn(**inputs)
        one_line(raised.value)
        assert isinstance(raised.value, ValueError)
    attn(**tensors())  # and the module still works


def test_length_at_the_limit_is_allowed() -> None:
    assert module(max_seq_len=8)(**tensors()).shape == (2, 8, 4, 16)


@pytest.mark.parametrize("total", [4, "8", 0])
def test_another_total_length_than_that_of_the_tensors(total: Any) -> None:
    with pytest.raises(InputError, match=r"total_length is .*, but this rank holds all 8; leave it out"):
        module()(**tensors(), total_length=total)
    module()(**tensors(), total_length=8)


BAD_ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"num_heads": 0}, InputError, "num_heads is 0; it must be an integer >= 1"),
    ({"num_heads": 2.0}, InputError, "num_heads is 2.0; it must be an integer >= 1"),
    ({"num_heads": True}, InputError, "num_heads is True; it must be an integer >= 1"),
    ({"num_heads": 2**17}, InputError, "heads is 131072; it must be an integer >= 1 and <= 65536"),
    ({"head_dim": 2**40}, InputError, "head_dim is 1099511627776; it must be an integer >= 1 and <= 65536"),
    ({"head_dim": -1}, InputError, "head_dim is -1; it must be an integer >= 1"),
    ({"num_kv_heads": 0}, InputError, "num_kv_heads is 0; it must be an integer >= 1"),
    ({"num_kv_heads": 3}, InputError, "num_heads is 4, not a multiple of num_kv_heads, 3"),
    ({"num_kv_heads": 8}, InputError, "num_heads is 4, not a multiple of num_kv_heads, 8"),
    ({"segment_lengths": [8]}, InputError, "segment_lengths and dilation_rates go together"),
    ({"dilation_rates": [8]}, InputError, "segment_lengths and dilation_rates go together"),
    ({"segment_lengths": [8, 16], "dilation_rates": [1]}, InputError, "segment_lengths has 2 entries and dilation_rat"),
    ({"segment_lengths": [], "dilation_rates": []}, InputError, "has 0 entries and dilation_rates 0; give two lists"),
    ({"segment_lengths": [0], "dilation_rates": [1]}, InputError, "segment_lengths holds 0; every entry must be an in"),
    ({"segment_lengths": [8], "dilation_rates": [0]}, InputError, "dilation_rates holds 0; every entry must be an int"),
    ({"segment_lengths": [8], "dilation_rates": [-2]}, InputError, "dilation_rates holds -2; every entry"),
    ({"segment_lengths": [8.0], "dilation_rates": [1]}, InputError, "segment_lengths holds 8.0; every entry"),
    ({"segment_lengths": [True], "dilation_rates": [1]}, InputError, "segment_lengths holds True; every entry must"),
    ({"segment_lengths": [8], "dilation_rates": [1 << 62]}, InputError, "dilation_rates holds 46.*; every entry"),
    ({"segment_lengths": [1 << 41], "dilation_rates": [1]}, InputError, "segment_lengths holds 2199023255552; every"),
    ({"segment_lengths": 8, "dilation_rates": 1}, InputError, "segment_lengths is 8; give a list of integers, one per"),
    ({"segment_lengths": [8], "dilation_rates": "1"}, InputError, "dilation_rates is '1'; give a list of integers"),
    ({"causal": "yes"}, InputError, "causal is 'yes'; it must be True or False"),
    ({"causal": None}, InputError, "causal is None; it must be True or False"),
    ({"scale": "1"}, InputError, "scale is '1'; it must be a finite number > 0"),
    ({"scale": float("nan")}, InputError, "scale is nan; it must be a finite number > 0"),
    ({"scale": float("inf")}, InputError, "scale is inf; it must be a finite number > 0"),
    ({"scale": 0.0}, InputError, "scale is 0.0; it must be a finite number > 0"),
    ({"scale": -1.0}, InputError, r"scale is -1.0; it must be a finite number > 0.*negate q"),
    ({"dropout": -0.1}, InputError, r"dropout is -0.1; it must be in \[0, 1\)"),
    ({"dropout": 1.0}, InputError, r"dropout is 1.0; it must be in \[0, 1\)"),
    ({"dropout": float("nan")}, InputError, r"dropout is nan; it must be in \[0, 1\)"),
    ({"dropout": False}, InputError, r"dropout is False; it must be in \[0, 1\)"),
    ({"dropout": None}, InputError, r"dropout is None; it must be in \[0, 1\)"),
    ({"head_offset": "staggered"}, InputError, "head_offset is 'staggered'; use 'interleaved' or 'blocked'"),
    ({"profile": 3}, InputError, "profile is 3; use 'auto', a path, a Profile, or None for the heuristic alone"),
    ({"profile": "no such file.yaml"}, ProfileError, "no such file.yaml: "),
    ({"profile": ""}, ProfileError, "is a directory"),
    ({"backend": "flash3"}, InputError, "backend is 'flash3'; the kernels are cudnn, flash, efficient, flash-cpu, m"),
    ({"backend": ("math",)}, InputError, r"backend is \('math',\); use a kernel name, or \(forward name, backward"),
    ({"backend": ("math", 3)}, InputError, r"backend is \('math', 3\); the kernels are"),
    ({"backend": 7}, InputError, "backend is 7; use a kernel name"),
    ({"backend": "flash"}, PlanError, "nothing that was asked for can run on this machine: flash: runs on NVIDIA GPUs"),
    ({"backend": "flash-attn-2"}, PlanError, "nothing that was asked for can run .*flash-attn-2"),
    ({"backend": ("cudnn", "math")}, PlanError, "nothing that was asked for can run on this machine: cudnn: runs on"),
    ({"dtype": "float8"}, InputError, "dtype is 'float8'; use None, 'auto', 'tf32' or one of bf16, fp16, fp32, fp64"),
    ({"dtype": torch.int8}, InputError, r"dtype is torch.int8; use None, .*, fp64 or torch.bfloat16, torch.float16, t"),
    ({"dtype": 16}, InputError, "dtype is 16; use None, 'auto'"),
    ({"dtype": "tf32"}, PlanError, "nothing that was asked for can run .*tf32"),
    ({"checkpoint": "some"}, InputError, "checkpoint is 'some'; use one of none, selective, full, offload, or None"),
    ({"max_seq_len": 0}, InputError, "max_seq_len is 0; it must be an integer >= 1"),
    ({"max_seq_len": True}, InputError, "max_seq_len is True; it must be an integer >= 1"),
    ({"max_seq_len": 8.5}, InputError, "max_seq_len is 8.5; it must be an integer >= 1"),
    ({"device": "gpu"}, InputError, "device is 'gpu'; use a torch device such as 'cuda:0' or 'cpu'"),
    ({"device": True}, InputError, "device is True; use a torch device"),
    ({"device": 3.5}, InputError, "device is 3.5; use a torch device"),
    ({"device": "meta"}, DeviceError, "device is 'meta'; use 'cuda', 'cuda:N' or 'cpu'"),
    ({"device": "mps"}, DeviceError, "mps"),
    ({"device": "xpu"}, DeviceError, "xpu"),
    ({"device": "cuda:99"}, DeviceError, "cuda:99"),
    ({"process_group": 4}, InputError, "process_group is 4; use a ProcessGroup or a one-dimensional DeviceMesh"),
    ({"process_group": torch.distributed.GroupMember.NON_GROUP_MEMBER}, InputError, "this rank is no member of"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD_ARGUMENTS, ids=[str(a[0]) for a in BAD_ARGUMENTS])
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    plain: dict[str, Any] = {"num_heads": 4, "head_dim": 16, "profile": None, "device": "cpu"}
    with pytest.raises(error, match=message) as raised:
        RingAttention(**(plain | arguments))
    text = one_line(raised.value)
    assert isinstance(raised.value, RingAttentionError)
    assert text[-1] not in "\n "


@pytest.mark.parametrize("argument", [torch.tensor([8, 16]), 5, {8}, "8"])
def test_a_pattern_is_made_of_lists(argument: Any) -> None:
    with pytest.raises(InputError, match=r"segment_lengths is .*; give a list of integers, one per branch"):
        Pattern.of(argument, [1, 2])


@pytest.mark.parametrize("lists", [((8, 16), (1, 2)), (range(8, 10), range(1, 3))])
def test_any_sequence_of_integers_is_a_list(lists: Any) -> None:
    assert len(Pattern.of(*lists).branches) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "eval"}, "mode is 'eval'; use 'train', 'infer' or 'decode'"),
        ({"dtype": "float32"}, "dtype is 'float32'; use one of bf16, fp16, fp32, fp64"),
        ({"dtype": "tf32"}, "dtype is 'tf32'; use one of bf16"),
        ({"seq_len": 0}, "seq_len is 0; it must be an integer >= 1"),
        ({"heads": 1.5}, "heads is 1.5; it must be an integer >= 1"),
        ({"kv_heads": 3}, "heads is 4, not a multiple of kv_heads, 3"),
        ({"batch": -1}, "batch is -1; it must be an integer >= 1"),
        ({"world": 0}, "world is 0; it must be an integer >= 1"),
        ({"head_dim": True}, "head_dim is True; it must be an integer >= 1"),
    ],
)
def test_bad_workloads(changes: dict[str, Any], message: str) -> None:
    plain: dict[str, Any] = {
        "mode": "train",
        "causal": True,
        "seq_len": 64,
        "heads": 4,
        "head_dim": 16,
        "dtype": "bf16",
    }
    assert Workload(**plain).kv_heads == 4
    with pytest.raises(InputError, match=message) as raised:
        Workload(**(plain | changes))
    one_line(raised.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float32"}, "dtype is 'float32'; use one of bf16, fp16, tf32, fp32, fp64"),
        ({"branches": ()}, "branches is empty; a plan has one entry per branch, and one for dense"),
        ({"checkpoint": "all"}, "checkpoint is 'all'; use one of none, selective, full, offload"),
        ({"window_tokens": 0}, "window_tokens is 0; it must be null or an integer >= 1"),
        ({"window_tokens": 1.5}, "window_tokens is 1.5; it must be null or an integer >= 1"),
        ({"pool_threshold_mib": -1}, "pool_threshold_mib is -1; it must be null or an integer >= 0"),
        ({"pool_threshold_mib": True}, "pool_threshold_mib is True; it must be null or an integer >= 0"),
        ({"pool_strategy": "best"}, "pool_strategy is 'best'; use one of shape, bucket"),
        ({"schedule": "star"}, "schedule is 'star'; use one of local"),
        ({"params": (("b", 1), ("a", 1))}, "params must be sorted by name"),
    ],
)
def test_bad_tunables(changes: dict[str, Any], message: str) -> None:
    plain: dict[str, Any] = {"dtype": "fp32", "branches": (BranchTunables("math"),)}
    Tunables(**plain)
    with pytest.raises(InputError, match=message) as raised:
        Tunables(**(plain | changes))
    one_line(raised.value)


def test_a_bad_gather() -> None:
    with pytest.raises(InputError, match="gather is 'move'; use one of view, copy"):
        BranchTunables("math", "math", "move")


# --- choices that cannot run raise when they are called -------------------------------------------------------------


def test_an_explicit_choice_raises_at_the_call_it_cannot_serve() -> None:
    attn = module(backend="flash-cpu")
    double = {name: x.double() for name, x in tensors().items()}
    for _ in range(2):
        with pytest.raises(PlanError, match=r"no kernel can run infer .*fp64, branch 0 forward: flash-cpu: no fp64"):
            attn(**double)
    attn(**tensors())


def test_a_backward_that_cannot_run_raises_in_training_alone() -> None:
    attn = module(backend=("math", "cudnn"))
    inputs = tensors()
    attn(**inputs)
    inputs["q"].requires_grad_()
    with pytest.raises(PlanError, match="branch 0 backward: cudnn: runs on NVIDIA GPUs only"):
        attn(**inputs)
    with torch.no_grad():
        attn(**inputs)


@pytest.mark.parametrize(
    ("checkpoint", "reason"),
    [
        ("none", "checkpoint none keeps gathered rows, and no branch gathers; use selective"),
        ("offload", "checkpoint offload moves tensors to the host, where a CPU has them already"),
    ],
)
def test_a_checkpoint_that_nothing_can_follow_raises_at_init(checkpoint: str, reason: str) -> None:
    with pytest.raises(PlanError, match=f"^checkpoint {checkpoint} can run nowhere here: .*{reason}"):
        module(checkpoint=checkpoint)


def test_checkpoint_offload_raises_for_a_pattern_too() -> None:
    with pytest.raises(PlanError, match="checkpoint offload can run nowhere here"):
        Case(24, pattern=pattern_of([8, 16], [1, 2])).module(checkpoint="offload")


def test_a_checkpoint_that_some_length_may_follow_is_no_error_at_init() -> None:
    assert Case(8, pattern=pattern_of([8, 16], [1, 2])).module(checkpoint="none").plan.wishes.checkpoint == "none"
    assert module(checkpoint="full").plan.wishes.checkpoint == "full"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is pinned memory")
def test_no_pinned_memory_is_told_in_one_line() -> None:
    with pytest.raises(DeviceError, match=r"checkpoint 'offload' wants 32 bytes of pinned host memory, .*; use an"):
        checkpoint._pinned_like(torch.zeros(8))


@pytest.mark.parametrize(
    ("dtype", "inputs", "message"),
    [
        (torch.float64, torch.float32, "computes in fp64, but float64 inputs, and only they, run in float64"),
        (torch.float32, torch.float64, "computes in fp32, but float64 inputs"),
    ],
)
def test_float64_is_neither_reached_nor_left(dtype: torch.dtype, inputs: torch.dtype, message: str) -> None:
    attn = module(dtype=dtype)
    with pytest.raises(PlanError, match=message):
        attn(**{name: x.to(inputs) for name, x in tensors().items()})


class Around(torch.nn.Module):
    def __init__(self, attn: RingAttention) -> None:
        super().__init__()
        self.attn = attn

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return self.attn(q, k, v)


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_torchscript_is_refused(around: bool, autocast: bool) -> None:
    attn = Around(module()) if around else module()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with pytest.raises(InputError, match=r"^torch\.jit\.trace records one shape and plan; use torch\.export, or"):
            torch.jit.trace(attn, tuple(tensors().values()))
        with pytest.raises(InputError, match=r"^torch\.jit\.script cannot compile a RingAttention; use torch\.export"):
            torch.jit.script(attn)


def test_a_module_without_tensors_is_the_same_on_meta() -> None:
    """Models are built or moved there before they get their data; the module holds none, its plans are for a CPU."""
    case = Case(24, 4, 2, 8, 2, pattern_of([8, 16], [1, 2]), causal=True)
    expected = case.module()(*case.inputs())
    with torch.device("meta"):
        attn = case.module()
    for there in (attn, case.module().to("meta"), Around(case.module()).to("meta")):
        assert torch.equal(there(*case.inputs()), expected)
        with pytest.raises(InputError, match="q is on meta, where tensors hold no data"):
            there(*(x.to("meta") for x in case.inputs()))


def test_cpu_with_an_index_is_the_cpu() -> None:
    assert module(device="cpu:0").device == torch.device("cpu")
    assert module(device=torch.device("cpu", 0))(**tensors()).shape == (2, 8, 4, 16)


@pytest.mark.parametrize("lengths", [[0], [-1], [2.5], [32], [8, 32], True, None, "16", 2.5, 32])
def test_a_warm_up_wants_lengths_it_may_run(lengths: Any) -> None:
    attn = module(max_seq_len=16)
    with pytest.raises(InputError, match=r"sequence (length is .*; it must be an integer >= 1|has 32 positions)"):
        attn.warmup(lengths)
    assert not attn._runners  # nothing was run before what cannot be run was noticed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": torch.int32}, "dtype is torch.int32; use one of bf16, fp16, fp32, fp64 or torch.bfloat16, torch.f"),
        ({"dtype": "int"}, "dtype is 'int'; use one of bf16"),
        ({"dtype": None}, "dtype is None; use one of bf16"),
        ({"batch_size": 0}, "batch_size is 0; it must be an integer >= 1"),
        ({"batch_size": True}, "batch_size is True; it must be an integer >= 1"),
        ({"train": "no"}, "train is 'no'; it must be True or False"),
    ],
)
def test_a_warm_up_wants_inputs_it_may_make(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        module().warmup([8], **arguments)
    one_line(raised.value)


@pytest.mark.parametrize("total", [True, 1.0, "1"])
def test_a_total_length_is_an_integer(total: Any) -> None:
    one = {name: x[:, :1] for name, x in tensors().items()}
    with pytest.raises(InputError, match=r"total_length is .*, but this rank holds all 1; leave it out"):
        module()(**one, total_length=total)
    with pytest.raises(InputError, match=r"total_length is .*; it must be an integer >= 1"):
        module().positions(total)


# --- one spelling rule ------------------------------------------------------------------------------------------------

SPELLINGS = {
    name: (name, long, f"torch.{long}", getattr(torch, long))
    for name, long in (("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"), ("fp64", "float64"))
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_dtype_has_every_spelling_everywhere(name: str) -> None:
    for spelling in SPELLINGS[name]:
        assert module(dtype=spelling).plan.wishes.dtype == name
        assert module().plan_for(8, spelling, train=False).workload.dtype == name
        attn = module()
        attn.warmup([8], dtype=spelling)
        assert {key[0][6] for key in attn._runners} == {SPELLINGS[name][-1]}


@pytest.mark.parametrize("kind", [np.int8, np.int64, np.uint16])
def test_integers_of_numpy_are_integers(kind: Any) -> None:
    attn = RingAttention(
        kind(4),
        kind(16),
        kind(2),
        [kind(4), kind(8)],
        [kind(1), kind(2)],
        profile=None,
        device="cpu",
        max_seq_len=kind(8),
    )
    same = RingAttention(4, 16, 2, [4, 8], [1, 2], profile=None, device="cpu", max_seq_len=8)
    assert attn.configuration == same.configuration
    assert RingAttention(4, 16, 2, np.array([4, 8]), np.array([1, 2]), profile=None, device="cpu").shape.pattern == (
        same.shape.pattern
    )
    plan = attn.plan_for(kind(8), "fp32", True, kind(2))
    assert plan == same.plan_for(8, "fp32", True, 2)
    assert type(plan.workload.seq_len) is type(plan.workload.batch) is int
    assert attn(**tensors(), total_length=kind(8)).shape == (2, 8, 4, 16)
    assert torch.equal(attn.positions(kind(8)), torch.arange(8))
    took = attn.warmup(np.array([4, 8], kind), batch_size=kind(1))
    assert [type(length) for length in took] == [int, int]
    assert set(attn.warmup(kind(8))) == set(attn.warmup(8)) == {8}
    assert attn.shard(torch.zeros(1, 8), kind(1)).shape == (1, 8)


@pytest.mark.parametrize("name", ["num_heads", "head_dim", "num_kv_heads", "max_seq_len"])
def test_truth_values_of_numpy_are_no_integers(name: str) -> None:
    plain: dict[str, Any] = {"num_heads": 1, "head_dim": 16, "profile": None, "device": "cpu"}
    with pytest.raises(InputError, match=rf"{name} is .*True.*; it must be an integer >= 1"):
        RingAttention(**(plain | {name: np.bool_(True)}))


# --- the errors themselves --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        InputError("q is 3"),
        FieldError("is 3; give 4", field="q"),
        KernelLoadError("lost", "no such package", "Install it"),
        DeviceError("none"),
        ProfileError("here.yaml", "is cut off", "plans[3].choice"),
        ProfileError("here.yaml", "is cut off"),
        PlanError("cannot", {"math": ["one", "two"], "flash": ()}, "Do this"),
        PlanError("cannot", {}),
    ],
)
def test_errors_survive_pickling(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_an_input_error_names_the_field_that_a_dataclass_refuses() -> None:
    with pytest.raises(FieldError) as caught:
        Pattern.of([8], [1, 2])
    assert caught.value.field == "segment_lengths"
    assert str(caught.value) == f"segment_lengths {caught.value.problem}"


def test_a_kernel_that_cannot_be_loaded_stays_so_when_raised_anew() -> None:
    error = KernelLoadError("lost", "no such package", "Install it")
    assert (type(error.again()), error.again().kernel) == (KernelLoadError, "lost")  # type: ignore[attr-defined]
    assert str(error.again()) == "kernel lost cannot be loaded: lost: no such package. Install it"


def test_a_plan_error_holds_every_candidate_with_its_reasons() -> None:
    error = PlanError("cannot run", {"a": ["one", "two"], "b": ["three"]}, "Try c")
    assert error.rejected == {"a": ("one", "two"), "b": ("three",)}
    assert str(error) == "cannot run: a: one, two; b: three. Try c"
    assert str(error.again()) == str(error)
    assert error.again() is not error


def test_a_profile_error_names_file_and_key() -> None:
    error = ProfileError("here.yaml", "is cut off", "plans[3]")
    assert (error.source, error.key, str(error)) == ("here.yaml", "plans[3]", "here.yaml: plans[3]: is cut off")
    assert error.problem == "plans[3]: is cut off"
    assert str(ProfileError("here.yaml", "is cut off")) == "here.yaml: is cut off"


def test_a_bad_call_costs_no_memory_of_its_tensors() -> None:
    import gc
    import weakref

    attn = module(backend="flash-cpu")
    inputs = {name: x.double() for name, x in tensors().items()}
    alive = weakref.ref(inputs["q"])
    with pytest.raises(PlanError):
        attn(**inputs)
    del inputs
    gc.collect()
    assert alive() is None


def test_a_module_holds_on_to_nothing_of_who_made_it() -> None:
    import gc
    import weakref

    def make() -> tuple[RingAttention, Any]:
        local = torch.zeros(3)
        return Case(8, pattern=pattern_of([4], [2])).module(backend="flash-cpu"), weakref.ref(local)

    attn, alive = make()
    gc.collect()
    assert alive() is None
    assert attn.plan.rows


def test_a_profile_may_be_named_by_a_path_object(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"none\.yaml"):
        module(profile=tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (1, "positions is 1; give a list of integers"),
        (None, "positions is None; give a list of integers"),
        (torch.empty(1, dtype=torch.int64, device="meta"), "positions is on meta"),
    ],
)
def test_positions_of_rows_that_are_no_list(given: Any, told: str) -> None:
    x = torch.zeros(1, 8, 2, 4)
    with pytest.raises(InputError, match=told):
        RingAttention(2, 4, profile=None, device="cpu").rows(x, x, x, given)


def test_sparse_sinks() -> None:
    x = torch.zeros(1, 8, 2, 4)
    with pytest.raises(InputError, match=r"sinks has layout torch\.sparse_coo; make it a dense tensor"):
        RingAttention(2, 4, profile=None, device="cpu")(x, x, x, sinks=torch.zeros(2).to_sparse())
