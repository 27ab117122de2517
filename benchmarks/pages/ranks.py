"""Tables of several GPUs that hold one sequence."""

from __future__ import annotations

from .records import factor, figures, ms, record, row_of, table

PEERS = {
    "ring-flash-attn zigzag, FA2": "ring-flash-attention",
    "context_parallel, cudnn": "context_parallel",
}


def rank_ms(name: str, length: int, contender: str, kv_heads: int = 32) -> tuple[float, float]:
    row = row_of(name, pattern="dense", local_length=length, contender=contender, kv_heads=kv_heads)
    return row["forward_ms"], row["both_ms"]


@figures
def ranks() -> str:
    contenders = {
        "profile": "ringtune",
        "ideal": "the ideal",
        "all-to-all": "all-to-all around cuDNN",
        "flash-attn-4 ring": "the module's ring on flash-attn-4",
    } | PEERS
    rows = []
    for world in (2, 4):
        name = f"h200-ring-{world}"
        timed = {row["contender"] for row in record(name)["rows"]}
        for length in (8192, 16384, 32768):
            times = [rank_ms(name, length, who) if who in timed else None for who in contenders]
            cells = [", ".join(map(ms, both)) if both else "" for both in times]
            rows.append((f"{world} H200s, {length} tokens on each", *cells))
    return table(("forward, and forward + backward", *contenders.values()), rows)


@figures
def ranks_h100() -> str:
    rows = []
    for kv_heads in (32, 8):
        who = ("flash-attn-4 ulysses/1 contiguous", "ideal", "all-to-all")
        times = [rank_ms("h100-ring-4", 8192, each, kv_heads) for each in who]
        cells = [", ".join(map(ms, both)) for both in times]
        rows.append((f"4 H100s, 8192 tokens on each, {kv_heads} key/value heads", *cells))
    head = ("forward, and forward + backward", "heads exchanged, contiguous", "the ideal", "all-to-all around cuDNN")
    return table(head, rows)


@figures
def exchange() -> str:
    """Show each way of exchanging heads with the number of groups of heads that is the fastest."""
    rows = []
    for length in (8192, 16384, 32768):
        cells = []
        for way in ("symmetric", "nccl"):
            groups = {
                n: rank_ms("h200-exchange-2", length, f"flash-attn-4 ulysses/{n} none {way}")[1] for n in (1, 2, 4)
            }
            fastest = min(groups, key=lambda n: groups[n])
            cells.append(f"{ms(groups[fastest])}, {fastest}")
        cells += [ms(rank_ms("h200-exchange-2", length, who)[1]) for who in ("ideal", *PEERS)]
        rows.append((str(length), *cells))
    ways = ("copies, groups", "NCCL's all-to-all, groups")
    return table(("tokens on each", *ways, "the ideal", *PEERS.values()), rows)


@figures
def ranks_dilated() -> str:
    rows = []
    for row in record("h200-ring-4")["rows"]:
        if row["contender"] == "heuristic" and row["pattern"] != "dense":
            segments, rates = (each.strip("[]").split(",") for each in row["pattern"].split("/"))
            pattern = f"{segments[0]}..{segments[-1]} / {rates[0]}..{rates[-1]}"
            ratios = factor(row["forward_ratio"]), factor(row["both_ratio"])
            rows.append((pattern, str(row["local_length"]), *ratios))
    return table(("pattern", "tokens on each", "forward, of one GPU's", "forward + backward, of one GPU's"), rows)
