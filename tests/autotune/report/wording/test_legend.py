"""The legend of plans: every word that a plan may print has a meaning, and a legend holds those that were printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.report.wording.legend import KERNEL_MEANINGS, legend, whole_legend
from ringattn.kernels.registry import KERNELS
from ringattn.tunables import TABLE
from ringattn.workload import BranchTunables, Tunables, describe

ROOT = Path(__file__).parents[4]


def words_of(rows: tuple[tuple[str, str], ...]) -> list[str]:
    return [word for words, _ in rows for word in words.split(" or ")]


def test_every_word_of_a_plan_has_a_meaning() -> None:
    rows = whole_legend()
    assert all(meaning for _, meaning in rows)
    words = words_of(rows)
    assert len(words) == len(set(words))
    assert list(KERNEL_MEANINGS) == list(KERNELS)
    assert set(KERNELS) <= set(words)
    for entry in TABLE.values():
        for value in () if entry.required else entry.allowed or (16,):
            choice = {entry.name: value}
            branch = BranchTunables("math", **choice if entry.per_branch else {})
            said = describe(Tunables("bf16", (branch,), **{} if entry.per_branch else choice)).split(" ")
            assert set(said[1:]) <= set(words), entry.name


@pytest.mark.parametrize(
    ("tunables", "words"),
    [
        (Tunables("fp32", (BranchTunables("math"),)), ["math", "fp32"]),
        (
            Tunables("bf16", (BranchTunables("cudnn", "flash"),), checkpoint="full"),
            ["cudnn", "flash", "x/y", "bf16", "checkpoint=full"],
        ),
        (
            Tunables(
                "bf16",
                (BranchTunables("cudnn"), BranchTunables("triton", gather="copy")),
                params=(("triton.tile", "64x64"),),
            ),
            ["cudnn", "triton", "x,y", "bf16", "gather=v,c", "triton.tile=64x64"],
        ),
    ],
)
def test_a_legend_holds_the_words_that_are_printed_and_no_others(tunables: Tunables, words: list[str]) -> None:
    assert words_of(legend([tunables, tunables])) == words


def test_values_of_one_tunable_share_a_line() -> None:
    plans = [Tunables("bf16", (BranchTunables("math"),), checkpoint=kept) for kept in ("none", "selective", "full")]
    assert [words for words, _ in legend(plans)] == ["math", "bf16", "checkpoint=none or checkpoint=full"]


def test_the_page_on_profiles_has_the_whole_legend() -> None:
    page = (ROOT / "docs/concepts/profile.md").read_text()
    table = page.partition("<!-- begin: words of a plan -->\n")[2].partition("<!-- end: words of a plan -->")[0]
    rows = [
        f"| {', '.join(f'`{word}`' for word in words.split(' or '))} | {meaning} |" for words, meaning in whole_legend()
    ]
    assert table.splitlines() == ["| word | meaning |", "|---|---|", *rows]
