"""Output of the installed transformers' `save_pretrained`: its own code, run on a model without data.

Written against transformers 5.23 (`modeling_utils.py`, `save_pretrained`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib.util import find_spec
from typing import Any

from ckpt.plan.tensors import Shape
from converters.names.families.config import architectures
from converters.names.families.rows import DERIVED, Saved
from converters.names.transformers.transformers_source import converted_identifiers


def is_available() -> bool:
    return find_spec("torch") is not None and converted_identifiers() is not None


def names_in_memory(config: Mapping[str, Any]) -> Collection[str]:
    """Return the in-memory names. Empty without transformers or a class.

    Raise CorruptError if transformers does not accept the config.
    """
    model = _empty_model(config)
    return () if model is None else model.state_dict().keys()


def saved(config: Mapping[str, Any]) -> Saved | None:
    """Return the tensors saved by the config's class. None without transformers or this class.

    Raise CorruptError if transformers does not accept the config.
    """
    model = _empty_model(config)
    if model is None:
        return None
    from transformers.core_model_loading import revert_weight_conversion

    from converters.names.transformers.save_conversions import stored_names
    from converters.names.transformers.tracing import Traced

    named = stored_names(model)

    def files(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        traced = {name: Traced.source(name, shape) for name, shape in shapes.items()}
        return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(named, traced).items()}

    in_required, in_optional = in_memory(model)
    required, every = files(in_required), files({**in_required, **in_optional})
    optional = {name: shape for name, shape in every.items() if name not in required}
    ignored = [f".*({pattern}).*" for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    return Saved(type(model).__name__, required, optional, (*DERIVED, *ignored), model.base_model_prefix)


def refusal(config: Mapping[str, Any], cls: str) -> str | None:
    """Return why transformers can't build its class `cls`: "" if it can, None without the class."""
    import torch
    import transformers

    from converters.names.transformers.relation import check_counts, floats

    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    model = getattr(transformers, cls, None)
    if model is None:
        return None
    try:
        check_counts(plain)
        with torch.device("meta"):
            model._from_config(model.config_class.from_dict(floats(plain)))
    except Exception as error:
        return " ".join(str(error).split()) or type(error).__name__
    return ""


def knows_class(cls: str) -> bool:
    if not is_available():
        return False
    import transformers

    return hasattr(getattr(transformers, cls, None), "config_class")


def in_memory(model: Any) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Return the shapes of tensors saved by `save_pretrained`, and of all others.

    It leaves out all but one of a tied tensor's names, and computed tensors (Marian's positions).
    """
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    state = model.state_dict()
    unsaved = set(model._keys_to_ignore_on_save or ())
    required = remove_tied_weights_from_state_dict({n: t for n, t in state.items() if n not in unsaved}, model)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    return {n: shapes[n] for n in required}, {n: shape for n, shape in shapes.items() if n not in required}


def _empty_model(config: Mapping[str, Any]) -> Any:
    if not is_available():
        return None
    from converters.names.transformers.relation import build_model

    named = architectures(config)
    if named and not belongs(named[0], config.get("model_type")):
        return None
    model = build_model(config, {})
    return None if model is None or (named and type(model).__name__ != named[0]) else model


def belongs(name: str, model_type: Any) -> bool:
    """Return True if the class takes configs with this `model_type`: its own, or of a model that shares its code."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    own = getattr(getattr(transformers, name, None), "config_class", None)
    maps = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    return getattr(own, "model_type", None) == model_type or any(of.get(model_type) == name for of in maps)
