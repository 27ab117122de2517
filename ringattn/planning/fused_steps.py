"""The steps between kernels that one GPU kernel each can do, and their parameters: plain data, no torch.

A parameter is how many rows one program of the step handles at a time. Without one the step takes what suits the head
dim and the segments.
"""

from __future__ import annotations

from collections.abc import Mapping

from ringattn.workload import Tunables, Workload

BLOCKS = (16, 32, 64, 128)
FUSED_PARAMS: Mapping[str, tuple[int, ...]] = {"merge.block": BLOCKS, "gather.block": BLOCKS, "sum.block": BLOCKS}
FUSED_STEPS = tuple(name.partition(".")[0] for name in FUSED_PARAMS)


def steps_not_taken(workload: Workload, tunables: Tunables) -> dict[str, str]:
    """Return each step that a plan of these tunables does not take, and why; the others of ``FUSED_STEPS`` it takes.

    Rows are gathered for a branch that copies them; in training dout, out and lse are for every rate above 1.
    """
    if workload.pattern.dense:
        return dict.fromkeys(FUSED_STEPS, "a dense plan has no steps between kernels")
    missing = {}
    if not workload.train:
        missing["sum"] = "only training sums gradients"
    dilated = workload.pattern.dilated
    if "copy" not in tunables.gathers and not (workload.train and dilated):
        missing["gather"] = "no rows are gathered"
    return missing
