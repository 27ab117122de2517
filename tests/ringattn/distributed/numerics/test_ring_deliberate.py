"""Faults put in on purpose where rows of chunks and heads are moved: the comparison with the oracle finds each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from deliberate import CASES, FAULTS, WORLD, rows_with
from pool import Pool
from random_cases import faults_of, rows_of


def test_the_cases_are_right_without_a_fault(ranks: Callable[[int], Pool]) -> None:
    given = list(CASES.values())
    assert all(trial.possible for trial in given)
    assert faults_of(given, ranks(WORLD).run(rows_of, given)) == []


@pytest.mark.parametrize("file", ["chunk_rows", "ring_chunks", "ring", "head_exchange"])
def test_each_fault_is_found(file: str, ranks: Callable[[int], Pool]) -> None:
    faults = [fault for fault in FAULTS if fault.place.startswith(f"{file}.")]
    assert len(faults) >= 10
    per_rank = ranks(WORLD).run(rows_with, faults)
    for fault, *rows in zip(faults, *per_rank, strict=True):
        assert not any(isinstance(each, str) for each in rows), f"{fault} raises: {rows}"
        assert faults_of([CASES[fault.case]], [[each] for each in rows]), f"nobody finds {fault}"
