"""The choice among megatron-core's engines that a configuration makes."""

from typing import Any

from torch import nn

from train.config import Config
from train.megatron.engine import MegatronEngine
from train.megatron.fsdp import FsdpEngine


def open_engine(model: nn.Module, config: Config) -> MegatronEngine:
    """Builds megatron-core's model of the same configuration."""
    return engine_of(model.config, config)


def engine_of(sizes: Any, config: Config) -> MegatronEngine:
    """The engine of a model of transformers' configuration `sizes`."""
    return (FsdpEngine if config.saving == "fsdp_dtensor" else MegatronEngine)(sizes, config)
