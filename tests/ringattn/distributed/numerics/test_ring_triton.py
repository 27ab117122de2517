"""The fused merge of a ring step equals the one in torch operations, also under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from interpreted_triton import interpreted, patch_once

from ringattn.distributed.chunk_rows import merge_block


def check_fused_merge(device: str) -> None:
    from ringattn.runtime.fused import merge_step_triton as ring_triton

    generator = torch.Generator(device).manual_seed(0)
    for n, rows, heads, head_dim, dtype in (
        (1, 70, 3, 64, torch.bfloat16),
        (2, 33, 2, 40, torch.float16),
        (2, 5, 1, 128, torch.float32),
        (1, 130, 2, 7, torch.bfloat16),
    ):
        # As a ring has them: the later rows of a running result, a block's out as a slice, LSEs with heads first.
        out = torch.randn(n, rows + 4, heads, head_dim, generator=generator, device=device)
        lse = torch.randn(n, heads, rows + 4, generator=generator, device=device) * 30
        wide = torch.randn(n, rows, heads, head_dim + 3, generator=generator, device=device).to(dtype)
        part, part_lse = wide[..., :head_dim], torch.randn(n, heads, rows, generator=generator, device=device) * 30
        # Rows that one of them does not have, or neither: 0 and -inf.
        for x, x_lse in ((out, lse), (part, part_lse)):
            empty = torch.rand(x_lse.shape, generator=generator, device=device) < 0.4
            x_lse.masked_fill_(empty, -torch.inf)
            x.masked_fill_(empty.transpose(1, 2)[..., None], 0.0)
        expected, expected_lse = out.clone(), lse.clone()
        merge_block(expected[:, 4:], expected_lse[:, :, 4:].transpose(1, 2), part, part_lse.transpose(1, 2))
        ring_triton.merge_block(out[:, 4:], lse[:, :, 4:].transpose(1, 2), part, part_lse.transpose(1, 2))
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-6)


def check_equal_values(device: str) -> None:
    """The weights of every step sum to 1, also where a rounded LSE is off by 0.03."""
    from ringattn.runtime.fused import merge_step_triton as ring_triton

    generator = torch.Generator(device).manual_seed(0)
    total = torch.zeros(1, 20, 2, 16, device=device)
    total_lse = torch.full((1, 20, 2), -torch.inf, device=device)
    part = torch.full_like(total, 0.7)
    for _ in range(8):
        ring_triton.merge_block(total, total_lse, part, torch.randn(1, 20, 2, generator=generator, device=device) + 4e5)
    torch.testing.assert_close(total, part, rtol=8 * 4e-7, atol=0)


def test_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    interpreted(__file__)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    check_fused_merge("cuda")
    check_equal_values("cuda")


if __name__ == "__main__":
    patch_once()
    check_fused_merge("cpu")
    check_equal_values("cpu")
