"""The memory pool of CUDA graphs, which torch refuses once its last graph is gone."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch

from ringattn.runtime import graphed


def test_graphs_share_a_pool_as_long_as_one_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    handles = itertools.count()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(handles)))
    device = graphed._Device(torch.device("cuda", 0))
    first, second = device.pool(), device.pool()
    assert first is second
    del first
    gc.collect()
    assert device.pool().handle == (0, 0)
    del second
    gc.collect()
    assert device.pool().handle == (0, 1)
