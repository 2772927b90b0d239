"""Proof whether transformers, diffusers or sentence-transformers can load a written folder.

Facts: transformers 5.23 (`modeling_utils.py`, `from_pretrained`), diffusers 0.42 (`utils/constants.py`),
sentence-transformers 5 (`SentenceTransformer.py`, `_load_sbert_model`).
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ckpt.base.words import Message
from ckpt.plan.load_check import LoadCheck
from ckpt.plan.tensors import Shape
from ckpt.runs.sentence_modules import MODULES, WITH_WEIGHTS, WITHOUT_FILES, module_difference, module_tensors
from converters.names.hub.config_values import unknown_values
from converters.names.hub.diffusers_models import class_name
from converters.names.hub.proof import OWN_NAMES, PEFT, names_architecture, tables_differ
from converters.names.hub.save_pretrained import is_available, refusal

WEIGHTS = "model.safetensors"
#: Turn text, images or sound into model inputs.
_INPUTS = ("tokenizer*", "*.tiktoken", "vocab.*", "spiece.model", "sentencepiece*", "*processor_config.json")
_OLMO_CORE = "olmo_core."


def unproved(config: Mapping[str, Any], shapes: Mapping[str, Shape], why: str = OWN_NAMES) -> LoadCheck:
    """Return the answer for unproved names. `why` is the reason if the config names a class."""
    if isinstance(config.get("type"), str) and "input_features" in config:
        why = f"the names were not compared with LeRobot's class for {config['type']!r}"
        return LoadCheck(None, "PreTrainedPolicy.from_pretrained", why)
    if _OLMO_CORE in str((config.get("model") or {}).get("_CLASS_", "")):
        hint = Message(
            "{config=DIR} takes a config.json of olmo2 or olmo3; olmo_core.nn.hf.save_hf_model writes model and config"
        )
        return LoadCheck(False, why="the names and the config are OLMo-core's", hint=hint)
    if not names_architecture(config):
        why = "config.json has no model_type and no architectures"
        return LoadCheck(False, why=why, hint=Message("{config=ORG/NAME} takes the trained model's config"))
    if any(name.startswith(PEFT) for name in shapes):
        return LoadCheck(False, why="the names belong to a model with PEFT adapters")
    if differ := tables_differ(config, shapes):
        return LoadCheck(False, why=differ[0])
    if cls := class_name(config):
        return LoadCheck(None, f"{cls}.from_pretrained", why)
    if not config.get("architectures"):
        return LoadCheck(None, why="config.json names no class (architectures)")
    return LoadCheck(None, why=why)


def proved(cls: str) -> LoadCheck:
    return LoadCheck(True, f"{cls}.from_pretrained")


def accepted(loads: LoadCheck, config: Mapping[str, Any]) -> LoadCheck:
    """Check config.json's values, because transformers may refuse them."""
    if not loads.can or not (unknown := list(unknown_values(config))):
        return loads
    if not is_available():
        why = f"config.json has {unknown[0]}: {config.get(unknown[0])!r}, and transformers is not installed to try it"
        return LoadCheck(None, loads.call, why)
    cls = loads.call.partition(".")[0]
    refused = refusal(config, cls)
    if refused is None:
        return LoadCheck(
            None, loads.call, f"config.json has {unknown[0]}: {config.get(unknown[0])!r}, and transformers has no {cls}"
        )
    if refused:
        return LoadCheck(False, loads.call, f"transformers does not accept config.json: {refused}")
    return loads


def with_files(
    loads: LoadCheck, files: Mapping[str, bytes | None], parts: Mapping[str, Mapping[str, Shape]] | None = None
) -> LoadCheck:
    """Check the folder's other files; small ones come with their content.

    `parts` has the shapes of the weights in inner folders.
    """
    if loads.can and MODULES in files:
        return _module_answer(loads, files, parts or {})
    if loads.can and not any(fnmatch.fnmatchcase(name, one) for name in files for one in _INPUTS):
        return loads.without("tokenizer or processor")
    return loads


def _module_answer(
    loads: LoadCheck, files: Mapping[str, bytes | None], parts: Mapping[str, Mapping[str, Shape]]
) -> LoadCheck:
    """Check each module's own folder."""
    call = "SentenceTransformer"
    try:
        modules = [(str(one["path"]), str(one["type"])) for one in json.loads(files[MODULES] or b"")]
    except (ValueError, TypeError, KeyError):
        return LoadCheck(False, call, f"{MODULES} is damaged")
    if not modules:
        return LoadCheck(False, call, f"{MODULES} names no modules")
    lacking = [one for place, cls in modules if place for one in _missing_files(place, cls, files, parts)]
    if lacking:
        return LoadCheck(False, call, f"{MODULES} lists missing files: {', '.join(lacking)}")
    if own := next((cls for _, cls in modules if not cls.startswith("sentence_transformers.")), None):
        return LoadCheck(None, call, f"{MODULES} names the class {own}, and ckpt did not inspect it")
    for place, cls in modules:
        if place in parts:
            kind = cls.rpartition(".")[2]
            config = _config_in(files, f"{place}/config.json")
            if what := module_difference(kind, config, parts[place]):
                return LoadCheck(False, call, f"{place}: {what}, by its config.json")
            if module_tensors(kind, config) is None:
                return LoadCheck(None, call, f"the weights in {place} were not compared with the class {kind}")
    return LoadCheck(True, call, lacks=loads.lacks)


def _config_in(files: Mapping[str, bytes | None], name: str) -> dict[str, Any]:
    try:
        found = json.loads(files.get(name) or b"")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _missing_files(place: str, cls: str, files: Collection[str], folders: Collection[str]) -> Iterator[str]:
    kind = cls.rpartition(".")[2]
    if kind in WITHOUT_FILES:
        return
    if not any(fnmatch.fnmatchcase(name, f"{place}/*config.json") for name in files):
        yield f"{place}/config.json"
    if kind in WITH_WEIGHTS and place not in folders:
        yield f"{place}/{WEIGHTS}"
