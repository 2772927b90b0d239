"""Modules in `converters` called by the core, imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.base.entries import lazy_module

if TYPE_CHECKING:
    from ckpt.plan import protocols

ties: protocols.TiesProtocol = lazy_module("converters.names.transformers.ties")
tensor_kinds: protocols.TensorKindsProtocol = lazy_module("converters.names.transformers.tensor_kinds")
run_names: protocols.RunNamesProtocol = lazy_module("converters.names.run_names")
layer_names: protocols.LayerNamesProtocol = lazy_module("converters.deepspeed.layer_names")
proof: protocols.ProofProtocol = lazy_module("converters.names.hub.proof")
expected: protocols.ExpectedProtocol = lazy_module("converters.names.hub.expected_tensors")
modules: protocols.ModulesProtocol = lazy_module("converters.names.transformers.modules")
classes: protocols.ClassesProtocol = lazy_module("converters.names.hub.classes")
state_dicts: protocols.StateDictsProtocol = lazy_module("converters.pytorch.state")
quantization: protocols.QuantizationProtocol = lazy_module("converters.quantized.parts")
dequantizing: protocols.DequantizingProtocol = lazy_module("converters.quantized.dequantize")
quantizing: protocols.QuantizingProtocol = lazy_module("converters.quantized.quantize")
rounding: protocols.RoundingProtocol = lazy_module("converters.quantized.rounding")
stored_states: protocols.StoredStatesProtocol = lazy_module("converters.quantized.stored_states")
