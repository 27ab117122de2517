"""Every kernel reads q, k and v whose last elements lie more than 2^31 elements behind the first, or says why not.

"heads" is for the kernels that take strides of more than 32 bits at all: torch refuses them itself for "efficient".
"""

from __future__ import annotations

import pytest
import torch
from test_kernels_optional_gpu import UNIT, _exact, _random

from ringattn import detect
from ringattn.errors import PlanError
from ringattn.kernels.contract import KernelConfig, KernelNeed
from ringattn.kernels.registry import KERNELS

pytestmark = pytest.mark.gpu

BLOCKS, ROWS, HEADS, HEAD_DIM = 2, 140, 2, 64
GIB = 14

# Element strides of blocks, rows and heads that put the last element of one axis beyond 2^31.
FAR = {
    "blocks": (2**31 + 64, HEADS * HEAD_DIM, HEAD_DIM),
    "heads": (HEAD_DIM * ROWS, HEAD_DIM, 2**31 + 1024),
    "rows": (HEADS * HEAD_DIM, 2**24 + 64, HEAD_DIM),
}


@pytest.mark.parametrize("axis", FAR)
@pytest.mark.parametrize("name", [name for name in KERNELS if name not in ("math", "flash-cpu")])
def test_offsets_beyond_32_bits(name: str, axis: str) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < GIB * 2**30:
        pytest.skip(f"needs {GIB} GiB of free GPU memory")
    facts, kernel = detect("cuda"), KERNELS[name]
    need = KernelNeed(
        facts.vendor, facts.arch, "bf16", HEAD_DIM, HEADS, HEADS, ROWS, BLOCKS, True, True, row_elements=FAR[axis][1]
    )
    if name in ("efficient", "xformers") and axis == "heads":
        pytest.skip("torch takes no such stride for it")
    if kernel.reasons(need):
        pytest.skip("; ".join(kernel.reasons(need)))
    try:
        bound = kernel.load(KernelConfig(True, HEAD_DIM**-0.5, dtype="bf16"))
    except PlanError as error:
        pytest.skip(str(error))
    *inputs, dout = _random(*[(BLOCKS, ROWS, HEADS, HEAD_DIM)] * 4)
    storage = torch.empty(2**31 + 2**29, dtype=torch.bfloat16, device="cuda")
    views = [
        storage.as_strided(x.shape, (*FAR[axis], 1), storage_offset=number * 2**20).copy_(x)
        for number, x in enumerate(inputs)
    ]
    out, lse = bound.forward(*views)
    results = (out, lse, *bound.backward(dout, *views, out.contiguous(), lse.contiguous()))
    for label, x, x64 in zip(("out", "lse", "dq", "dk", "dv"), results, _exact(*inputs, dout, True), strict=True):
        error = float((x.double() - x64).norm() / x64.norm())
        assert error <= 4 * UNIT[torch.bfloat16], f"{label}: {error:.1e}"
