"""A stand-in for what Transformer Engine's Adam calls with `store_param_remainders`, a function of its compiled part.

The arithmetic is that of Transformer Engine 2.20, common/multi_tensor/adam.cu: the update in fp32, and the cut of the
result into a bf16 parameter, rounded up from half on, and an int16.  The whole results are kept beside, as the truth.
"""

from typing import Any

import torch

#: The fp32 parameter of the last step, by the address of what is left of it.
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
    """Adam with decoupled weight decay, on gradients, parameters, both moments and remainders."""
    assert mode == 1
    first, second = (1 - beta1**count, 1 - beta2**count) if corrects else (1.0, 1.0)
    for gradient, parameter, mean, square, remainder in zip(*lists, strict=True):
        whole = MASTERS.get(parameter.data_ptr())
        whole = parameter.float() if whole is None else whole  # before the first step all remainders are 0
        slope = gradient.float()
        mean.mul_(beta1).add_(slope, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(slope, slope, value=1 - beta2)
        whole = whole - rate * ((mean / first) / ((square / second).sqrt() + epsilon) + decay * whole)
        MASTERS[parameter.data_ptr()] = whole
        halves = whole.view(torch.int16).reshape(*whole.shape, 2)  # little-endian: the lower one first
        remainder.copy_(halves[..., 0])
        parameter.copy_((halves[..., 1] + (halves[..., 0] < 0)).to(torch.int16).view(torch.bfloat16))
