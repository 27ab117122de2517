"""How fast messages go round the ranks: measured once a probe, and kept in the profile's fingerprint."""

from __future__ import annotations

import statistics
import time

import torch

from .messages import MESSAGE_MIB, LinkReading
from .rank_agreement import SingleRank, exchange

SMALL_BYTES = 8
ROUNDS, SMALL_ROUNDS = 7, 50


def measure_links(peers: SingleRank, device: torch.device) -> LinkReading:
    """Medians of full rounds, begun together; every rank calls it."""
    large_s = _round_s(peers, device, MESSAGE_MIB * 2**20, ROUNDS)
    return LinkReading(large_s, _round_s(peers, device, SMALL_BYTES, SMALL_ROUNDS))


def _round_s(peers: SingleRank, device: torch.device, size_bytes: int, rounds: int) -> float:
    send = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    receive = torch.empty_like(send)
    for _ in range(2):  # connections are made by the first
        exchange(send, receive, peers)
    taken_s = []
    for _ in range(rounds):
        peers.barrier()
        begin = time.perf_counter()
        exchange(send, receive, peers)
        taken_s.append(time.perf_counter() - begin)
    return statistics.median(taken_s)
