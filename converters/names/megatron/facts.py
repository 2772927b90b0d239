"""The facts about a source that only Megatron's own writers, and the relation to Megatron's names, understand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from converters.names.megatron.model.splits import GateBlocks

#: The kind of an adapter that is PEFT's LoRA on Megatron's modules, as ms-swift trains it.
SWIFT = "ms-swift"


@dataclass(frozen=True, slots=True)
class AdapterRun:
    """What the config of a run of Megatron-Bridge or ms-swift, the file at `path`, says of the adapter it trained.

    `kind` is the module of `megatron.bridge.peft` that has the class, or ms-swift's name (`SWIFT`).  `expert_dim` is
    the rank of adapters of experts, which may be another one than `dim`.  `shares_outer` is whether experts share one
    factor of each layer, and have the other by themselves.
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
    """What Megatron-Bridge recorded of a whole run in the folder of an iteration, `folder`.

    `config` is the content of its config, `counters` how far the run has come by the names of its file.
    """

    folder: str
    config: Mapping[str, Any]
    counters: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class MegatronFacts:
    """What Megatron's readers tell their writers, in `Checkpoint.facts`."""

    #: Whether modules are in another order than Megatron's own: its optimizers know parameters by their order.
    own_module_order: bool = False
    #: Of an adapter under Megatron's names, what its run's config says.
    adapter: AdapterRun | None = None
    #: Of a whole run, what Megatron-Bridge recorded in place of Megatron-LM's arguments.
    bridge: BridgeRun | None = None
    #: Settings of the model, if they are not among the run's arguments: NeMo's `model.yaml` or `model_config.yaml`.
    settings: Mapping[str, Any] = field(default_factory=dict)
    #: Blocks in which the run's ranks keep gate and up rows.  Here all gate rows come first.
    blocks: GateBlocks = field(default_factory=GateBlocks)
