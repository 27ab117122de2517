"""The table of the README."""

from __future__ import annotations

import json

from .one_gpu import dense_ms
from .ranks import PEERS, rank_ms
from .records import KERNELS, figures, ms, record, row_of, table


def _software(*names: str) -> str:
    """Return the versions that all of these records name."""
    (software,) = {json.dumps(record(name)["machine"]["software"], sort_keys=True) for name in names}
    found = json.loads(software)
    torch = found["torch"].partition("+")[0]
    return f"torch {torch}, CUDA {found['cuda']}, cuDNN {found['cudnn']}, flash-attn-4 {found['flash_attn.cute']}"


def _link(name: str) -> str:
    return f"[{name}](benchmarks/results/{name}.json)"


@figures
def headline() -> str:
    rows = []
    for length, work in ((4096, "H100, dense, 16 heads of 128, 4096 tokens"), (65536, "the same, 65536 tokens")):
        times = dense_ms(length)
        others = ", ".join(f"{KERNELS[name]} {ms(times[name])}" for name in ("flash-attn-4", "cudnn", "flash"))
        rows.append((work, ms(times["module"]), others, _link("h100-dense")))
    times = row_of("h200-dilated", work="LongNet causal S262144 H16 D128 bf16 forward+backward")["ms"]
    bare = min(value for name, value in times.items() if name.endswith(" kernels"))
    others = f"its bare kernels alone {ms(bare)}, torchscale {ms(times['torchscale'])}"
    work = "H200, LongNet 2048..32768 / 1..16, 16 heads of 128, 262144 tokens"
    rows.append((work, ms(times["module"]), others, _link("h200-dilated")))
    both = {who: rank_ms("h200-ring-4", 32768, who)[1] for who in ("profile", *PEERS)}
    others = ", ".join(f"{name} {ms(both[who])}" for who, name in reversed(PEERS.items()))
    rows.append(
        (
            "4 H200s, dense, 32 heads of 128, 32768 tokens on each",
            ms(both["profile"]),
            others,
            _link("h200-ring-4"),
        )
    )
    versions = _software("h100-dense", "h200-dilated", "h200-ring-4")
    head = ("workload", "ringtune", "others", "figures")
    return f"bf16, causal, forward + backward; {versions}:\n\n{table(head, rows)}"
