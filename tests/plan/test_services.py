"""`ckpt/plan/services.py`, `protocols.py`, `ckpt/adapters/services.py`: `converters` matches its protocols.

mypy compares each module with its protocol here, since the core imports none of them.
"""

from __future__ import annotations

import converters.deepspeed.layer_names
import converters.huggingface.peft
import converters.names.adapter_settings
import converters.names.hub.classes
import converters.names.hub.expected_tensors
import converters.names.hub.proof
import converters.names.parameters
import converters.names.run_names
import converters.names.transformers.modules
import converters.names.transformers.relation
import converters.names.transformers.tensor_kinds
import converters.names.transformers.ties
import converters.pytorch.state
import converters.quantized.dequantize
import converters.quantized.parts
import converters.quantized.quantize
import converters.quantized.rounding
import converters.quantized.stored_states
from ckpt.adapters import services as of_adapters
from ckpt.base.entries import Late
from ckpt.commands.estimate import table
from ckpt.commands.merge_lora import empty_model
from ckpt.plan import protocols, services

TIES: protocols.TiesProtocol = converters.names.transformers.ties
TENSOR_KINDS: protocols.TensorKindsProtocol = converters.names.transformers.tensor_kinds
RUN_NAMES: protocols.RunNamesProtocol = converters.names.run_names
LAYER_NAMES: protocols.LayerNamesProtocol = converters.deepspeed.layer_names
PROOF: protocols.ProofProtocol = converters.names.hub.proof
EXPECTED: protocols.ExpectedProtocol = converters.names.hub.expected_tensors
MODULES: protocols.ModulesProtocol = converters.names.transformers.modules
CLASSES: protocols.ClassesProtocol = converters.names.hub.classes
PARAMETERS: table.ParametersProtocol = converters.names.parameters
STATE_DICTS: protocols.StateDictsProtocol = converters.pytorch.state
QUANTIZATION: protocols.QuantizationProtocol = converters.quantized.parts
DEQUANTIZING: protocols.DequantizingProtocol = converters.quantized.dequantize
QUANTIZING: protocols.QuantizingProtocol = converters.quantized.quantize
ROUNDING: protocols.RoundingProtocol = converters.quantized.rounding
STORED_STATES: protocols.StoredStatesProtocol = converters.quantized.stored_states
SETTINGS: of_adapters.SettingsProtocol = converters.names.adapter_settings
NAMES: of_adapters.NamesProtocol = converters.huggingface.peft
MODEL_BUILDER: empty_model.BuilderProtocol = converters.names.transformers.relation


def test_each_service_is_the_module_that_mypy_compares() -> None:
    found = {
        name.upper(): value.name
        for room in (services, of_adapters, empty_model, table)
        for name, value in vars(room).items()
        if isinstance(value, Late)
    }
    assert found == {name: value.__name__ for name, value in globals().items() if name.isupper()}
