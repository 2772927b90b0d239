"""FRoD: layers of one category share a basis, which PEFT makes of all of their weights.

What is added to a layer goes by that basis and by the layer's own weight.  The adapter's file has the basis unless
`save_projection` is false: then it is made anew, one category at a time, of weights that are read when PEFT computes
with them (peft 0.21.2, `tuners/frod/model.py`).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from ckpt.base.errors import CorruptError
from ckpt.base.sizes import show_size
from ckpt.lora.hollow import WholeModel
from ckpt.lora.layer import CONV1D, LINEAR, made_layer
from ckpt.lora.order import is_recorded
from ckpt.plan.tensors import Shape
from ckpt.state import adapter as names

if TYPE_CHECKING:
    import torch

_LOCK = threading.Lock()  # one layer at a time, as each takes several times its weight
_NAME = "default"
#: What layers of a category share, by the names in PEFT's model.
_BASIS, _INDICES, _SIZE = SHARED = ("frod_V", "frod_s_indices", "frod_s_size")
#: And what each has for itself.
_DIAGONAL, _VALUES = OWN = ("frod_lambda_l", "frod_lambda_s_values")
#: Bytes per element of a category's weights while its basis is made: the weights in fp32, stacked, decomposed.
_BYTES = 16
#: Bytes per element of a basis while places in it are drawn: all of them in int64, in several forms.
_DRAWN = 64
#: Bytes per place in a basis that has a value of a layer's own: its row and column.
_PLACE = 16


@dataclass(frozen=True)
class _Unread:
    """A weight that is read each time that PEFT takes its values."""

    dtype: torch.dtype
    load: Callable[[], torch.Tensor]
    is_turned: bool = False

    @property
    def T(self) -> _Unread:  # noqa: N802, as torch has it
        return replace(self, is_turned=not self.is_turned)

    def detach(self) -> torch.Tensor:
        """The values, as of a tensor."""
        return self.load().T if self.is_turned else self.load()


@dataclass(frozen=True, eq=False)
class JointModel(WholeModel):
    """The hollow model of a base, whose layers are found and left as they are: PEFT's own are made one at a time."""

    def wrap(self, model: Any) -> Any:
        """PEFT's model, without any layer of its own and without what they share."""
        from peft.tuners.frod.model import FrodModel

        class Unmade(FrodModel):  # type: ignore[misc]
            def _init_frod_projections(self, *given: Any) -> None:
                """Nothing yet."""

            def _create_and_replace(self, *given: Any, **named: Any) -> None:
                """Nothing yet."""

        found = Unmade(model, self.made, _NAME)
        self._check({one: _num_in(found.model.get_submodule(one)) for one in found.targeted_module_names})
        return found

    def _check(self, layers: Mapping[str, int]) -> None:
        """CorruptError where the adapter's tensors are not those of `layers`, each of which has so many inputs."""
        expected: dict[str, Shape | None] = {}
        kinds = SHARED if is_recorded(self.adapter) else ()
        for module, num_in in layers.items():
            of_category = {kind: f"base_model.{kind}.{_category(module)}" for kind in kinds}
            shapes = {_BASIS: (num_in, num_in), _SIZE: (2,)}
            expected |= {fqn: shapes.get(kind) for kind, fqn in of_category.items()}
            expected |= {f"{names.PREFIX}{module}.{_DIAGONAL}": (num_in,)}
            indices = self.factors.get(of_category.get(_INDICES, ""))
            expected |= {f"{names.PREFIX}{module}.{_VALUES}": None if indices is None else indices.shape[1:]}
        path = self.adapter.config.path
        for fqn, shape in expected.items():
            if fqn not in self.factors:
                raise CorruptError("the adapter lacks a tensor of this layer", path=path, fqn=fqn)
            if shape is not None and self.factors[fqn].shape != shape:
                raise CorruptError(
                    "PEFT does not load this adapter: a tensor is of another size than the base's layer asks for",
                    path=path,
                    fqn=fqn,
                    expected=f"shape {list(shape)}",
                    found=f"shape {list(self.factors[fqn].shape)}",
                )
        if unknown := self.factors.keys() - expected.keys():
            raise CorruptError("PEFT has no place for a tensor of this adapter", path=path, fqn=min(unknown))

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that the adapter changes."""
        return tuple(self.wrapped.targeted_module_names)

    @cached_property
    def _shared(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """What layers of each category share: from the adapter's file, or made of their weights."""
        if not is_recorded(self.adapter):
            return self._made_anew()
        found: dict[str, dict[str, torch.Tensor]] = {}
        for kind in SHARED:
            before = f"base_model.{kind}."
            for fqn, factor in self.factors.items():
                if fqn.startswith(before):
                    found.setdefault(fqn.removeprefix(before), {})[kind] = factor.load()
        return found

    def _made_anew(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        import torch
        from peft.tuners.frod.model import FrodModel

        model = self.wrapped
        for module in self.layers:
            layer, fqn = model.model.get_submodule(module), f"{module}.weight"
            dtype = layer.weight.dtype
            del layer.weight
            layer.weight = _Unread(dtype, self.stored(fqn).load)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.made.progressbar = False
            FrodModel._init_frod_projections(model, self.made, _NAME)
        return {category: {kind: getattr(model, kind)[category][_NAME] for kind in SHARED} for category in model.frod_V}

    def merge(self, module: str, weight: torch.Tensor) -> torch.Tensor:
        """The weight of `module` with what the adapter adds, by a layer of PEFT's that is made for it alone."""
        import torch

        path = self.adapter.config.path
        with _LOCK, warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            try:
                with ThreadPoolExecutor(1) as alone:  # it computes in as many threads as PEFT, unlike the one here
                    return alone.submit(self._merged, module, weight).result()
            except (ValueError, RuntimeError, TypeError, KeyError) as error:
                raise CorruptError(f"PEFT does not load this adapter: {error}", path=path, fqn=module) from error

    def _merged(self, module: str, weight: torch.Tensor) -> torch.Tensor:
        import torch
        from peft.tuners._buffer_dict import BufferDict
        from peft.tuners.frod.model import FrodModel
        from torch import nn

        shared = self._shared[_category(module)]
        kind = LINEAR if isinstance(self.wrapped.model.get_submodule(module), nn.Linear) else CONV1D
        base = made_layer(kind, tuple(weight.shape), has_bias=False)
        base.bias = None  # which Conv1D has: PEFT moves the weight to where it is
        base.weight = nn.Parameter(weight, requires_grad=False)
        given = (BufferDict({_NAME: shared[one]}) for one in SHARED)
        layer = FrodModel._create_new_module(self.made, *given, _NAME, base)
        for name in OWN:
            found, trained = getattr(layer, name), self.factors[f"{names.PREFIX}{module}.{name}"].load()
            if trained.shape != found[_NAME].shape:
                raise ValueError(f"size mismatch for {name}: {list(trained.shape)}, not {list(found[_NAME].shape)}")
            found[_NAME] = nn.Parameter(trained, requires_grad=False)
        with torch.no_grad():
            layer.merge()
        return base.weight.detach()

    @property
    def notes(self) -> Iterator[str]:
        """How much memory it takes that layers share a basis, and when the result is wrong."""
        decomposing, drawing, held = dict[str, int](), dict[str, int](), dict[str, int]()
        for module in self.layers:
            category, choice = _category(module), self.chosen[f"{module}.weight"]
            num_in = _num_in(self.wrapped.model.get_submodule(module))
            num_places = min(int(num_in**2 * self.made.sparse_rate), num_in**2 - num_in)
            decomposing[category] = decomposing.get(category, 0) + prod(choice.tensor.shape) * _BYTES
            drawing[category] = num_in**2 * _DRAWN
            held[category] = num_in**2 * choice.dtype.itemsize + num_places * _PLACE
        total = sum(held.values())
        if is_recorded(self.adapter):
            yield f"what layers of a category share stays in memory while they are merged: {show_size(total)}"
            return
        peak = show_size(total + max(*decomposing.values(), *drawing.values()))
        yield (
            "what layers of a category share is not in the adapter (save_projection is false): it is made anew of the "
            f"base, as PEFT does, which takes about {peak} of memory; where training computed it on another kind of "
            "processor, with another number of threads or in another dtype, the result is wrong"
        )


def _category(module: str) -> str:
    from peft.tuners.frod.model import _category_from_key

    category: str = _category_from_key(module)
    return category


def _num_in(layer: Any) -> int:
    """The inputs of a layer; TypeError for one of a class that PEFT does not adapt."""
    from torch import nn

    is_linear, name = isinstance(layer, nn.Linear), type(layer).__name__
    if not is_linear and name != CONV1D:
        raise TypeError(f"Target module {name} is not supported")
    return int(layer.weight.shape[1 if is_linear else 0])
