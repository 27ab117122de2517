"""Sums the gradients of parameters that are used in many parts of one call in float32, not in the 16 bits of each.

Autograd adds up in the dtype of what was used: of bfloat16 parameters, or of autocast's copies, in bfloat16, where the
sum over 64 parts errs by 2 to 3 times as much as the whole and that over 256 by 4 to 10. Here each part uses stand-ins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Source(NamedTuple):
    """Source of the stand-ins of a parameter: where gradients are summed, and the values."""

    sum: Tensor
    values: Tensor


Sources = Mapping[str, Source]
StandIns = Mapping[str, Tensor]
NO_STAND_INS: StandIns = MappingProxyType({})


def sources_of(module: nn.Module, device_type: str, *, cast: bool) -> Sources:
    """Return the sources of the parameters whose gradients would be summed in 16 bits now, by name.

    ``cast`` takes the parameters of linear layers into autocast's dtype once for all parts. Without it each part has
    its own copy made, for which something has to make it again in the backward: else they are all kept.
    """
    autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    found: dict[str, Source] = {}
    for prefix, owner in module.named_modules():
        for name, parameter in owner.named_parameters(prefix, recurse=False):
            if not parameter.requires_grad or parameter.dtype is torch.float64:
                continue
            if parameter.dtype is not torch.float32:
                found[name] = Source(_sum(parameter), parameter.detach())
            elif autocast is not None:
                is_cast = cast and isinstance(owner, nn.Linear)
                values = parameter.detach().to(autocast) if is_cast else parameter.detach()
                found[name] = Source(parameter, values)
    return found


def stand_ins(sources: Sources) -> StandIns:
    """Return the parameters of one part."""
    return {name: _stand_in(*source) for name, source in sources.items()}


def call(module: nn.Module, parameters: StandIns, x: Tensor) -> Tensor:
    """Call a module with these parameters in the place of its own."""
    y: Tensor = torch.func.functional_call(module, dict(parameters), (x,)) if parameters else module(x)
    return y


class _Sum(torch.autograd.Function):
    """Float32 tensor like a parameter in 16 bits, of no memory and no meaning but to sum the gradient in."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.dtype = parameter.dtype
        return parameter.new_empty((), dtype=torch.float32).expand(parameter.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.to(ctx.dtype)


class _StandIn(torch.autograd.Function):
    """The values, with the gradient going to ``total`` in its dtype."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, values: Tensor) -> Tensor:
        ctx.dtype = total.dtype
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


_sum: Callable[[Tensor], Tensor] = _Sum.apply
_stand_in: Callable[[Tensor, Tensor], Tensor] = _StandIn.apply
