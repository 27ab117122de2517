"""What torchrun starts on each host of ``test_two_hosts``: the ring against one rank, over the network between them."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parents[2] / "ringattn"), str(Path(__file__).parents[1])]


def main() -> None:
    from oracle import Case, pattern_of
    from patience import LIMIT_S
    from ring_cases import RingCase, check_exact

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
    dense = Case(48, 4, 4, 4, causal=True)
    dilated = Case(48, 4, 2, 4, 2, pattern_of([8, 48], [1, 3]), True)
    cases = [
        RingCase(dense, "ring", "zigzag"),
        RingCase(dense, "all-gather", "zigzag", head_groups=2),
        RingCase(dense, "ulysses", "contiguous"),
        RingCase(dilated, "ring", "contiguous"),
    ]
    # A file a rank: the lines of processes, and their libraries' warnings, meet in the middle of a line on one output.
    Path(sys.argv[1], str(dist.get_rank())).write_text(str(check_exact(cases)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
