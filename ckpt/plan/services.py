"""Modules in `converters` called by the core, with the protocols in `ckpt.plan.protocols`.

They know models by their config. A module is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.base.entries import late

if TYPE_CHECKING:
    from ckpt.plan import protocols

ties: protocols.TiesProtocol = late("converters.names.transformers.ties")
torchtitan: protocols.TorchtitanProtocol = late("converters.names.torchtitan")
layer_names: protocols.LayerNamesProtocol = late("converters.deepspeed.layer_names")
proof: protocols.ProofProtocol = late("converters.names.hub.proof")
expected: protocols.ExpectedProtocol = late("converters.names.hub.expected_tensors")
modules: protocols.ModulesProtocol = late("converters.names.transformers.modules")
classes: protocols.ClassesProtocol = late("converters.names.hub.classes")
state_dicts: protocols.StateDictsProtocol = late("converters.pytorch.state")
quantization: protocols.QuantizationProtocol = late("converters.names.quantization.parts")
dequantizing: protocols.DequantizingProtocol = late("converters.quantized.dequantize")
stored_states: protocols.StoredStatesProtocol = late("converters.quantized.stored_states")
