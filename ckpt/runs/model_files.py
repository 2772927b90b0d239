"""Files next to a model's weights, copied except for `config.json`'s dtype, and notes on the rest of a run."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from ckpt.base.errors import CkptError, CorruptError
from ckpt.base.text import Brief, pluralize, show_size
from ckpt.containers.safetensors import read_header
from ckpt.move.files import confined, translate_os_errors
from ckpt.move.json_files import read_json, read_object
from ckpt.move.listing import files_in, folders_in, has_name, names_in
from ckpt.plan.checkpoint import BUFFER, MASTER, WEIGHT, Checkpoint
from ckpt.plan.dtypes import DType
from ckpt.plan.namespace import config_parts
from ckpt.runs.file_checks import carried_content
from ckpt.runs.file_table import TRAINING_STATE, FileKind, is_of
from ckpt.runs.sentence_modules import settings
from ckpt.runs.steps import ACCELERATE_RNG, is_step

CONFIG = "config.json"
QUANTIZATION_ENTRY = "quantization_config"
#: Config keys for a model's quantization; the second one is compressed-tensors' first name.
QUANTIZATION_ENTRIES = (QUANTIZATION_ENTRY, "compression_config")
_COPIED = (FileKind.TOKENIZER, FileKind.PROCESSOR, FileKind.GENERATION, FileKind.QUANTIZATION)

#: Folder with named chat templates (transformers 5).
TEMPLATES = "additional_chat_templates"

_MAX_FILE = 1 << 30
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_RELATIVE_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+\.([\w.]+)[ \t]+import|import[ \t]+\.([\w.]+))", re.MULTILINE)
_FROM_HERE = re.compile(r"^[ \t]*from[ \t]+\.[ \t]+import[ \t]+\(?([\w ,\t]+)", re.MULTILINE)


def read_config(folders: Iterable[Path]) -> dict[str, Any] | None:
    """Return the model's `config.json` from the nearest folder (or file)."""
    path = find_config(folders)
    return None if path is None else read_object(path, "the model's config")


def find_config(folders: Iterable[Path]) -> Path | None:
    for folder in folders:
        if folder.is_file() and folder.suffix == ".json":
            return folder
        if os.path.lexists(folder / CONFIG):  # it may be no file
            return confined(folder, CONFIG)
    return None


def hooks_folders(step: Path) -> list[Path]:
    """Return folders with a model of diffusers in a step, written by a training script's save hook."""
    inside = folders_in(step) if may_have_hooks(step) else []
    return [one for one in inside if is_of_diffusers(one)]


def may_have_hooks(folder: Path) -> bool:
    """Return True for a step. Accelerate's `save_state` and `ckpt convert` let the user choose its name."""
    return is_step(folder) or has_name(folder, ACCELERATE_RNG)


def missing_hooks_folders(step: Path, others: Iterable[Path]) -> list[str]:
    """Return the names of a save hook's models that all `others` have, steps of the same run."""
    found = [{one.name for one in hooks_folders(other)} for other in others]
    return sorted(set.intersection(*found) - {one.name for one in hooks_folders(step)}) if found else []


def is_of_diffusers(folder: Path) -> bool:
    try:
        config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else None
    except CkptError:  # reported with its file
        return False
    return isinstance(config, dict) and "_class_name" in config


def hooks_folder(step: Path, names: Iterable[str]) -> Path | None:
    """Return the only folder of a hook's model with these names. A moving average's config has more entries."""
    wanted = set(names)
    found = [one for one in hooks_folders(step) if not one.name.endswith("_ema") and _names_in(one) == wanted]
    return found[0] if len(found) == 1 else None


def _names_in(folder: Path) -> set[str]:
    """Return the names in a folder's safetensors files. ZeRO-3 leaves tensors without elements there."""
    files = [name for name in names_in(folder) if name.endswith(".safetensors")]
    try:
        return {entry.name for name in files for entry in read_header(confined(folder, name)).entries}
    except CkptError:
        return set()


def run_files(folders: Iterable[str], read: Container[str] = ()) -> list[str]:
    found = [Path(folder) / name for folder in folders if Path(folder).is_dir() for name in names_in(Path(folder))]
    names = {path.name for path in found if str(path) not in read}
    return sorted(name for name in names if is_of(name, *TRAINING_STATE))


def companions(folders: Iterable[Path]) -> dict[str, bytes]:
    return {name: _content(folder, name) for name, folder in sorted(companion_folders(folders).items())}


def companion_folders(folders: Iterable[Path]) -> dict[str, Path]:
    """Return each file's folder. The nearest one wins."""
    found: dict[str, Path] = {}
    for given in folders:
        folder = given.parent if given.is_file() else given
        if not folder.is_dir():
            continue
        for name in (*_plain_files(folder), *_templates(folder), *_custom_code(folder), *settings(folder)):
            found.setdefault(name, folder)
    return found


def _content(folder: Path, name: str) -> bytes:
    path = confined(folder, name)
    with translate_os_errors(path):
        if path.stat().st_size > _MAX_FILE:
            raise CorruptError("the file is too large to copy", path=path, expected=f"at most {show_size(_MAX_FILE)}")
        return carried_content(path, folder)


def _plain_files(folder: Path) -> Iterator[str]:
    yield from (name for name in files_in(folder) if is_of(name, *_COPIED))


def _templates(folder: Path) -> Iterator[str]:
    inner = folder / TEMPLATES
    if inner.is_dir():
        confined(folder, TEMPLATES)
        yield from (f"{TEMPLATES}/{name}" for name in names_in(inner) if Path(name).suffix == ".jinja")


def _custom_code(folder: Path) -> Iterator[str]:
    """Yield the Python files in the configs' `auto_map`, and their relative imports."""
    waiting = []
    for name in (CONFIG, "tokenizer_config.json", "processor_config.json", "preprocessor_config.json"):
        if (folder / name).is_file() and isinstance(config := read_json(confined(folder, name)), dict):
            waiting += _auto_map_modules(config.get("auto_map"))
    done: set[str] = set()
    while waiting:
        module = waiting.pop()
        name = module.replace(".", "/") + ".py"
        if name in done or not (folder / name).is_file():
            continue
        done.add(name)
        text = _content(folder, name).decode("utf-8", "replace")
        package = module.rpartition(".")[0]
        waiting += [f"{package}.{m}" if package else m for m in _relative_imports(text)]
    yield from sorted(done)


def _auto_map_modules(auto_map: object) -> list[str]:
    """Return the names of modules in this folder.

    An `auto_map` looks like `{"AutoModel": "modeling_x.XModel", "AutoTokenizer": ["slow_x.T", null]}`. The value
    `other/repo--modeling_x.XModel` names code in another repository.
    """
    values: Iterable[object]
    if isinstance(auto_map, Mapping):
        values = auto_map.values()
    elif isinstance(auto_map, list):
        values = auto_map
    else:
        return []
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    modules = [item.rpartition(".")[0] for item in flat if isinstance(item, str) and "--" not in item]
    return [module for module in modules if _MODULE.fullmatch(module)]


def _relative_imports(text: str) -> list[str]:
    found = [a or b for a, b in _RELATIVE_IMPORT.findall(text)]
    found += [name.split(" as ")[0].strip() for names in _FROM_HERE.findall(text) for name in names.split(",")]
    return [module for module in found if _MODULE.fullmatch(module)]


def corrected_config(
    config: Mapping[str, Any], written: Mapping[DType, int], *, plain: bool
) -> tuple[dict[str, Any], list[str]]:
    """Return `config` with entries corrected for the written weights, and notes on the changes.

    `written` counts the floating parameters' elements by dtype. `plain` is True if nothing quantized is written.
    """
    notes: list[str] = []
    result = dict(config)
    if written:
        main = max(written, key=lambda dtype: (written[dtype], dtype.name)).name
        key = "torch_dtype" if "torch_dtype" in result and "dtype" not in result else "dtype"
        if str(result.get(key)).removeprefix("torch.") != main:
            result[key] = main
        if key == "dtype" and "torch_dtype" in result:
            result["torch_dtype"] = main
        names = {dtype.name for dtype in written}
        result |= {k: _true_dtypes(v, main, names) for k, v in result.items() if _has_dtypes(v, k)}
    architectures = result.get("architectures")
    if isinstance(architectures, list):
        # FSDP1 wraps the class under its own name, and older Trainers save that name
        result["architectures"] = [
            re.sub(r"^FSDP(?=[A-Z])", "", name) if isinstance(name, str) else name for name in architectures
        ]
    is_quantized = records_quantization(result)
    if plain:
        result = with_quantization(result, {})
    if plain and is_quantized:
        notes.append("config.json: left out quantization_config: every written weight is plain floating point")
    return result, notes


def with_quantization(config: Mapping[str, Any], of: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` with the quantization recorded in `of`, also in their text models."""
    recorded = {key: of[key] for key in QUANTIZATION_ENTRIES if of.get(key)}
    gone = {key for key in QUANTIZATION_ENTRIES if config.get(key) is not None} - recorded.keys()
    found = {key: value for key, value in config.items() if key not in gone} | recorded
    text, of_text = config.get("text_config"), of.get("text_config")
    if isinstance(text, Mapping):
        found["text_config"] = with_quantization(text, of_text if isinstance(of_text, Mapping) else {})
    return found


def records_quantization(config: Mapping[str, Any]) -> bool:
    return any(part.get(key) for part in config_parts(config) for key in QUANTIZATION_ENTRIES)


def _true_dtypes(config: Mapping[str, Any], main: str, names: set[str]) -> dict[str, Any]:
    """Return a sub-config with the main dtype in place of unused ones."""
    result: dict[str, Any] = {}
    for key, value in config.items():
        if _has_dtypes(value, key):
            result[key] = _true_dtypes(value, main, names)
        elif key in ("dtype", "torch_dtype") and isinstance(value, str):
            result[key] = value if value.removeprefix("torch.") in names else main
        else:
            result[key] = value
    return result


def _has_dtypes(value: object, key: str) -> TypeGuard[Mapping[str, Any]]:
    """Return True for a sub-config. Dtypes in a quantization's record are other tensors'."""
    return isinstance(value, Mapping) and key not in QUANTIZATION_ENTRIES


def dump_config(config: Mapping[str, Any]) -> bytes:
    """Return bytes like transformers, but with the keys in their given order."""
    return (json.dumps(config, indent=2) + "\n").encode()


def training_left_out(checkpoint: Checkpoint) -> list[str]:
    lines: list[str] = []
    if names := checkpoint.optimizer_states:
        tensors = list(checkpoint.with_role(*set(names) - {WEIGHT, MASTER, BUFFER}))
        size = show_size(sum(t.nbytes for t in tensors))
        much = f"({pluralize(len(tensors), 'tensor')}, {size})"
        lines.append(Brief(f"optimizer states {', '.join(names)} {much}", f"optimizer states {much}"))
    if groups := checkpoint.state.param_groups:
        lines.append(f"hyperparameters of {pluralize(len(groups), 'param group')}")
    step = [] if checkpoint.state.step is None else [f"step {checkpoint.state.step}"]
    if state := step + sorted(checkpoint.state.entries()):
        lines.append(
            Brief(f"training state {', '.join(state)}", " ".join(["training state", *("of " + one for one in step)]))
        )
    return lines


def run_files_left_out(checkpoint: Checkpoint, carried: Collection[str] = ()) -> list[str]:
    read = {file.path for file in checkpoint.files} if checkpoint.optimizer_states else set()
    names = [name for name in run_files(checkpoint.run_folders, read) if name not in carried]
    short = pluralize(len(names), "file") + " of the run"
    return [Brief(f"files of the run {', '.join(names)}", short)] if names else []
