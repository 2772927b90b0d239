"""Source facts for Megatron's writers and the relation to Megatron's names, passed in `Checkpoint.facts`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from converters.names.megatron.model.splits import GateBlocks

#: Adapter kind for PEFT's LoRA on Megatron's modules, trained by ms-swift.
SWIFT = "ms-swift"


@dataclass(frozen=True, slots=True)
class AdapterRun:
    """Adapter described by the config at `path`.

    `kind` is the class's module in `megatron.bridge.peft`, or `SWIFT`. `expert_dim` is the experts' rank if it differs.
    `shares_outer`: experts share one factor of each layer.
    """

    path: str
    kind: str
    dim: int
    alpha: float
    dropout: float = 0.0
    expert_dim: int | None = None
    num_layers: int | None = None
    base: str | None = None
    gated: bool = True
    tp: int = 1
    ep: int = 1
    etp: int = 1
    shares_outer: bool = False

    @property
    def has_magnitudes(self) -> bool:
        return self.kind == "dora"

    def dim_of(self, *, is_expert: bool) -> int:
        return self.expert_dim if is_expert and self.expert_dim is not None else self.dim


@dataclass(frozen=True, slots=True)
class BridgeRun:
    folder: str
    config: Mapping[str, Any]
    counters: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class MegatronFacts:
    #: True if modules are not in Megatron's order. Its optimizers identify parameters by order.
    own_module_order: bool = False
    adapter: AdapterRun | None = None
    #: In place of Megatron-LM's arguments.
    bridge: BridgeRun | None = None
    #: Missing from the run's arguments: NeMo's `model.yaml` or `model_config.yaml`, or an adapter's run.
    settings: Mapping[str, Any] = field(default_factory=dict)
    #: Row blocks on the run's ranks. Here all gate rows come first.
    blocks: GateBlocks = field(default_factory=GateBlocks)
