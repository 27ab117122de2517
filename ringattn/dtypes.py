"""Maps names of dtypes in profiles and plans to torch's dtypes."""

from __future__ import annotations

import torch

TORCH_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp64": torch.float64,
}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items() if name != "tf32"}
