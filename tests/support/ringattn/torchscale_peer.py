"""Finds torchscale and Prov-GigaPath's slide encoder for comparison, and stands in for what they import beside torch.

``TORCHSCALE_FOLDERS`` names folders, separated as in PATH, that hold the packages ``torchscale`` (a checkout: releases
up to 0.3.0 lack LongNet), ``einops`` and, for slides, ``gigapath``, whose own ``torchscale`` folder serves too.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn


def attend_densely(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float = 0.0,
    bias: None = None,
    scale: None = None,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Stand in for flash-attn: out (B, S, H, D) and lse (B, H, S) of q, k and v (B, S, H, D), in their dtype."""
    assert (dropout, bias, scale, is_causal) == (0.0, None, None, False)
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), v), logits.logsumexp(-1)


# What the peers import beside torch and einops, and only call in eval mode here. They are taken away again after the
# import: other libraries look whether they are there.
_STAND_INS: dict[str, dict[str, Any]] = {
    "fairscale.nn": {"checkpoint_wrapper": None, "wrap": None},
    "timm.models.layers": {"drop_path": lambda x, probability, training: x},
    "timm.models.registry": {"register_model": lambda function: function},
    "huggingface_hub": {},
}


def _stand_ins() -> dict[str, types.ModuleType]:
    """Return modules, by name, in the place of those that are not installed or cannot be imported."""
    made: dict[str, types.ModuleType] = {}
    for name, members in _STAND_INS.items():
        try:
            importlib.import_module(name)
        except ImportError:
            for depth in range(1, name.count(".") + 2):
                part = ".".join(name.split(".")[:depth])
                made.setdefault(part, types.ModuleType(part))
            vars(made[name]).update(members)
    return made


def _peer(name: str) -> Any:
    """Return a module of the peers, or skip the test with the reason."""
    folders = [folder for folder in os.environ.get("TORCHSCALE_FOLDERS", "").split(os.pathsep) if folder]
    with pytest.MonkeyPatch.context() as patch:
        for folder in reversed(folders):
            patch.syspath_prepend(folder)
        for part, stand_in in _stand_ins().items():
            patch.setitem(sys.modules, part, stand_in)
        try:
            module = importlib.import_module(name)
            importlib.import_module("torchscale.component.multihead_attention").flash_attn_func = attend_densely
        except ImportError as error:
            pytest.skip(f"{error}; TORCHSCALE_FOLDERS names the folders of a checkout, see tests/support")
    return module


def longnet_of(**config: Any) -> nn.Module:
    """Return torchscale's LongNet encoder with random weights, in eval mode."""
    model = _peer("torchscale.model.LongNet")
    made = model.LongNetEncoder(_peer("torchscale.architecture.config").EncoderConfig(flash_attention=True, **config))
    return randomized(made)


def slide_encoder_of(**arguments: Any) -> nn.Module:
    """Return Prov-GigaPath's slide encoder with random weights, in eval mode."""
    with np.printoptions(legacy="1.25"):  # it runs the repr of its segments, which NumPy 2 writes with its own name
        return randomized(_peer("gigapath.slide_encoder").LongNetViT(**arguments))


def randomized(module: nn.Module) -> nn.Module:
    """Return the module in eval mode, norms and biases away from 1 and 0, so that none of them can be left out."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2 if parameter.dim() == 1 else 0.02)
    return module.eval()
