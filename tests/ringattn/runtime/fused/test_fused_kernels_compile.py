"""The fused kernels compile for a GPU that is not there: Triton's interpreter accepts what its compiler refuses."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from ringattn.runtime.fused import fused_kernels  # noqa: E402

# Segment, rate, heads per offset, step, and the slots [0, 1) and [1, 3), as of ``fused_layout.BranchSlots``.
BRANCHES = ((1024, 1, 0, 1, 0, 1), (5000, 2, 4, 2, 1, 3))
SLOTS = 3


def words(count: int) -> tuple[str, ...]:
    return ("i64",) * count


STEPS = {
    "merge_partials": (
        {
            "outs": words(SLOTS),
            "lses": words(SLOTS),
            "out_strides": words(2 * SLOTS),
            "lse_strides": words(2 * SLOTS),
            "slots": words(2 * SLOTS),
            "out_address": "i64",
            "lse_address": "i64",
            "target_strides": words(4),
        },
        {"KV_HEADS": 8, "GROUP": 2},
    ),
    "sum_partials": (
        {
            "grads": words(3 * SLOTS),
            "strides": words(6 * SLOTS),
            "slots": words(2 * SLOTS),
            "targets": words(3),
            "target_strides": words(6),
        },
        {"KV_HEADS": 8, "GROUPS": (2, 1, 1), "HEADS": 32},
    ),
}


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("step", STEPS)
def test_it_compiles_for_hopper(step: str, aligned: bool) -> None:
    types, constants = STEPS[step]
    types = types | dict.fromkeys(("begin", "end", "batch_begin", "blocks"), "i32")
    constants = constants | {
        "BRANCHES": BRANCHES,
        "HEAD_DIM": 48,
        "CHUNK": 16,
        "BLOCK": 128,
        "ALIGNED": aligned,
        "NARROW": True,
        "ALIGN": 16,
        "DTYPE": tl.bfloat16,
    }
    kernel = getattr(fused_kernels, step)
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert f".entry {step}" in compiled.asm["ptx"]
