"""Classes of transformers models with a common base and different heads, such as a classifier's.

An adapter records its model by task or by class (`task_type` and `auto_mapping` in PEFT's config).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.base.errors import CorruptError, UsageError
from ckpt.plan.tensors import Shape
from converters.names.families.config import architectures
from converters.names.hub.save_pretrained import belongs, in_memory, is_available
from converters.names.transformers.relation import build_model

#: A prime, never a real size: it marks the tensors with a label dim.
_LABELS = 7919
#: transformers' auto class tables by PEFT's `task_type`. A causal model has its base's head.
_TABLES = {
    "SEQ_CLS": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "TOKEN_CLS": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "QUESTION_ANS": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "FEATURE_EXTRACTION": "MODEL_MAPPING_NAMES",
}
_LABEL_ENTRIES = ("id2label", "label2id", "num_labels", "_num_labels")


@dataclass(frozen=True)
class ModelClass:
    """Class with `_LABELS` labels: saved tensors, tied tensors, and its inner model's path."""

    name: str
    required: Mapping[str, Shape]
    optional: Mapping[str, Shape]
    prefix: str

    def num_labels(self, head: Mapping[str, Shape]) -> int | None:
        """Return the number of labels in a model with this head, or None if the shapes don't show it."""
        for name, shape in self.required.items():
            if _LABELS in shape and len(head.get(name, ())) == len(shape):
                return head[name][shape.index(_LABELS)]
        return None

    def shapes(self, num_labels: int | None) -> dict[str, Shape]:
        if num_labels is None:
            return dict(self.required)
        return {
            name: tuple(num_labels if size == _LABELS else size for size in shape)
            for name, shape in self.required.items()
        }


def trained_class(config: Mapping[str, Any] | None, task: object, name: object) -> ModelClass | None:
    """Return the class called `name`, or else the task's, if the config names another class.

    None if the config's model has no such class. Raise UsageError if transformers is missing.
    """
    model_type = (config or {}).get("model_type")
    if config is None or not model_type or (name is None and task not in _TABLES):
        return None
    if name is not None and name in architectures(config):
        return None
    if not is_available():
        raise UsageError(
            "the adapter was trained on a transformers class with a different head than the base",
            expected=f"task {task}" if name is None else name,
            found=", ".join(architectures(config)) or "no class in the base's config",
            hint="pip install 'transformers>=5' torch",
        )
    from transformers.models.auto import modeling_auto

    if name is None:
        name = getattr(modeling_auto, _TABLES[str(task)]).get(model_type)
        name = name[0] if isinstance(name, tuple) else name
    if not isinstance(name, str) or name in architectures(config) or not belongs(name, model_type):
        return None
    plain = {key: value for key, value in config.items() if key not in _LABEL_ENTRIES} | {"architectures": [name]}
    try:
        model = build_model({**plain, "num_labels": _LABELS}, {})
    except CorruptError:  # some classes accept only two labels
        model = build_model(plain, {})
    if model is None or type(model).__name__ != name:
        return None
    return ModelClass(name, *in_memory(model), model.base_model_prefix)
