"""Declarations for the parts of a quantized weight.

A part's name is a template: `{w}` is the plain weight's name, `{m}` its module's path prefix. Shapes follow from the
plain weight's shape, [..., out, in].
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ckpt.plan.tensors import Shape
from converters.quantized.module_names import matches_in_some_loader

if TYPE_CHECKING:
    from converters.quantized._packed_weight import PackedParts, PlainWeight
    from converters.quantized._weight import StoredWeights, Weight

Settings = Mapping[str, Any]


class ShapeSet(Protocol):
    """Legal shapes; the first is shown in messages."""

    def __contains__(self, shape: object, /) -> bool: ...
    def __getitem__(self, index: Any, /) -> Any: ...


Shapes = Callable[[Shape], ShapeSet]
ShapeList = Callable[[Shape], list[Shape]]

FLOATS = ("float32", "bfloat16", "float16")
F32 = ("float32",)
F8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
E4M3 = ("float8_e4m3fn",)
E8M0 = ("float8_e8m0fnu", "uint8")
BYTES = ("uint8",)
FOUR_BITS = ("uint8", "int8", "float4_e2m1fn_x2")
INT8, INT32, UINT32, INT64 = ("int8",), ("int32",), ("uint32",), ("int64",)
INTEGERS = ("int8", "uint8", "int32", "int64", *F8)
#: Dtypes for packed values, never used by plain weights.
PACKED = frozenset({*F8, *E8M0, *FOUR_BITS, *INT8, *INT32, *UINT32, "int16", "uint16"})
WEIGHT = "{w}"


@dataclass(frozen=True, slots=True)
class Part:
    """Tensor of a quantized weight. If `shapes` is None, any shape is legal.

    Parts for activations don't change the weight's values.
    """

    dtypes: tuple[str, ...]
    shapes: Shapes | None = None
    required: bool = True
    is_for_activations: bool = False


#: Relative error of a division in fp32, with its steps before and after.
EPSILON = 2.0**-20


@dataclass(frozen=True, slots=True)
class Rounding:
    """Rounding to a method's values, at most half a step off, in units of `scale`.

    `unit` fills parts with bytes under which every plain value is its scale. `values` are the method's values, in
    order; if empty, they are integers with magnitudes up to `span`. Numbers beyond the last value are cut to it.
    `epsilon` is the least relative error of a writer's division. `unbounded` says why no bound holds.
    """

    scale: str
    unit: tuple[tuple[str, int], ...]
    values: tuple[float, ...] = ()
    span: int = 0
    epsilon: float = EPSILON
    unbounded: str = ""


class Dequantizer(Protocol):
    """Computation of a plain weight from its `parts`. Schemes compare equal ones as one."""

    def __call__(self, stored: StoredWeights, owner: str, parts: Mapping[str, str], /) -> Weight: ...


@dataclass(frozen=True, slots=True)
class UnknownValues:
    """Dequantizer for unproved values, named by `found`."""

    found: str

    def __call__(self, stored: StoredWeights, owner: str, parts: Mapping[str, str], /) -> Weight:
        raise stored.unsupported(owner, found=self.found)


@dataclass(frozen=True, slots=True)
class Quantizer:
    """Writer of quantized weights, for a value of `--quantize`.

    `pack` computes a weight's parts, by the rounding `rule`. `settings` returns the config's entry, for the modules
    that stay plain. `blocks` are the rows and columns that share a scale: a weight with a partial block stays plain.
    `names` match the weights, with the group `layer`; None matches linear layers. `model_types` None means models
    without their own quantizer.
    """

    pack: Callable[[PlainWeight], Sequence[PackedParts]]
    settings: Callable[[Sequence[str]], dict[str, Any]]
    rule: str
    blocks: tuple[int, int] = (1, 1)
    names: re.Pattern[str] | None = None
    model_types: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Scheme:
    """All parts of a weight by name template.

    `plain` computes the plain shape from the shape of the part `packed`. If `may_transpose`, this is a Conv1D's
    transposed shape. `is_stack` True is only for experts in one tensor, with a name not ending in `weight`, False only
    for all others. `bits` is the size of an element if the packed part has no dims. `dequantize` is None if the values
    are unknown, `rounding` if their error is. transformers 5.23 joins experts while loading if `joins_experts`
    (`quantizers/base.py`, `update_weight_conversions`), and applies the scales of stacks if `loads_stacks`.
    """

    packed: str
    parts: Mapping[str, Part]
    plain: Callable[[Shape], Shape] | None = None
    is_stack: bool | None = None
    bits: int | None = None
    may_transpose: bool = False
    dequantize: Dequantizer | None = None
    rounding: Rounding | None = None
    joins_experts: bool = False
    loads_stacks: bool = False


@dataclass(frozen=True, slots=True)
class Method:
    """Quantization method, with its names in `quant_method`.

    `schemes` returns None for unknown settings, `unrecorded` the schemes for checkpoints without a recorded method.
    If `takes_plain`, its loader quantizes a plain weight, or takes it unchanged. `own_settings` is the key for
    modules' own settings, by name, or "" if they are next to all others. `unwritable` is the reason why safetensors
    files written by ckpt can't hold the weights. `packages` are required by transformers 5.23 (`quantizers/`,
    `validate_environment`). `recorded` returns the shapes of a weight's parts that its file's metadata records: by
    template, from the metadata, its name and its parts' shapes. `matches` returns True if an entry in the config's
    list of excluded modules means a module. `known` are settings that are read, or don't change stored weights: any
    other setting makes the weights' values unknown.
    """

    names: tuple[str, ...]
    schemes: Callable[[Settings], Sequence[Scheme] | None]
    unrecorded: Callable[[], Sequence[Scheme]] = tuple
    takes_plain: bool = False
    own_settings: str | None = None
    unwritable: str | None = None
    quantizers: Mapping[str, Quantizer] = field(default_factory=dict, hash=False)
    packages: tuple[str, ...] = ()
    matches: Callable[[str, str], bool] = matches_in_some_loader
    known: frozenset[str] = frozenset()
    recorded: Callable[[Mapping[str, str], str, Mapping[str, Shape]], Mapping[str, Shape]] | None = None


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Settings of a config group in compressed-tensors' form, and of the numbers in it.
GROUPS = words(
    "config_groups targets weights input_activations output_activations format num_bits type symmetric group_size "
    "strategy block_structure dynamic actorder scale_dtype zp_dtype observer observer_kwargs"
)
#: Settings that gptqmodel and AutoRound record with any layout. They steer calibration, activations or kernels.
CALIBRATION = words(
    "act_bits act_data_type act_dynamic act_group_size act_sym amp backend batch_size block_name_to_quantize "
    "checkpoint_format damp_auto_increment damp_percent data_type dataset desc_act enable_minmax_tuning "
    "enable_norm_bias_tuning enable_quanted_input format gradient_accumulate_steps iters lm_head low_cpu_mem_usage "
    "low_gpu_mem_usage lr meta method minmax_lr nsamples pack_dtype pack_impl provider quant_block_list scale_dtype "
    "seqlen static_groups sym to_quant_block_names train_bs true_sequential"
)


# -- shapes -----------------------------------------------------------------------------------------------------


def scalar(plain: Shape) -> list[Shape]:
    """Return the shapes for one number per tensor, or per matrix in a stack."""
    lead = plain[:-2]
    return [(), (1,), (1, 1), *([lead, (*lead, 1), (*lead, 1, 1)] if lead else [])]


def per_output(plain: Shape) -> list[Shape]:
    return [(*plain[:-2], plain[-2], 1), (*plain[:-2], plain[-2])]


def per_group(rows: int, columns: int) -> ShapeList:
    def shapes(plain: Shape) -> list[Shape]:
        return [(*plain[:-2], -(-plain[-2] // max(1, rows)), -(-plain[-1] // max(1, columns)))]

    return shapes


class _AnyBlocks:
    """Scale shapes for blocks of any size."""

    def __init__(self, plain: Shape) -> None:
        self._plain = plain

    def __contains__(self, shape: object) -> bool:
        if not isinstance(shape, tuple):
            return False
        is_tiled = len(shape) == len(self._plain) and all(
            n and size % n == 0 for size, n in zip(self._plain, shape, strict=True)
        )
        return is_tiled or shape in scalar(self._plain) + per_output(self._plain)

    def __getitem__(self, _: int) -> Shape:
        return (*self._plain[:-1], 1)


def any_blocks(plain: Shape) -> _AnyBlocks:
    return _AnyBlocks(plain)


def wider(factor: int) -> Callable[[Shape], Shape]:
    return lambda packed: (*packed[:-1], packed[-1] * factor)


def optional(dtypes: tuple[str, ...] = FLOATS, shapes: Shapes | None = None) -> Part:
    return Part(dtypes, shapes, required=False)


def for_activations(dtypes: tuple[str, ...] = FLOATS, shapes: Shapes | None = None, *, required: bool = False) -> Part:
    return Part(dtypes, shapes, required, is_for_activations=True)


def number(settings: Settings, *names: str) -> int | None:
    return next((settings[name] for name in names if type(settings.get(name)) is int), None)
