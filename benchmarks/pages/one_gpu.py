"""Tables of one GPU: dense, shapes, dilated, decoding."""

from __future__ import annotations

import re

from .records import KERNELS, Row, factor, figures, ms, record, row_of, table

MODULES = ("heuristic", "profile", "captured")
SHOWN = (
    "B1 S8192 H32/8 D128 bf16 causal train",
    "B2 S4096 H32 D96 bf16 causal train",
    "B1 S8192 H16/8 D256 bf16 causal train",
    "B4 S2048 H32 D80 bf16 causal infer",
    "B2 S4096 H16 D192 bf16 causal train",
    "B2 S4096 H32/1 D128 bf16 causal train",
    "B1 S32768 H16 D64 bf16 causal train",
    "B1 S65536 H16 D128 bf16 causal infer",
    "B32 S512 H12 D64 bf16 full train",
    "B64 S197 H12 D64 bf16 full train",
    "B1 S1024 H16 D128 bf16 causal infer",
)
DEVICE_LIMIT, TORCH_LIMIT, BARE_LIMIT = 1.02, 1.02, 1.1  # a shape above one of these is listed as slower


def dense_ms(length: int, direction: str = "forward+backward") -> Row:
    times: Row = row_of("h100-dense", work=f"dense causal B1 S{length} H16 D128 bf16 {direction}")["ms"]
    return times


@figures
def forward_rates() -> str:
    """Give TFLOP/s of a causal forward: two products of S x S x D a head, half of them masked."""
    times = dense_ms(4096, "forward")
    operations = 2 * 4096**2 * 16 * 128
    rates = [f"{operations / times[name] * 1e-9:.0f} TFLOP/s" for name in KERNELS]
    return table(list(KERNELS.values()), [rates])


@figures
def dense() -> str:
    names = ("module", "flash-attn-4", "cudnn", "flash")
    rows = [(str(length), *(ms(dense_ms(length)[name]) for name in names)) for length in (4096, 16384, 65536)]
    return table(("tokens", "ringtune", *(KERNELS[name] for name in names[1:])), rows)


def _shape(work: str) -> str:
    """Return ``B1 S8192 H32/8 D128 causal, forward + backward``; bf16 is not said."""
    shape, _, mode = work.replace(" bf16", "").rpartition(" ")
    return f"{shape}, {'forward + backward' if mode == 'train' else 'forward'}"


def _fastest_bare(times: Row) -> str:
    name = min((name for name in times if name not in (*MODULES, "torch")), key=lambda name: float(times[name]))
    return f"{ms(times[name])}, {KERNELS[name]}"


@figures
def shapes() -> str:
    rows = []
    for work in SHOWN:
        row = row_of("h200-shapes", work=work)
        device, wall = row["device_ms"], row["wall_ms"]
        graph = ms(device["captured"]), ms(device["torch"]), _fastest_bare(device)
        rows.append((_shape(work), *graph, ms(wall["profile"]), ms(wall["torch"]), _fastest_bare(wall)))
    kinds = ("ringtune", "torch", "the fastest bare kernel")
    return table(("shape", *(f"{clock}: {kind}" for clock in ("graph", "loop") for kind in kinds)), rows)


@figures
def slower() -> str:
    """List every shape that is above a limit, and the largest ratios of those that are not."""
    keys = ("device_captured_over_best", "wall_profile_over_torch", "wall_profile_over_best")
    limits = (DEVICE_LIMIT, TORCH_LIMIT, BARE_LIMIT)
    above, others = [], []
    for row in record("h200-shapes")["rows"]:
        ratios = [float(row[key]) for key in keys]
        slow = any(ratio > limit for ratio, limit in zip(ratios, limits, strict=True))
        (above if slow else others).append((row["work"], ratios))
    above.sort(key=lambda each: -max(each[1]))
    most = [max(ratios) for ratios in zip(*(ratios for _, ratios in others), strict=True)]
    rows = [(_shape(work), *map(factor, ratios)) for work, ratios in above]
    rows.append((f"the other {len(others)}, at most", *map(factor, most)))
    graph, torch, loop = (f"{limit - 1:.0%}".replace("%", " %") for limit in limits)
    rule = (
        f"Of the {len(above) + len(others)} shapes of that file, those above the fastest of torch and the bare\n"
        f"kernels by more than {graph} in a graph or {loop} in a loop, or above torch by more than {torch} in a\n"
        "loop:\n\n"
    )
    return rule + table(("shape", "graph, over the fastest", "loop, over torch", "loop, over the fastest"), rows)


@figures
def host() -> str:
    rows = []
    for kind, work in (
        ("forward", "forward"),
        ("forward + backward", "forward+backward, autograd with its own threads"),
        ("the same, autograd without threads", "forward+backward, autograd without its own threads"),
    ):
        row = row_of("h200-launch", work=f"host time, {work}")
        under = row.get("aten_under_autograd_us")
        times = [f"{each:.0f} us" for each in (row["module_us"], row["aten_us"])]
        rows.append((kind, *times, f"{under:.0f} us" if under else ""))
    return table(("host time of a call", "ringtune", "torch's operator, called directly", "under autograd"), rows)


@figures
def dilated() -> str:
    rows = []
    for length in (65536, 262144, 1048576):
        for direction in ("forward", "forward+backward"):
            row = row_of("h200-dilated", work=f"LongNet causal S{length} H16 D128 bf16 {direction}")
            times = row["ms"]
            best = min((name for name in times if name.endswith(" kernels")), key=lambda name: float(times[name]))
            alone = f"{ms(times[best])}, {_pair(best)}"
            ratio = factor(row[f"module_over_{best.replace(' ', '_')}"])
            peer = ms(times["torchscale"]) if "torchscale" in times else ""
            rows.append((str(length), direction.replace("+", " + "), ms(times["module"]), alone, ratio, peer))
    return table(("tokens", "direction", "ringtune", "bare kernels alone", "over those", "torchscale"), rows)


def _pair(kernels: str) -> str:
    """Return ``cuDNN and flash-attn-4`` of ``cudnn+flash-attn-4 kernels``: forward and backward."""
    return " and ".join(KERNELS[name] for name in kernels.removesuffix(" kernels").split("+"))


@figures
def layer() -> str:
    rows = []
    for row in record("h200-encoder-layer")["rows"]:
        tiles, direction = re.findall(r"S(\d+) (\S+)", row["work"])[0]
        ratios = factor(row["module_over_torchscale"]), factor(row["memory_over_torchscale"])
        rows.append((tiles, direction.replace("+", " + "), *ratios))
    return table(("tiles", "direction", "time, of torchscale's", "memory, of torchscale's"), rows)


@figures
def decode() -> str:
    rows = []
    for row in record("h200-decode")["rows"]:
        batch, length = re.findall(r"B(\d+) (?:2048 of )?S(\d+)", row["work"])[0]
        times, own, best = row["ms"], "step", row.get("best_of_torch")
        work = f"step, {batch} x {length} cached positions"
        if best is None:
            own, best = "chunk", row["best_kernel"]
            work = f"chunk of 2048 positions, {batch} x {length} cached"
            ratio, rate = factor(row["chunk_over_kernel"]), ""
        else:
            ratio, rate = factor(1 / row["torch_over_step"]), factor(row["share_of_copy"]["step"])
        rows.append((work, ms(times[own]), f"{ms(times[best])}, {best.replace('cudnn', 'cuDNN')}", ratio, rate))
    return table(("", "ringtune", "the fastest other", "ringtune over it", "of a copy's rate"), rows)


@figures
def generate() -> str:
    rows = [
        (
            re.findall(r"S(\d+)", row["work"])[0],
            ms(row["ringtune_ms"]),
            ms(row["sdpa_ms"]),
            factor(row["ringtune_over_sdpa"]),
        )
        for row in record("h200-generate")["rows"]
    ]
    return table(("after tokens", "ringtune", "sdpa", "ringtune over it"), rows)
