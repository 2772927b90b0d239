"""Folders of sentence-transformers.

`modules.json` lists them (sentence-transformers 6, `base/model.py`). In training, module N's tensor names begin with
`N.`. A module's weights are in `model.safetensors`, or in `pytorch_model.bin` (`base/modules/module.py`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ckpt.base.errors import CorruptError, IncompleteError, UsageError
from ckpt.containers.sources import Sources
from ckpt.containers.torchfile.values import StoredTensor, is_state_dict
from ckpt.containers.weights import SINGLE, read_weights
from ckpt.move.files import confined
from ckpt.move.json_files import read_json
from ckpt.move.listing import names_in
from ckpt.move.source import read_file
from ckpt.plan.checkpoint import WEIGHT, Key
from ckpt.plan.tensors import Shape, Tensor, Whole
from ckpt.runs.file_table import TENSOR_SUFFIXES

MODULES = "modules.json"
#: Classes that always have weights.
WITH_WEIGHTS = ("Dense", "LayerNorm", "CNN", "LSTM", "WeightedLayerPooling")
#: Classes without files.
WITHOUT_FILES = ("Normalize",)
#: Prefix of the model's names in `SentenceTransformerTrainer`, by its class: release 6, and older ones.
_TRAINERS_PREFIX = {
    "sentence_transformers.base.modules.transformer.Transformer": "0.model.",
    "sentence_transformers.models.Transformer": "0.auto_model.",
}
#: Config entries for the sizes of classes with known tensors.
_SIZES = {"Dense": ("in_features", "out_features"), "LayerNorm": ("dimension",)}
#: Either one describes the model: an adapter names its base.
_CONFIGS = ("config.json", "adapter_config.json")
_SETTINGS = "config_sentence_transformers.json"
_TORCH = "pytorch_model.bin"
_MAX_JSON = 1 << 20
_T = TypeVar("_T")


class InnerModule(NamedTuple):
    folder: Path
    type: str

    @property
    def kind(self) -> str:
        return self.type.rpartition(".")[2]


def modules_in(folders: Iterable[str | Path]) -> dict[str, InnerModule]:
    """Return each module, without the model itself, by tensor prefix."""
    for folder in map(Path, folders):
        if (folder / MODULES).is_file():
            return {prefix: one for prefix, one in _modules_of(folder).items() if one.folder != folder}
        if (folder / _SETTINGS).is_file():
            raise IncompleteError(f"the folder has {_SETTINGS}, and no {MODULES}", path=folder, expected=MODULES)
    return {}


def _modules_of(home: Path) -> dict[str, InnerModule]:
    try:
        listed = json.loads(read_file(confined(home, MODULES), _MAX_JSON))
        found = {f"{one['idx']}.": (one["path"], str(one["type"])) for one in listed}
    except (ValueError, TypeError, KeyError):
        return {}
    return {prefix: InnerModule(home / path, type_) for prefix, (path, type_) in found.items() if _is_inner(path)}


def trainers_prefix(folders: Iterable[str | Path]) -> str | None:
    """Return the prefix of the model's names in sentence-transformers' trainer, or None if it is unknown."""
    model = _model_in(folders)
    return _TRAINERS_PREFIX.get(model.type) if model else None


def _model_in(folders: Iterable[str | Path]) -> InnerModule | None:
    """Return the first module, the model itself."""
    home = next((folder for folder in map(Path, folders) if (folder / MODULES).is_file()), None)
    return None if home is None else _modules_of(home).get("0.")


def _is_inner(path: object) -> bool:
    return type(path) is str and Path(path).name == path


def check_has_model(folder: Path) -> None:
    """Raise an error if `modules.json` lists a model in `folder`, and no format found one."""
    model = _modules_of(folder).get("0.") if (folder / MODULES).is_file() else None
    if model is None:
        return
    if model.folder == folder:
        what = f"the model's weights are missing, and {MODULES} lists them in this folder"
        raise IncompleteError(what, path=folder, expected=SINGLE)
    raise UsageError(
        f"{MODULES} lists the model in a subfolder: only models in the folder itself are supported",
        path=folder,
        found=model.folder.name,
        hint=f"load and save the folder with sentence-transformers, or give {model.folder} for the model alone",
    )


def module_weights(folders: Iterable[str | Path], sources: Sources) -> dict[Key, Tensor]:
    """Return the modules' tensors, with prefix. Raise IncompleteError for a module without its weights."""
    return {
        (prefix + fqn, role): tensor.renamed(prefix + fqn)
        for prefix, module in modules_in(folders).items()
        for (fqn, role), tensor in _weights_of(module, sources).items()
    }


def weights_files(folder: Path) -> list[Path]:
    """Return the weights of the modules that `modules.json` lists in `folder`, without the model's."""
    modules = modules_in([folder]).values() if (folder / MODULES).is_file() else ()
    return [path for one in modules for name in (SINGLE, _TORCH) if (path := one.folder / name).is_file()]


def _weights_of(module: InnerModule, sources: Sources) -> dict[Key, Tensor]:
    folder = confined(module.folder.parent, module.folder.name)
    if (folder / SINGLE).is_file():
        return read_weights(folder, [SINGLE], None, sources)
    path = folder / _TORCH
    if not path.is_file():
        if module.kind in WITH_WEIGHTS:
            what = f"the module's weights are missing, and {MODULES} lists it as {module.kind}"
            raise IncompleteError(what, path=folder, expected=SINGLE)
        return {}
    root = sources.root(confined(folder, _TORCH))
    if not is_state_dict(root):
        raise CorruptError("the module's file has no state dict", path=path, found=type(root).__name__)
    stored = {fqn: value.extent for fqn, value in root.items() if isinstance(value, StoredTensor)}
    return {(fqn, WEIGHT): Tensor(fqn, WEIGHT, one.dtype, one.shape, Whole(one)) for fqn, one in stored.items()}


def by_module(chosen: Mapping[str, _T], modules: Mapping[str, InnerModule]) -> list[tuple[str, dict[str, _T]]]:
    """Return tensors by folder, under the names in its file. The model's folder is ""."""
    rest, found = dict(chosen), []
    for prefix, module in modules.items():
        own = {name.removeprefix(prefix): rest.pop(name) for name in chosen if name.startswith(prefix) and name in rest}
        found += [(module.folder.name, own)] if own else []
    return [("", rest), *found]


def module_tensors(kind: str, config: Mapping[str, Any]) -> dict[str, Shape] | None:
    """Return the names and shapes of a module's tensors by its config, or None if they are unknown."""
    given = [config.get(name) for name in _SIZES.get(kind, ())]
    sizes = [size for size in given if isinstance(size, int)]
    if not given or len(sizes) < len(given):
        return None
    if kind == "LayerNorm":
        return {"norm.weight": (*sizes,), "norm.bias": (*sizes,)}
    (inner, outer) = sizes
    found: dict[str, Shape] = {"linear.weight": (outer, inner)}
    if config.get("bias", True):
        found["linear.bias"] = (outer,)
    if config.get("use_residual") and inner != outer:
        found["residual.weight"] = (outer, inner)
    return found


def module_difference(kind: str, config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> str:
    expected = module_tensors(kind, config)
    if expected is None:
        return ""
    if missing := sorted(expected.keys() - shapes):
        return f"{kind} lacks {', '.join(missing)}"
    if extra := sorted(shapes.keys() - expected):
        return f"{kind} has no tensor {', '.join(extra)}"
    wrong = [name for name in sorted(expected) if expected[name] != shapes[name]]
    return "; ".join(f"{name} is {list(shapes[name])} instead of {list(expected[name])}" for name in wrong)


def module_faults(folders: Iterable[str | Path], shapes: Mapping[str, Shape]) -> Iterator[tuple[str, str]]:
    """Yield the file and the fault of each module without its config, or with other tensors than its config's.

    `shapes` has the modules' tensors with prefix.
    """
    model = _model_in(folders)
    names = names_in(model.folder) if model and (model.folder / MODULES).is_file() else _CONFIGS
    if model and model.kind == "Transformer" and not {*_CONFIGS} & {*names}:
        yield _CONFIGS[0], f"missing, {MODULES} lists its module"
    for prefix, module in modules_in(folders).items():
        names = names_in(module.folder) if module.folder.is_dir() else []
        own = {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
        place = module.folder.name
        if "config.json" in names:
            config = read_json(confined(module.folder, "config.json"))
            if isinstance(config, dict) and (what := module_difference(module.kind, config, own)):
                yield f"{place}/{SINGLE}", f"{what} (by its config.json)"
        elif module.kind not in WITHOUT_FILES and not any(name.endswith("config.json") for name in names):
            yield f"{place}/config.json", f"missing, {MODULES} lists its module"


def registered(names: Collection[str], modules: Mapping[str, InnerModule]) -> list[str] | None:
    """Return the modules' parameters in registration order.

    A torch layer registers its weight before its bias. None if a module has several layers.
    """
    order: list[str] = []
    for prefix in modules:
        own = sorted((name for name in names if name.startswith(prefix)), key=lambda name: name.endswith(".bias"))
        layers = {name.rpartition(".")[0] for name in own}
        if len(own) > 1 and (len(layers) > 1 or {name.rpartition(".")[2] for name in own} != {"weight", "bias"}):
            return None
        order += own
    return order


def trainer_note(folders: Iterable[str | Path], names: Iterable[str]) -> str | None:
    """Return a note if `names` lack the prefix that sentence-transformers' trainer gives to the model's tensors."""
    if not any((Path(folder) / MODULES).is_file() for folder in folders) or any(
        name.startswith("0.") for name in names
    ):
        return None
    return "SentenceTransformerTrainer can't load this step, it puts '0.' before the names; transformers' Trainer can"


def settings(folder: Path) -> Iterator[str]:
    if (folder / MODULES).is_file():
        yield from (name for name in names_in(folder) if name in (MODULES, _SETTINGS) or name.startswith("sentence_"))
        for module in modules_in([folder]).values():
            if module.folder.is_dir():
                place = confined(folder, module.folder.name)
                names = (name for name in names_in(place) if (place / name).is_file())
                yield from (f"{place.name}/{name}" for name in names if not name.endswith(TENSOR_SUFFIXES))
