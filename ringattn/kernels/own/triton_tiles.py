"""Lists the tile shapes that the "triton" kernel may use: a table and pure functions, without torch or triton.

A tile that does not fit its GPU's shared memory cannot be launched, and one that does not fit the registers is many
times slower, so the table holds what was found by compiling for sm_80 and sm_90 (Triton 3.6 and 3.9) and looking at
the machine code: the loops of these tiles keep almost everything in registers. Those of sm_90 are in the order of
their times on an H100 (causal, 16 heads, 4096 and 16384 rows); there three TF32 products are as exact as float32's own
(3e-7) and 4.5 times as fast.
"""

from __future__ import annotations

import functools
import re
from typing import Literal, NamedTuple

Step = Literal["forward", "dq", "dkdv"]

SMALLEST_BLOCK = 16  # of a matrix product in Triton
LOWEST_SM = 80  # below, Triton makes its products without tensor cores, and even small tiles leave the registers


class Tile(NamedTuple):
    """Query rows and keys of a step's tile, warps, and the stages that tiles are loaded ahead.

    ``precision`` says how products of float32 are made, "ieee" or "tf32x3" (three TF32 products, as torch's own
    "efficient" kernel makes them); it is empty for every other compute dtype.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    precision: str = ""

    def __str__(self) -> str:
        suffix = f"-{self.precision}" if self.precision else ""
        return f"{self.block_m}x{self.block_n}-w{self.warps}-s{self.stages}{suffix}"


_TILE = re.compile(r"(\d+)x(\d+)-w(\d+)-s(\d+)(?:-(ieee|tf32x3))?")


def parse(text: str) -> Tile | None:
    """Return the tile that prints as ``text``, or None."""
    match = _TILE.fullmatch(text)
    if match is None:
        return None
    block_m, block_n, warps, stages = map(int, match.groups()[:4])
    return Tile(block_m, block_n, warps, stages, match[5] or "")


@functools.cache
def tiles(step: Step, sm: int, dtype: str, head_dim: int) -> tuple[Tile, ...]:
    """Return the tiles worth trying on a GPU, the default first; ``dtype`` is the compute dtype."""
    table = _SM_90 if sm in (90, 100, 103, 110) else _SM_80
    width = next(width for width in (64, 128, 256) if head_dim <= width)
    precisions = {"fp32": ("tf32x3", "ieee"), "tf32": ("tf32",)}.get(dtype, ("half",))
    found = []
    for precision in precisions:
        for entry in table[step, precision][width].split():
            text, _, kib = entry.partition(":")
            tile = parse(text)
            assert tile is not None
            if int(kib) <= _shared_memory_kib(sm):
                found.append(tile._replace(precision=precision) if dtype == "fp32" else tile)
    return tuple(found)


def _shared_memory_kib(sm: int) -> int:
    """Return the KiB of one thread block (CUDA C++ Programming Guide, specifications per compute capability)."""
    if sm in (86, 89, 120, 121):
        return 99
    if sm < 90:
        return 163
    return 227 if sm == 90 else 227 - 32  # tcgen05 compiles the same tiles to up to 32 KiB more


# Per step, precision and padded head dimension: tiles and their shared memory in KiB. "half" is bf16 and fp16.
_Table = dict[tuple[Step, str], dict[int, str]]

# mma.sync: sm_80 to sm_89, and sm_120
_SM_80: _Table = {
    ("forward", "half"): {
        64: "128x128-w8-s2:48 128x64-w4-s3:48 64x64-w4-s3:40 128x32-w4-s3:32",
        128: "128x64-w8-s3:96 64x64-w4-s2:56 128x32-w4-s3:64",
        256: "128x64-w8-s2:144 64x64-w4-s2:104 64x32-w4-s2:68",
    },
    ("forward", "tf32"): {
        64: "128x32-w4-s2:48 128x64-w8-s2:64 64x64-w4-s2:48",
        128: "64x32-w4-s2:72 64x64-w4-s2:112 128x32-w8-s2:96",
        256: "64x32-w8-s2:136 64x32-w4-s1:96",
    },
    ("forward", "ieee"): {
        64: "64x32-w8-s2:41 64x64-w8-s2:64 32x32-w4-s2:29",
        128: "64x32-w8-s2:72 32x32-w8-s2:52 32x32-w4-s2:52",
        256: "32x16-w8-s1:50",
    },
    ("forward", "tf32x3"): {
        64: "64x32-w4-s2:48 128x32-w8-s2:80",
        128: "32x32-w4-s2:72 64x32-w4-s2:112",
        256: "32x16-w4-s1:80 32x32-w4-s1:96",
    },
    ("dq", "half"): {
        64: "128x64-w8-s2:48 64x64-w4-s2:32 128x32-w4-s2:40",
        128: "64x64-w4-s2:72 128x32-w8-s3:96 64x128-w8-s2:112",
        256: "64x32-w4-s2:100 64x32-w8-s2:100 32x32-w4-s2:66",
    },
    ("dq", "tf32"): {
        64: "64x32-w4-s2:50 128x32-w8-s2:84",
        128: "64x32-w4-s2:112 64x32-w8-s2:112 64x32-w4-s1:96",
        256: "32x16-w4-s1:96 64x16-w8-s1:160",
    },
    ("dq", "ieee"): {
        64: "64x32-w8-s2:56 32x32-w4-s2:36",
        128: "32x32-w8-s1:64 64x16-w8-s1:80",
        256: "16x16-w8-s1:64",
    },
    ("dq", "tf32x3"): {
        64: "32x32-w4-s2:48 64x32-w8-s2:80",
        128: "32x32-w4-s1:80",
        256: "16x16-w8-s1:80",
    },
    ("dkdv", "half"): {
        64: "32x128-w4-s2:41 64x128-w8-s2:49 64x64-w4-s2:33",
        128: "32x128-w8-s2:81 64x64-w8-s2:73 32x64-w4-s2:53",
        256: "64x64-w8-s1:160 32x64-w8-s2:101 32x32-w4-s1:80",
    },
    ("dkdv", "tf32"): {
        64: "32x32-w4-s2:33",
        128: "32x32-w4-s2:65 32x64-w8-s1:96",
        256: "32x32-w8-s1:128 16x32-w8-s1:96",
    },
    ("dkdv", "ieee"): {
        64: "32x32-w8-s1:36 32x64-w8-s1:56",
        128: "32x32-w8-s1:68 16x64-w8-s1:84 16x32-w8-s1:50",
        256: "16x32-w8-s1:98 16x16-w8-s1:66",
    },
    ("dkdv", "tf32x3"): {
        64: "32x32-w4-s2:49",
        128: "32x32-w8-s1:96 16x32-w4-s1:80",
        256: "16x16-w8-s1:96",
    },
}

# wgmma, and tcgen05 on sm_100: products of 64 rows and more read shared memory, and TF32 needs a transposed copy there
_SM_90: _Table = {
    **_SM_80,
    ("forward", "half"): {
        64: "64x64-w4-s3:56 128x64-w4-s3:64 128x128-w8-s2:80 128x32-w4-s3:40",
        128: "128x128-w8-s2:160 128x64-w8-s3:128 64x64-w4-s2:80 128x64-w4-s2:96",
        256: "128x64-w8-s2:192 128x32-w8-s2:128 64x32-w4-s2:96",
    },
    ("forward", "tf32"): {
        64: "128x64-w4-s2:80 128x128-w8-s2:128 128x32-w4-s2:56 128x64-w8-s2:80 64x64-w4-s2:64",
        128: "128x64-w8-s2:160 128x32-w8-s2:112 64x64-w4-s2:128 64x32-w4-s2:80",
        256: "128x32-w8-s2:224 64x32-w8-s2:160 64x32-w4-s1:96",
    },
    ("forward", "ieee"): {
        64: "64x32-w8-s2:41 64x64-w8-s2:64 32x32-w4-s2:29",
        128: "32x32-w8-s2:52 64x16-w8-s2:53 64x32-w8-s2:72",
        256: "32x16-w8-s1:50",
    },
    ("forward", "tf32x3"): {
        64: "128x64-w8-s2:128 128x32-w8-s2:96 64x32-w4-s2:64",
        128: "128x32-w8-s2:192 64x32-w4-s2:128 64x16-w4-s2:96",
        256: "64x32-w8-s1:192 32x32-w4-s1:96",
    },
    ("dq", "half"): {
        64: "64x64-w4-s2:48 128x128-w8-s2:96 128x64-w8-s2:64",
        128: "64x64-w4-s2:96 128x64-w8-s2:128 128x32-w8-s3:112 64x128-w8-s2:160",
        256: "128x32-w8-s2:192 64x32-w8-s2:128",
    },
    ("dq", "tf32"): {
        64: "128x64-w8-s2:144 64x64-w4-s2:112 128x32-w8-s2:104 64x32-w4-s2:72",
        128: "128x32-w8-s2:208 64x32-w4-s1:112 64x32-w8-s2:144",
        256: "32x16-w4-s1:96",
    },
    ("dq", "tf32x3"): {
        64: "128x32-w8-s2:160 64x32-w4-s2:96 64x64-w8-s1:96",
        128: "32x32-w4-s1:80 64x16-w4-s1:144",
        256: "16x16-w8-s1:80",
    },
    ("dkdv", "half"): {
        64: "32x128-w4-s2:49 64x64-w4-s2:50 64x128-w8-s2:65",
        128: "32x64-w4-s2:65 64x128-w8-s2:129 32x128-w8-s2:97",
        256: "32x64-w8-s2:129",
    },
    ("dkdv", "tf32"): {
        64: "32x128-w8-s2:113 32x64-w4-s2:81 64x64-w8-s2:129",
        128: "32x32-w4-s2:65 32x64-w8-s1:128 32x64-w8-s2:161",
        256: "32x32-w8-s1:128 16x32-w8-s1:96",
    },
    ("dkdv", "tf32x3"): {
        64: "32x32-w4-s2:49 32x64-w8-s1:80",
        128: "32x32-w8-s1:96 16x32-w4-s1:80",
        256: "16x16-w8-s1:96",
    },
}
