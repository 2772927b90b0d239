"""Stand-in for the compiled `store_param_remainders` kernel in Transformer Engine's Adam.

Follows multi_tensor/adam.cu of version 2.20. A bf16 parameter and an int16 remainder hold the fp32 result. `MASTERS`
keeps the fp32 result for comparison.
"""

from typing import Any

import torch

#: The fp32 parameter after the last step, by the address of its bf16 parameter.
MASTERS: dict[int, torch.Tensor] = {}


def step(
    chunk: int,
    noop: Any,
    lists: list[list[torch.Tensor]],
    rate: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    count: int,
    mode: int,
    corrects: int,
    decay: float,
) -> None:
    """Apply Adam with decoupled weight decay to gradients, parameters, moments and remainders."""
    assert mode == 1
    first, second = (1 - beta1**count, 1 - beta2**count) if corrects else (1.0, 1.0)
    for gradient, parameter, mean, square, remainder in zip(*lists, strict=True):
        whole = MASTERS.get(parameter.data_ptr())
        whole = parameter.float() if whole is None else whole  # remainders are 0 before the first step
        slope = gradient.float()
        mean.mul_(beta1).add_(slope, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(slope, slope, value=1 - beta2)
        whole = whole - rate * ((mean / first) / ((square / second).sqrt() + epsilon) + decay * whole)
        MASTERS[parameter.data_ptr()] = whole
        halves = whole.view(torch.int16).reshape(*whole.shape, 2)  # little-endian: lower half first
        remainder.copy_(halves[..., 0])
        parameter.copy_((halves[..., 1] + (halves[..., 0] < 0)).to(torch.int16).view(torch.bfloat16))
