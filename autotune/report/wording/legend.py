"""Legend of plans: each word that ``describe`` prints, and what it means."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autotune.display_text import plain
from ringattn.tunables import TABLE, Tunable
from ringattn.workload import PARAM_MEANING, BranchTunables, Tunables, described_words

from .plan_text import PlanText

# Apart from the table of kernels, which imports torch: reading a profile does not.
KERNEL_MEANINGS = {
    "cudnn": "cuDNN's, through torch",
    "flash": "FlashAttention 2, as torch has it",
    "efficient": "the memory-efficient one of CUTLASS, as torch has it",
    "flash-cpu": "torch's flash attention for CPUs",
    "math": "matrix products and a softmax of torch, on any device",
    "flash-attn-2": "FlashAttention 2 of the package flash-attn",
    "flash-attn-3": "FlashAttention 3, built from its repository",
    "flash-attn-4": "FlashAttention 4 of the package flash-attn-4",
    "xformers": "memory-efficient attention of the package xformers",
    "triton": "ringtune's own in Triton",
    "split-kv": "ringtune's own in Triton, for one query over a cache",
}
_SLASH = ("x/y", "kernel x runs the forward, y the backward")
_COMMA = ("x,y", "x serves the first branch of the pattern, y the second, and so on")
_NUMBER = 16  # stands for any number in ``whole_legend``


def legend(plans: Iterable[Tunables]) -> tuple[tuple[str, str], ...]:
    """Return words and their meaning, for each word of these plans: kernels first, then what is chosen beside them."""
    plans = tuple(dict.fromkeys(plans))
    used = {name for tunables in plans for name in tunables.kernels}
    kernels = [(name, meaning) for name, meaning in KERNEL_MEANINGS.items() if name in used]
    split = [_SLASH] if any(branch.backward for tunables in plans for branch in tunables.branches) else []
    split += [_COMMA] if any(len(set(tunables.branches)) > 1 for tunables in plans) else []
    words: dict[str, dict[str, None]] = {entry.meaning: {} for entry in (TABLE["dtype"], *TABLE.values())}
    for tunables in plans:
        for word, meaning in described_words(tunables):
            words.setdefault(meaning, {})[word] = None
    return (*kernels, *split, *((" or ".join(of), meaning) for meaning, of in words.items() if of and meaning))


def whole_legend() -> tuple[tuple[str, str], ...]:
    """Return the legend of everything that a plan may say, with 16 for any number."""
    plain_plan = Tunables("bf16", (BranchTunables(""),))
    plans = [replace(plain_plan, branches=(BranchTunables(name, name),)) for name in KERNEL_MEANINGS]
    plans += [replace(plain_plan, branches=(BranchTunables("x"), BranchTunables("y")))]
    plans += [plan for entry in TABLE.values() if entry.meaning for plan in _plans_of(entry, plain_plan)]
    return (*legend(plans), ("kernel.name=value", PARAM_MEANING))


def _plans_of(entry: Tunable, plain_plan: Tunables) -> Iterator[Tunables]:
    """Yield a plan for each value that an entry may have; of an entry of branches also beside a plain one."""
    for value in entry.allowed or (_NUMBER,):
        choice: dict[str, Any] = {entry.name: value}
        if entry.per_branch:
            branch = replace(plain_plan.branches[0], **choice)
            yield replace(plain_plan, branches=(branch,))
            yield replace(plain_plan, branches=(plain_plan.branches[0], branch))
        else:
            yield replace(plain_plan, **choice)


def legend_table(rows: Iterable[tuple[str, str]]) -> RenderableType:
    """Return a legend as lines for the terminal."""
    table = Table.grid(padding=(0, 2))
    for words, meaning in rows:
        table.add_row(PlanText(plain(words)), Text(plain(meaning), style="dim"))
    return table
