"""The documents that a packed workload is measured with: the same for the same numbers, of uneven lengths."""

from __future__ import annotations

import itertools
import math
import random

from ringattn.runtime.packed.documents import Documents
from ringattn.workload import Workload


def packed_documents(workload: Workload, tokens: int) -> Documents | None:
    """Return the workload's documents, or as many shorter or longer ones, in so many tokens; None where it has none.

    One has the longest length, the others lie evenly around their mean, in random order.
    """
    if not workload.packed:
        return None
    count = workload.batch
    scaled = round(workload.seq_len * tokens / workload.packed_tokens)
    longest = min(tokens - count + 1, max(-(-tokens // count), scaled))
    lengths = [longest]
    if count > 1:
        mean = (tokens - longest) / (count - 1)
        spread = min(mean - 1, longest - mean)
        steps = [2 * n / max(1, count - 2) - 1 for n in range(count - 1)] if count > 2 else [0.0]
        ends = itertools.accumulate((mean + spread * step for step in steps), initial=0.0)
        lengths += [round_up(end) - round_up(begin) for begin, end in itertools.pairwise(ends)]
    random.Random(count).shuffle(lengths)
    return Documents([0, *itertools.accumulate(lengths)])


def round_up(x: float) -> int:
    """Round half up, so that numbers one or more apart stay so."""
    return math.floor(x + 0.5)


def whole_length(workload: Workload, length: int) -> int:
    """Return the positions of tensors whose sequences, or longest document, have about so many on a rank."""
    if workload.packed:
        return max(workload.batch, round(workload.packed_tokens * length / workload.seq_len))
    return length * workload.world - length % workload.world  # ranks hold unequal shares, too
