"""Parts of quantized weights in a checkpoint, and checks for missing parts."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from ckpt.base.text import pluralize
from ckpt.plan import services
from ckpt.plan.checkpoint import BUFFER, WEIGHT, Checkpoint
from ckpt.plan.tensors import Shape, Tensor, whole
from ckpt.runs.model_files import CONFIG
from ckpt.runs.recorded_precision import Quantization, quantization_of
from converters.quantized.four_bits import MAX_STATE, STATE, FourBitState, StateError, parse_state
from converters.quantized.headers import file_metadata
from converters.quantized.methods import methods, schemes_of
from converters.quantized.module_names import (
    IGNORED,
    REGEX,
    aliases,
    is_target,
    matcher_of_transformers,
    matches_by_name,
    matches_in_some_loader,
)
from converters.quantized.scheme import E4M3, FLOATS, PACKED, Method, Scheme, Settings, UnknownValues

_PLAIN = "{w}"
_WEIGHT, _NUMBER = "weight", re.compile(r"\d+")
#: Also used by plain modules, so only counted if packed or next to packed values.
_COMMON = ("scale", "scales", "biases")
#: Part names, and attention's scales.
_WORDS = re.compile(
    r"([._]|^)(\w*(scale|scales|scale_inv|scale_2|zero_point|zeros|absmax|quant_map|g_idx|blocks|packed|qweight|qdata)|"
    r"biases|SCB|weight_shape)$"
)
#: Part names that no method uses next to plain weights.
_OF_QUANTIZED = re.compile(
    r"(?P<module>(?:.*\.)?)(weight_(scale|scales|scale_inv|scale_2|zero_point|global_scale|packed|shape|g_idx|blocks)|"
    r"weight\.(nested_)?(absmax|quant_map)|weight\.quant_state\..+|weight_format|qweight|qzeros|g_idx|SCB|"
    r"_weight_(qdata|scale|scale_and_zero|zero_point))"
)
_EXPERT = re.compile(r"\.experts\.\d+\.")
_ATTENTION = re.compile(r"\.([qkv]|kv|prob|output)_(scale|zero_point)$")


#: Shape if a plain weight's parts don't show it.
UNKNOWN_SHAPE: Shape = (-1,)


@dataclass(frozen=True, slots=True)
class Fault:
    fqn: str
    what: str
    is_missing: bool = False

    def __str__(self) -> str:
        return f"{self.fqn}: {self.what}"


class _Fit(NamedTuple):
    """Best-fitting scheme, the weight's faults, and all schemes without fault."""

    scheme: Scheme | None
    faults: Sequence[Fault]
    schemes: Sequence[Scheme] = ()


@dataclass(frozen=True)
class QuantizedWeights:
    """Quantized weights among `tensors`.

    `expected` are the architecture's plain shapes. `read` returns a tensor's bytes; without it, recorded states are not
    compared with the parts. `metadata` returns the metadata of a tensor's file.
    """

    tensors: Mapping[str, Tensor]
    quantization: Quantization | None
    expected: Mapping[str, Shape] = field(default_factory=dict)
    read: Callable[[str], bytes] | None = None
    metadata: Callable[[str], Mapping[str, str]] | None = None

    @property
    def _method(self) -> str | None:
        return self.quantization.method if self.quantization else None

    @property
    def _settings(self) -> Settings:
        return self.quantization.all_settings if self.quantization else {}

    @property
    def _known(self) -> Method | None:
        return methods().get(self._method) if self._method else None  # imports numpy

    @property
    def _is_by_name(self) -> bool:
        return self._known is not None and self._known.matches is matches_by_name

    @cached_property
    def _schemes(self) -> Sequence[Scheme] | None:
        return schemes_of(self._method, self._settings)

    @cached_property
    def owners(self) -> Mapping[str, Mapping[str, str]]:
        """Part names by the quantized weight's plain name and the part's template."""
        if self._method is None and not any(tensor.dtype.name in PACKED for tensor in self.tensors.values()):
            return {}
        schemes = schemes_of(None, {}) if self._schemes is None else self._schemes
        templates = {template for scheme in schemes or () for template in scheme.parts}
        found: dict[str, dict[str, str]] = defaultdict(dict)
        suffixes = sorted((t[3:] for t in templates if t.startswith("{w}") and t != "{w}"), key=len, reverse=True)
        words = {template[3:] for template in templates if template.startswith("{m}")}
        for name, tensor in self.tensors.items():
            prefix, _, word = name.rpartition(".")
            owner = f"{prefix}.{_WEIGHT}" if prefix else _WEIGHT
            if word in words and (word not in _COMMON or self._is_packed(owner) or self._counts(tensor, word)):
                found[owner]["{m}" + word] = name
            elif suffix := next((s for s in suffixes if name.endswith(s) and self._belongs(name, s)), None):
                found[name.removesuffix(suffix)]["{w}" + suffix] = name
        if "{w}" in templates:
            packed = [n for n, t in self.tensors.items() if t.dtype.name in PACKED and n not in found and _is_matrix(t)]
            claimed = {name for parts in found.values() for name in parts.values()}
            for name in {name for name in (*found, *packed) if name in self.tensors and name not in claimed}:
                found[name]["{w}"] = name
        if self._method is None:
            return {owner: parts for owner, parts in found.items() if any(map(self._is_packed, parts.values()))}
        return dict(found)

    def _is_packed(self, name: str) -> bool:
        return name in self.tensors and self.tensors[name].dtype.name in PACKED

    def _counts(self, tensor: Tensor, word: str) -> bool:
        """Return True for a part, although its module has no packed weight."""
        packed = f"{tensor.fqn.removesuffix(word)}qweight"
        return tensor.dtype.name in PACKED or packed in self.tensors or (word != "scale" and self._method is not None)

    def _belongs(self, name: str, suffix: str) -> bool:
        """Return True for a part, not a parameter with its name."""
        owner = name.removesuffix(suffix)
        last = owner.rpartition(".")[2]
        return last.endswith(_WEIGHT) or self._is_packed(owner) or self._is_packed(name) or ".experts." in owner

    @cached_property
    def schemes(self) -> Mapping[str, Sequence[Scheme]]:
        return {owner: fit.schemes for owner, fit in self._fitted.items()}

    @property
    def can_dequantize(self) -> bool:
        """True if weights of the method have known values, with these settings."""
        dequantizers = (scheme.dequantize for scheme in self._schemes or ())
        return any(one is not None and not isinstance(one, UnknownValues) for one in dequantizers)

    @property
    def unsupported(self) -> list[str]:
        return sorted({s.dequantize.found for s in self._schemes or () if isinstance(s.dequantize, UnknownValues)})

    @cached_property
    def parts(self) -> frozenset[str]:
        return frozenset(name for parts in self.owners.values() for name in parts.values())

    @cached_property
    def attention_scales(self) -> frozenset[str]:
        """Scale names for a quantized KV cache and for attention's inputs; no weight needs them.

        vLLM and compressed-tensors name them `self_attn.k_scale`, and modelopt `k_proj.k_scale`.
        """
        if self.quantization is None:
            return frozenset()
        others = self.tensors.keys() - self.expected.keys()
        return frozenset(n for n in others if _ATTENTION.search(n) and _is_scale(self.tensors[n].shape))

    def in_place(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Return `shapes` with plain weights in place of their parts, without attention's scales."""
        if not self.quantization:
            return dict(shapes)
        found = {name: shape for name, shape in shapes.items() if name not in self.parts | self.attention_scales}
        for owner, parts in self.owners.items():
            if any(map(self._is_packed, parts.values())):
                found[owner] = self._shape_of(owner, parts)
        return found

    def _shape_of(self, owner: str, parts: Mapping[str, str]) -> Shape:
        scheme = self._fitted[owner].scheme
        packed = None if scheme is None else parts.get(scheme.packed)
        if scheme is None or packed is None or scheme.plain is None or len(self.tensors[packed].shape) < 2:
            return UNKNOWN_SHAPE
        shape, wanted = scheme.plain(self.tensors[packed].shape), self.expected.get(owner)
        is_padded = wanted and scheme.packed == "{w}_packed" and _is_padded(shape, wanted)
        is_transposed = wanted and scheme.may_transpose and shape == wanted[::-1]
        return wanted if wanted and (is_padded or is_transposed) else shape

    @property
    def num_parameters(self) -> Mapping[str, int | None]:
        """Number of plain elements in each quantized weight, or None."""
        return {owner: self._count(owner, parts) for owner, parts in self.owners.items()}

    def _count(self, owner: str, parts: Mapping[str, str]) -> int | None:
        scheme, shape = self._fitted[owner].scheme, self._shape_of(owner, parts)
        if shape != UNKNOWN_SHAPE:
            return prod(shape)
        if scheme is None or scheme.bits is None or scheme.packed not in parts:
            return None
        return self.tensors[parts[scheme.packed]].nbytes * 8 // scheme.bits

    def _with_template(self, *suffixes: str) -> Iterator[tuple[str, str, Scheme]]:
        for owner, parts in self.owners.items():
            scheme, faults, _ = self._fitted[owner]
            if scheme is not None and not faults:
                yield from ((owner, name, scheme) for t, name in parts.items() if t.endswith(suffixes))

    @cached_property
    def packed(self) -> frozenset[str]:
        schemes = ((parts, self._fitted[owner].scheme) for owner, parts in self.owners.items())
        return frozenset(parts[one.packed] for parts, one in schemes if one is not None and one.packed in parts)

    @cached_property
    def exponents(self) -> frozenset[str]:
        """Scales stored as exponents in bytes. 255 is NaN."""
        names = (name for _, name, _ in self._with_template("scale", "scales"))
        return frozenset(name for name in names if self.tensors[name].dtype.name == "uint8")

    @cached_property
    def scales(self) -> frozenset[str]:
        """Floating-point scales. These must be positive."""
        names = (name for _, name, _ in self._with_template("_scale", "_scale_inv", "_scale_2", "SCB", "absmax"))
        return frozenset(name for name in names if self.tensors[name].dtype.name in (*FLOATS, *E4M3))

    @cached_property
    def indices(self) -> Mapping[str, int]:
        """Number of groups, by name of the part with group numbers."""
        found = {}
        for owner, name, _ in self._with_template("g_idx"):
            scales = next((n for t, n in self.owners[owner].items() if t.endswith(("{m}scales", "{w}_scale"))), None)
            if scales is not None and len(shape := self.tensors[scales].shape) == 2:
                found[name] = shape[0] if scales.endswith("scales") else shape[1]
        return found

    @cached_property
    def recorded_shapes(self) -> Mapping[str, Shape]:
        """Shape of the packed values, by name of the part with the plain shape."""
        return {name: self._shape_of(owner, self.owners[owner]) for owner, name, _ in self._with_template("_shape")}

    @staticmethod
    def is_packed_shape(packed: Shape, recorded: Shape) -> bool:
        return len(recorded) == len(packed) and _is_padded(packed, recorded)

    @cached_property
    def unproved(self) -> str | None:
        """Reason why the parts were not checked."""
        if self._method and self._schemes is None:
            return f"weight parts quantized by {self.title} were not checked: ckpt does not know this layout"
        if name := next(self._unclaimed(), None):
            return f"quantized weight parts were not checked without a quantization config: {name}, ..."
        return None

    def _unclaimed(self) -> Iterator[str]:
        """Yield packed values of an unrecorded method that no scheme claims."""
        packed = (one for one in self.tensors.values() if one.dtype.name in PACKED) if self._method is None else ()
        unclaimed = (one for one in packed if len(one.shape) >= 2 and one.fqn not in self.parts)
        yield from (one.fqn for one in unclaimed if _is_matrix(one) or self._replaces_weight(one.fqn))

    @property
    def unrecorded(self) -> list[str]:
        """Names of weights in packed parts, if no config records a quantization."""
        if self.quantization:
            return []
        return sorted([*(name for name, parts in self.owners.items() if len(parts) > 1), *self._unclaimed()])

    def _replaces_weight(self, name: str) -> bool:
        """Return True if the checkpoint lacks the module's weight."""
        module = name.rpartition(".")[0].removesuffix(f".{_WEIGHT}")
        weight = f"{module}.{_WEIGHT}"
        return weight in self.expected and weight not in self.tensors

    @property
    def unread(self) -> str | None:
        """Reason why transformers does not load the weights."""
        if self.quantization is None or self.quantization.is_for_transformers or not self.parts:
            return None
        where = "" if self.quantization.where == CONFIG else f", recorded in {self.quantization.where}"
        return f"transformers does not read weights quantized by {self.title}{where}"

    @property
    def untried(self) -> str | None:
        """Reason why it is unknown if transformers loads the quantized weights."""
        excludes = matcher_of_transformers(self._ignored)
        for owner, fit in self._fitted.items():
            packed = fit.scheme and self.tensors.get(self.owners[owner].get(fit.scheme.packed, ""))
            if _EXPERT.search(owner) and not (fit.scheme and fit.scheme.joins_experts):
                return f"transformers joins experts while loading, but may not join the parts of {owner}"
            if packed and len(packed.shape) > 2 and not (fit.scheme and fit.scheme.loads_stacks):
                return f"transformers may not apply the scales of stacked weights, such as {owner}"
            module = owner.rpartition(".")[0]
            if not self._is_by_name and excludes(module):
                return f"transformers excludes {module}, but it is quantized"
        for one in self._plain_in_one_layer:
            if not self._is_listed(one.fqn.rpartition(".")[0]):
                return f"transformers excludes modules, but the config lists the tensor {one.fqn}"
        return None

    @property
    def packages(self) -> tuple[str, ...]:
        """Packages needed by transformers."""
        return self._known.packages if self._known and self.parts else ()

    @property
    def unwritable(self) -> str | None:
        """Reason why files written by ckpt can't hold the weights."""
        return self._known.unwritable if self._known and self.parts else None

    @property
    def title(self) -> str:
        return self.quantization.title if self.quantization else "an unrecorded method"

    # -- faults ------------------------------------------------------------------------------------------------

    @cached_property
    def faults(self) -> Sequence[Fault]:
        if self._method and self._schemes is None:
            return [*self._unlike_siblings()]
        if not self.owners:
            return []
        found = [fault for fit in self._fitted.values() for fault in fit.faults]
        if not self._has_groups:
            found += self._uneven(owner for owner, fit in self._fitted.items() if not fit.faults)
        found += [*self._unexpected(), *self._misplaced(), *self._unlike_metadata()]
        return sorted({fault.fqn: fault for fault in found}.values(), key=lambda fault: fault.fqn)

    def _unlike_metadata(self) -> Iterator[Fault]:
        if self.metadata is None or self._known is None or self._known.recorded is None:
            return
        for owner, parts in self.owners.items():
            shapes = {template: self.tensors[name].shape for template, name in parts.items()}
            recorded = self._known.recorded(self.metadata(next(iter(parts.values()))), owner, shapes)
            for template, wanted in recorded.items():
                if (shape := shapes.get(template, wanted)) != wanted:
                    what = f"shape {list(shape)} instead of {list(wanted)}, recorded in the file's metadata"
                    yield Fault(parts[template], what)

    @property
    def _has_groups(self) -> bool:
        groups, key = self._settings.get("config_groups"), self._known and self._known.own_settings
        return (isinstance(groups, Mapping) and len(groups) > 1) or bool(key and self._settings.get(key))

    @cached_property
    def _fitted(self) -> Mapping[str, _Fit]:
        """Fit of each weight. Weights with equal parts share it."""
        whole: dict[Any, _Fit] = {}
        found = {}
        for owner, parts in self.owners.items():
            tensors = ((template, self.tensors[name]) for template, name in parts.items())
            shapes = tuple((template, tensor.dtype, tensor.shape) for template, tensor in tensors)
            settings = id(self._own_settings(owner.rpartition(".")[0]))
            kind = (shapes, self.expected.get(owner), _is_weight(owner), settings, self._states.get(owner))
            one = whole.get(kind) or self._best(owner, parts)
            if not one.faults:
                whole[kind] = one
            found[owner] = one
        return found

    @cached_property
    def _states(self) -> Mapping[str, FourBitState | StateError]:
        found: dict[str, FourBitState | StateError] = {}
        if self.read is None:
            return found
        for owner, name in self._recorded_states.items():
            match, tensor = STATE.fullmatch(name), self.tensors[name]
            try:
                if match is None or tensor.nbytes > MAX_STATE:
                    raise StateError(f"at most {pluralize(MAX_STATE, 'byte')}", tensor.nbytes)
                found[owner] = parse_state(self.read(name), match["kind"])
            except StateError as error:
                found[owner] = error
        return found

    @cached_property
    def _recorded_states(self) -> Mapping[str, str]:
        return {owner: name for owner, parts in self.owners.items() for name in parts.values() if STATE.fullmatch(name)}

    def _state_faults(self, owner: str, parts: Mapping[str, str]) -> Iterator[Fault]:
        """Yield parts that contradict the recorded state."""
        state, name = self._states.get(owner), self._recorded_states.get(owner, owner)
        if state is None:
            return
        if isinstance(state, StateError):
            yield Fault(name, f"expected {state.expected}, found {state.found}")
            return
        wanted, packed = self.expected.get(owner), self.tensors.get(parts.get(_PLAIN, ""))
        if wanted is not None and sorted(wanted) != sorted(state.shape):  # a Conv1D's weight is transposed
            yield Fault(name, f"records weight shape {list(state.shape)}, but the architecture has {list(wanted)}")
        if packed is not None and packed.nbytes != state.num_bytes:
            size = pluralize(packed.nbytes, "byte")
            what = f"{size} instead of {state.num_bytes}, for the recorded shape {list(state.shape)}"
            yield Fault(packed.fqn, what)
        for end, count in state.counts.items():
            part = parts.get(_PLAIN + end)
            if part is None:
                yield Fault(owner + end, f"missing: recorded in {name}", is_missing=True)
            elif (numel := self.tensors[part].numel) != count:
                yield Fault(part, f"{pluralize(numel, 'element')} instead of {count}, recorded in {name}")
        for template in parts:
            if template.startswith(f"{_PLAIN}.nested_") and template.removeprefix(_PLAIN) not in state.counts:
                yield Fault(parts[template], f"unexpected: {name} records no nested quantization")

    def _best(self, owner: str, parts: Mapping[str, str]) -> _Fit:
        is_weight = _is_weight(owner)
        schemes = [s for s in self._schemes_of(owner.rpartition(".")[0]) if s.is_stack in (None, not is_weight)]
        fits = [_Fit(scheme, [*self._faults_under(scheme, owner, parts)]) for scheme in schemes]
        if not fits:
            return _Fit(None, [Fault(owner, f"quantized, but {self.title} doesn't quantize weights with this name")])
        best = min(fits, key=lambda fit: len(fit.faults))
        return best._replace(schemes=[fit.scheme for fit in fits if fit.scheme and not fit.faults])

    def _own_settings(self, module: str) -> Settings | None:
        key = self._known.own_settings if self._known else None
        every = None if key is None else self._settings.get(key) if key else self._settings
        own = every.get(module) if isinstance(every, Mapping) and module else None
        return own if isinstance(own, Mapping) else None

    def _schemes_of(self, module: str) -> Sequence[Scheme]:
        """Return a module's schemes. It may have its own settings (MLX, ModelOpt)."""
        own = self._own_settings(module)
        if own is None:
            return self._schemes or ()
        found = schemes_of(self._method, {**self._settings, **own})
        return [replace(one, dequantize=None) for one in self._schemes or ()] if found is None else found

    def _faults_under(self, scheme: Scheme, owner: str, parts: Mapping[str, str]) -> Iterator[Fault]:
        module = owner.rpartition(".")[0]
        named = {"w": owner, "m": f"{module}." if module else ""}
        packed = self.tensors.get(parts.get(scheme.packed, ""))
        plain: Shape | None = None
        if packed is not None and scheme.plain is not None and len(packed.shape) >= 2:
            plain = scheme.plain(packed.shape)
            wanted = self.expected.get(owner, plain)
            if scheme.may_transpose and plain == wanted[::-1]:
                wanted = plain
            if plain != wanted and (scheme.packed != "{w}_packed" or not _is_padded(plain, wanted)):
                yield Fault(packed.fqn, f"holds weight shape {list(plain)}, but the architecture has {list(wanted)}")
        if packed is not None and scheme.bits and (shape := self.expected.get(owner)):
            plain, size = shape, -(-prod(shape) * scheme.bits // 8)
            if packed.nbytes != size:
                yield Fault(
                    packed.fqn, f"{pluralize(packed.nbytes, 'byte')} instead of {size}, for weight shape {list(shape)}"
                )
        if scheme.bits:
            yield from self._state_faults(owner, parts)
        for template, part in scheme.parts.items():
            name = parts.get(template)
            if name is None:
                if part.required:
                    yield Fault(template.format(**named), self._missing(scheme), is_missing=True)
                continue
            tensor = self.tensors[name]
            if tensor.dtype.name not in part.dtypes:
                stored = " or ".join(part.dtypes)
                yield Fault(name, f"dtype {tensor.dtype}, and {self.title} stores {stored}")
            elif template == scheme.packed and scheme.plain and len(tensor.shape) < 2:
                yield Fault(name, f"shape {list(tensor.shape)}, not a matrix")
            elif plain and part.shapes and template != scheme.packed and tensor.shape not in part.shapes(plain):
                usual = list(part.shapes(plain)[0])
                yield Fault(name, f"shape {list(tensor.shape)} instead of {usual}, for weight shape {list(plain)}")
        if _PLAIN not in scheme.parts and owner in self.tensors:
            yield Fault(owner, "unexpected: the weight is stored twice, quantized and plain")
        for template in parts.keys() - scheme.parts.keys():
            yield Fault(parts[template], f"unexpected: weights quantized by {self.title} don't have this part")

    def _missing(self, scheme: Scheme) -> str:
        required = [template for template, part in scheme.parts.items() if part.required]
        names = [template.format(w=_WEIGHT, m="") for template in required]
        return f"missing: a weight quantized by {self.title} is stored in {', '.join(names)}"

    def _uneven(self, owners: Iterable[str]) -> Iterator[Fault]:
        """Yield parts that differ from most other layers."""
        alike: dict[str, list[str]] = defaultdict(list)
        for owner in owners:
            alike[_NUMBER.sub("*", owner)].append(owner)
        for siblings in alike.values():
            dtypes = {owner: {t: self.tensors[n].dtype for t, n in self.owners[owner].items()} for owner in siblings}
            for template in {template for owner in siblings for template in dtypes[owner]}:
                usual, count = Counter(dtypes[owner].get(template) for owner in siblings).most_common(1)[0]
                for owner in siblings if count < len(siblings) else ():
                    if (found := dtypes[owner].get(template)) != usual:
                        module = owner.rpartition(".")[0]
                        name = template.format(w=owner, m=f"{module}." if module else "")
                        what = f"dtype {found}" if usual and found else "missing" if usual else "unexpected"
                        has = f"have dtype {usual}" if usual else "have none"
                        yield Fault(
                            name,
                            f"{what}: {count} of {pluralize(len(siblings), 'weight')} like it {has}",
                            found is None,
                        )

    def _unexpected(self) -> Iterator[Fault]:
        """Yield tensors that only another method uses."""
        modules = {owner.rpartition(".")[0] for owner in self.owners if _is_weight(owner)}
        stacks = tuple(f"{owner}_" for owner in self.owners if not _is_weight(owner))
        for name in self.tensors.keys() - self.parts:
            module = name.removesuffix(".absmax").removesuffix(".quant_map").removesuffix(".weight").rpartition(".")[0]
            is_next = module in modules or name.startswith(stacks) or name.rpartition(".")[0] in self.owners
            if is_next and is_part_name(name):
                yield Fault(name, f"unexpected: weights quantized by {self.title} don't have this part")
            elif (match := _OF_QUANTIZED.fullmatch(name)) and name not in self.expected:
                plain = self.tensors.get(f"{match['module']}{_WEIGHT}")
                if plain is not None and plain.dtype.name in FLOATS:
                    yield Fault(name, f"unexpected: {plain.fqn} is {plain.dtype}, not quantized")

    def _misplaced(self) -> Iterator[Fault]:
        """Yield plain weights that the config quantizes, and quantized weights that it does not."""
        patterns = [entry for entry in self._ignored if entry.startswith(REGEX)] if self._is_by_name else []
        for owner, parts in self.owners.items():
            module = owner.rpartition(".")[0]
            if not any(map(self._is_packed, parts.values())):
                continue
            is_named = not self._listed_names.isdisjoint((owner, module))
            if is_named or any(matches_by_name(entry, module) for entry in patterns):
                yield Fault(owner, "quantized, but the config excludes it")
            elif self._is_by_name and self._targets and not is_target(module, self._targets, of_class=True):
                yield Fault(owner, "quantized, but no group in the config has it as target")
        for tensor in self._plain_in_one_layer:
            if not any(self._is_listed(name) for name in (tensor.fqn, tensor.fqn.rpartition(".")[0])):
                what = f"{tensor.dtype}, but the same weight in other layers is quantized by {self.title}"
                yield Fault(tensor.fqn, what)

    def _is_listed(self, module: str) -> bool:
        matches, names = self._known.matches if self._known else matches_in_some_loader, [*aliases(module)]
        is_named = not self._listed_names.isdisjoint(names)
        return is_named or any(matches(entry, name) for entry in self._ignored for name in names)

    @cached_property
    def _ignored(self) -> Sequence[str]:
        return [entry for key in IGNORED for entry in _strings(self._settings.get(key))]

    @cached_property
    def _listed_names(self) -> frozenset[str]:
        return frozenset(self._ignored)

    @cached_property
    def _plain_in_one_layer(self) -> Sequence[Tensor]:
        """Plain weights that other layers quantize. Empty if the method or the config's targets allow them."""
        if self._method is None or (self._known and self._known.takes_plain) or self._settings.get("dynamic"):
            return []
        patterns, targets = {_NUMBER.sub("*", owner) for owner in self.owners}, self._targets
        others = (one for name, one in self.tensors.items() if name not in self.owners and name not in self.parts)
        found = (one for one in others if one.dtype.name not in PACKED and _NUMBER.sub("*", one.fqn) in patterns)
        return [one for one in found if not targets or is_target(one.fqn.rpartition(".")[0], targets, of_class=False)]

    @cached_property
    def _targets(self) -> Sequence[str]:
        """Names and classes of the modules with quantized weights, in config groups."""
        groups = self._settings.get("config_groups")
        values = groups.values() if isinstance(groups, Mapping) else ()
        with_weights = (group for group in values if isinstance(group, Mapping) and group.get("weights"))
        return [target for group in with_weights for target in _strings(group.get("targets"))]

    def _unlike_siblings(self) -> Iterator[Fault]:
        """Yield parts missing from a module but present in most other layers, for unknown methods."""
        modules: dict[str, set[str]] = defaultdict(set)
        for name in self.tensors:
            modules[name.rpartition(".")[0]].add(name.rpartition(".")[2])
        alike: dict[str, list[str]] = defaultdict(list)
        for module in modules:
            alike[_NUMBER.sub("*", module)].append(module)
        for siblings in alike.values():
            counts = Counter(word for module in siblings for word in modules[module])
            for module in siblings:
                for word, count in counts.items():
                    is_usual = count < len(siblings) <= 2 * count and word not in modules[module]
                    if is_usual and _WORDS.search("." + word):
                        what = f"missing: {count} of {pluralize(len(siblings), 'module')} like it have one"
                        yield Fault(f"{module}.{word}", what, is_missing=True)


def is_part_name(name: str) -> bool:
    """Return True if some method uses the name for a part of a quantized weight."""
    return bool(_WORDS.search(name) or _OF_QUANTIZED.fullmatch(name)) and not _ATTENTION.search(name)


def _is_weight(name: str) -> bool:
    return name.rpartition(".")[2] == _WEIGHT


def _is_scale(shape: Shape) -> bool:
    """Return True for one number, or one per head in dims of size 1. Parameters may have the same name."""
    return prod(shape) == 1 or (len(shape) > 1 and prod(shape[1:]) == 1)


def _is_matrix(tensor: Tensor) -> bool:
    return len(tensor.shape) >= 2 and (_is_weight(tensor.fqn) or ".experts." in tensor.fqn)


def _strings(value: Any) -> list[str]:
    return [entry for entry in value if isinstance(entry, str)] if isinstance(value, list) else []


def _is_padded(found: Shape, wanted: Shape) -> bool:
    """Allow padding to whole packed elements, with at most 32 values."""
    return found[:-1] == wanted[:-1] and 0 <= found[-1] - wanted[-1] < 32


def is_quantized(checkpoint: Checkpoint) -> bool:
    """Return False if nothing records a quantization and no tensor has a packed dtype."""
    is_recorded = quantization_of(checkpoint.config, checkpoint.folders) is not None
    return is_recorded or any(
        dtype.name in PACKED for dtype in {one.dtype for one in checkpoint.with_role(WEIGHT, BUFFER)}
    )


def quantized_weights(checkpoint: Checkpoint, *, reads: bool = True) -> QuantizedWeights:
    """Find quantized weights. Without `reads`, recorded states are unproved."""
    tensors = {fqn: tensor for (fqn, role), tensor in checkpoint.tensors.items() if role in (WEIGHT, BUFFER)}
    quantization = quantization_of(checkpoint.config, checkpoint.folders)
    has_packed = any(dtype.name in PACKED for dtype in {tensor.dtype for tensor in tensors.values()})

    def read(name: str) -> bytes:
        from ckpt.move.reading import read_box  # imports numpy

        content: bytes = read_box(tensors[name], whole(tensors[name].shape), checkpoint.computed).tobytes()
        return content

    expected = services.expected.table_shapes(checkpoint.config) if quantization or has_packed else {}
    return QuantizedWeights(tensors, quantization, expected, read if reads else None, file_metadata(tensors))
