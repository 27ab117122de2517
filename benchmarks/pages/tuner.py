"""Tables of the tuner: how far from the best it ends, and whether two probes agree."""

from __future__ import annotations

from .records import Row, figures, record, table

REGRET_KINDS = {
    "cpu": "one CPU, recorded",
    "h100": "one H100, recorded",
    "launch-bound": "launches cost more than kernels",
    "together": "window, backward and checkpoint pay only together",
    "two-optima": "two optima 1 % apart",
    "slow-default": "the default 6 times too slow, the best on a kernel that looks hopeless",
    "traps": "the fastest plans are wrong or hang",
    "synthetic": "every pair of tunables interacts",
    "all": "all that are invented but the last, under three noises",
}
METHODS = {
    "ringtune": "ringtune",
    "TPE": "Optuna's TPE",
    "GP": "Optuna's GP",
    "random": "random search",
    "default": "the default",
}


@figures
def regret() -> str:
    """Return the table of regret; GP, whose fits take long, has fewer seeds than the others."""
    lines = {(line["machine"], line["noise"], line["method"]): line for line in record("tuner-regret")["lines"]}
    rows = []
    for machine, meaning in REGRET_KINDS.items():
        noise = "all" if machine == "all" else "drift"
        rows.append((meaning, *(_regret(lines[machine, noise, method]) for method in METHODS)))
    runs = [str(lines["all", "all", method]["runs"]) for method in METHODS]
    rows.append(("runs of the row before", *runs))
    return table(("slower than the best plan, median / 90th percentile", *METHODS.values()), rows)


def _regret(line: Row) -> str:
    shares = (100 * line["regret_median"], 100 * line["regret_p90"])
    return " / ".join(f"{share:.1f}" if share < 10 else f"{share:.0f}" for share in shares) + " %"


@figures
def choices() -> str:
    """Show what the tuner chose on all invented machines under all noises."""
    (line,) = (
        line
        for line in record("tuner-regret")["lines"]
        if (line["machine"], line["noise"], line["method"]) == ("all", "all", "ringtune")
    )
    shares = [f"{100 * line[key]:.0f} %" for key in ("agreeing", "sampler", "queue", "default")]
    told = [str(line[key]) for key in ("wrong", "worse_than_default")]
    head = (
        "two seeds within 2 %",
        "proposed by the sampler",
        "enqueued",
        "the default stayed",
        "wrong plans",
        "slower than the default by 2 %",
    )
    return table(head, [(*shares, *told)])


@figures
def two_probes() -> str:
    rows = []
    for name, machine in (("cpu", "a CPU with two cores"), ("h200", "one H200"), ("h100", "one H100, before")):
        *cells, total = record(f"{name}-two-probes")["rows"]
        apart = [f"{100 * abs(1 - cell['ratio']):.2g} %" for cell in cells if not cell["agree"]]
        rows.append((machine, f"{total['agree']} of {total['cells']}", ", ".join(apart)))
    return table(("", "cells that agree", "the others are apart by"), rows)
