"""Timeout of a cell's reference: a worker that takes longer was stopped, or lost its machine."""

from __future__ import annotations

import math

from ringattn.workload import Workload

from .inputs import active_share
from .sampled_rows import KEY_HEADS, ROWS_PER_HEAD

# Of one (query, key) pair, per dimension of the head and a share for everything that is no matrix product: one core
# of a server takes 0.3 to 1.0 ns, a GPU that is weak in float64 (1/64 of its float32) some hundredths.
_PAIR_NS = {"cpu": 1.0, "cuda": 0.1}
_BESIDE_PRODUCTS = 64  # dimensions that the rest costs as much as
_SLACK = 10.0  # times what is expected: others may be at work, too
_FIRST_S = 5.0  # the first reference of a worker loads what float64 needs


def reference_limit_s(workload: Workload, device: str, *, gradients: bool, first: bool) -> float:
    """Return the seconds that the longest reference of one request may take.

    ``gradients``: its rows are worked out, too. ``first``: of a worker.
    """
    length = math.sqrt(2) * workload.positions_of_tensors  # validations are at lengths up to that
    pairs = ROWS_PER_HEAD * workload.heads * length
    if gradients:
        queries = length / active_share(round(length))
        pairs += KEY_HEADS * (workload.heads // workload.kv_heads) * queries * length
    branches = len(workload.pattern.resolved(workload.seq_len))
    per_pair_ns = _PAIR_NS[device.partition(":")[0]] * (workload.head_dim + _BESIDE_PRODUCTS + 8 * branches)
    return _SLACK * 1e-9 * per_pair_ns * pairs + (_FIRST_S if first else 0.0)
