"""Tensor names in PEFT's LoRA adapters, in files and during training.

Facts from peft 0.21.2 (`tuners/lora/layer.py`, `utils/save_and_load.py`, `utils/other.py`). In memory, each tensor name
contains the adapter's name. In files it does not:

    base_model.model.X.lora_A.default.weight             base_model.model.X.lora_A.weight
    base_model.model.X.lora_embedding_A.default          base_model.model.X.lora_embedding_A
    base_model.model.X.lora_magnitude_vector.default.weight     ...lora_magnitude_vector
    base_model.model.X.modules_to_save.default.weight    base_model.model.X.weight
    base_model.model.X.token_adapter.trainable_tokens_delta.default     ...trainable_tokens_delta
    base_model.model.X.base_layer.weight                 base_model.model.X.base_layer.weight (embeddings only)
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckpt.base.errors import CorruptError, LossError, UsageError
from ckpt.plan.checkpoint import MODEL_ROLES, OWN, Checkpoint
from ckpt.plan.dtypes import DType
from ckpt.plan.precision import Choice, choices
from ckpt.plan.tensors import Shape

ADAPTER_CONFIG = "adapter_config.json"
PREFIX = "base_model.model."

A, B, BIAS, EMBEDDING_A, EMBEDDING_B = "lora_A", "lora_B", "lora_B.bias", "lora_embedding_A", "lora_embedding_B"
MAGNITUDE, TOKENS, SAVED, BASE = "lora_magnitude_vector", "trainable_tokens_delta", "modules_to_save", "base"
SAMPLER, DIAGONAL, PROJECTION = "lora_monteclora_sampler", "lora_diag", "lora_velora_embed"
#: Factors in the same layer that this kind needs.
_REACHED = {MAGNITUDE: (A, EMBEDDING_A), BIAS: (B,), DIAGONAL: (A,), SAMPLER: (A,), PROJECTION: (A,)}

_NAME = r"(?:\.(?P<name>[^.]+))?"
_KINDS = (
    re.compile(rf"(?P<module>.+)\.(?P<kind>lora_[AB]){_NAME}\.(?P<rest>weight|bias)"),
    re.compile(rf"(?P<module>.+)\.(?P<kind>lora_embedding_[AB]){_NAME}"),
    re.compile(r"(?P<module>.+)\.(?P<kind>lora_magnitude_vector)(?:\.(?P<name>(?!weight$)[^.]+))?(?:\.weight)?"),
    re.compile(rf"(?P<module>.+)\.(?P<kind>lora_(?:diag|velora_embed)){_NAME}"),
    re.compile(r"(?P<module>.+)\.(?P<kind>lora_monteclora_sampler)(?:\.(?P<name>[^.]+(?=\.)))?\.(?P<rest>[^.]+)"),
    re.compile(rf"(?P<module>.+)\.token_adapter\.(?P<kind>trainable_tokens_delta){_NAME}"),
    re.compile(r"(?P<module>.+)\.(?P<kind>modules_to_save)\.(?P<name>[^.]+)\.(?P<rest>.+)"),
)
#: Names inside a wrapper for the wrapped module, or for its trained copy (LN tuning).
_WRAPPED = re.compile(r"\.(?:base_layer|original_module|token_adapter\.base_layer|ln_tuning_layers)(?=\.)")
_UNKNOWN = re.compile(r"\.(lora_(?!A\b|B\b|embedding_|magnitude_vector|diag\b|velora_|monteclora_)\w+|token_adapter)\b")

#: The writer, and a way to PEFT's format.
_OTHERS = (
    (
        re.compile(r".+\.lora_[ab]\.weight"),
        "torchtune or torchtitan",
        "torchtune also saves it like PEFT (adapter_model.safetensors and adapter_config.json): give that folder",
    ),
    (
        re.compile(r"lora_(unet|te\d?|prior)_.+"),
        "kohya's scripts",
        "merge it with diffusers: load_lora_weights, fuse_lora, then save_pretrained(...)",
    ),
    (
        re.compile(r"(unet|transformer\.(single_)?transformer_blocks|text_encoder(_\d)?)\..+lora.+"),
        "diffusers",
        "merge it with diffusers: load_lora_weights, fuse_lora, then save_pretrained(...)",
    ),
)
#: Other writers' factors. The rank is dim 0 of the first one, and dim 1 of the second.
_FACTOR = re.compile(r"(?P<module>.+)[._]lora[._](?P<kind>down|up|[ABab])(?:\.\w+)?\.weight")
_FIRST = ("down", "A", "a")
#: Base weights that PEFT also saves (`EMBEDDING_LAYER_NAMES`).
_EMBEDDINGS = ("embed_tokens", "lm_head")


@dataclass(frozen=True, slots=True)
class AdapterName:
    """A `kind` of tensor in `module`.

    `rest` is the parameter's name inside a saved module. `adapter` is the adapter's name in training checkpoints.
    """

    kind: str
    module: str
    rest: str = ""
    adapter: str | None = None

    @property
    def in_file(self) -> str:
        ends = {A: f"{A}.weight", B: f"{B}.weight", TOKENS: f"token_adapter.{TOKENS}"}
        ends |= {SAVED: self.rest, SAMPLER: f"{SAMPLER}.{self.rest}"}
        return f"{PREFIX}{self.module}.{ends.get(self.kind, self.kind)}"


def parse_name(fqn: str) -> AdapterName:
    """Parse a tensor name. A base model's own parameter has the kind `base`, with its name in `module`."""
    name = fqn.removeprefix(PREFIX)
    for pattern in _KINDS:
        match = pattern.fullmatch(name)
        if match is not None:
            found = match.groupdict()
            kind = BIAS if found["kind"] == B and found.get("rest") == "bias" else found["kind"]
            rest = found.get("rest", "") if kind in (SAVED, SAMPLER) else ""
            return AdapterName(kind, found["module"], rest, found.get("name"))
    return AdapterName(BASE, _WRAPPED.sub("", name))


def is_adapter(fqns: Iterable[str]) -> bool:
    return any(parse_name(fqn).kind in (A, EMBEDDING_A) for fqn in fqns)


def is_others(fqns: Collection[str]) -> bool:
    """Return True if all names are other writers'."""
    return bool(fqns) and all(any(pattern.fullmatch(fqn) for pattern, _, _ in _OTHERS) for fqn in fqns)


def factor_faults(shapes: Mapping[str, Shape]) -> Iterator[tuple[str, str]]:
    """Yield the module and the fault of each pair of factors in another writer's adapter that does not fit."""
    if not any(pattern.fullmatch(fqn) for pattern, _, _ in _OTHERS for fqn in shapes):
        return
    pairs: dict[str, dict[bool, tuple[str, Shape]]] = {}
    for fqn, shape in shapes.items():
        if (found := _FACTOR.fullmatch(fqn)) is not None:
            pairs.setdefault(found["module"], {})[found["kind"] in _FIRST] = fqn, shape
    for module, pair in pairs.items():
        if len(pair) == 1:
            yield module, f"the other LoRA factor is missing or has another name: only {next(iter(pair.values()))[0]}"
            continue
        (_, first), (_, second) = pair[True], pair[False]
        if len(first) == len(second) != 3 and first[0] != second[1]:  # with three dims, dim 0 may be the experts
            yield module, f"LoRA factors of different ranks: {list(first)} and {list(second)}"


def check_is_no_others(checkpoint: Checkpoint) -> None:
    """Raise UsageError for an adapter with another writer's names."""
    for pattern, writer, way in _OTHERS:
        fqn = next((fqn for fqn, _ in checkpoint.tensors if pattern.fullmatch(fqn)), None)
        if fqn is not None:
            raise UsageError(
                f"ckpt can't read an adapter with names from {writer}", path=checkpoint.path, fqn=fqn, hint=way
            )


def check_is_there(checkpoint: Checkpoint) -> None:
    """Raise UsageError without a LoRA adapter."""
    check_is_no_others(checkpoint)
    if not is_adapter(fqn for fqn, role in checkpoint.tensors if role in MODEL_ROLES):
        hint = "the format `hf` is for a whole model"
        raise UsageError("this checkpoint has no LoRA adapter", path=checkpoint.path, hint=hint)


def under_saved_names(checkpoint: Checkpoint, saved: Container[str]) -> Checkpoint:
    """Return a run's `checkpoint` under PEFT's file names: the adapter, and other tensors trained or in `saved`.

    A checkpoint with several adapters is unchanged: their names would collide.
    """
    parsed = {fqn: parse_name(fqn) for fqn, _ in checkpoint.tensors}
    if len({name.adapter for name in parsed.values() if name.adapter is not None}) > 1:
        return checkpoint
    trained = {fqn for group in checkpoint.state.param_groups for fqn in group.fqns}
    names: dict[str, str] = {}
    for fqn, name in parsed.items():
        in_file = name.in_file if name.kind != BASE else PREFIX + fqn.removeprefix(PREFIX)
        if name.kind != BASE or in_file in saved or fqn in trained:
            names[fqn] = in_file
    scalars = {
        state: {names[fqn]: value for fqn, value in of.items() if fqn in names}
        for state, of in checkpoint.state.scalars.items()
    }
    return replace(
        checkpoint,
        tensors={
            (names[fqn], role): tensor.renamed(names[fqn])
            for (fqn, role), tensor in checkpoint.tensors.items()
            if fqn in names
        },
        ties={},
        state=replace(checkpoint.state, scalars=scalars, param_groups=()),
        namespace=OWN,
    )


#: Modules in Tinker's adapters with all experts in one factor.
_OF_EXPERTS = re.compile(r"\.experts\.w\d$")


def ranks(checkpoint: Checkpoint, kind: object) -> dict[str, int]:
    """Return each layer's rank from its factors. In [experts, rank, in], it is the second dim."""
    found = {}
    for fqn, shape in checkpoint.shapes.items():
        name = parse_name(fqn)
        if name.kind in (A, EMBEDDING_A):
            found[name.module] = shape[-2 if _OF_EXPERTS.search(name.module) and len(shape) == 3 else 0]
        elif kind in ("LOHA", "LOKR") and fqn.startswith(PREFIX) and len(shape) > 1:
            module, _, factor = fqn.removeprefix(PREFIX).rpartition(".")
            if factor in ("hada_w1_b", "lokr_w1_b", "lokr_w2_b"):
                found[module] = shape[0]
    return found


def check_factors(
    module: str,
    parts: Collection[str],
    entries: Mapping[str, tuple[str, bool]],
    path: str,
    *,
    has_other_layers: bool = False,
) -> None:
    """Raise CorruptError if a layer lacks a tensor, or contradicts the config.

    `parts` are the kinds in the layer. `entries` maps each optional kind to its config entry, and True if the entry is
    on. With `has_other_layers`, the entry may not apply to this layer.
    """
    for one, other in ((A, B), (EMBEDDING_A, EMBEDDING_B), (BIAS, B)):
        missing = other if one in parts else one
        if (one in parts) != (other in parts) and missing != BIAS:
            raise CorruptError("the adapter lacks a LoRA factor for a layer", path=path, fqn=f"{module}.{missing}")
    for kind, (entry, is_on) in entries.items():
        has_kind = any(part.startswith(kind) for part in parts)
        wants_kind = is_on and not has_other_layers and any(part in parts for part in _REACHED.get(kind, ()))
        if (has_kind and not is_on) or (wants_kind and not has_kind):
            raise CorruptError(
                f"the adapter's config and weights disagree about {entry}",
                path=path,
                fqn=module,
                expected=f"a {kind} tensor, because {entry} is on"
                if is_on
                else f"no {kind} tensor, because {entry} is off",
                found=f"a {kind} tensor" if has_kind else "none",
            )


def is_foreign(fqn: str) -> bool:
    """Return True if `fqn` belongs to an unknown PEFT method."""
    name = parse_name(fqn)
    return name.kind == BASE and bool(_UNKNOWN.search(name.module))


def tensors(checkpoint: Checkpoint, config: Mapping[str, Any], dtype: DType | None = None) -> dict[str, Choice]:
    """Return the tensors that PEFT would save, by name.

    From an adapter's own file, all tensors keep their names. Raise LossError if a trained tensor would not be saved.
    """
    check_is_there(checkpoint)
    parsed = {fqn: parse_name(fqn) for fqn, role in checkpoint.tensors if role in MODEL_ROLES}
    for fqn in parsed:
        if is_foreign(fqn):
            raise LossError("this tensor does not belong to LoRA", path=checkpoint.path, fqn=fqn)
    names = sorted({name.adapter for name in parsed.values() if name.adapter is not None})
    if len(names) > 1:
        raise UsageError("the checkpoint has several adapters", path=checkpoint.path, found=", ".join(names))
    trained = {fqn for group in checkpoint.state.param_groups for fqn in group.fqns}
    bias = str(config.get("bias", "none"))
    found: dict[str, Choice] = {}
    for fqn, choice in choices(checkpoint, dtype).items():
        name = parsed[fqn]
        if name.kind != BASE:
            if choice.tensor.numel == 0:
                raise CorruptError(
                    "an adapter tensor is empty: ZeRO-3 or FSDP saved it without its partitions",
                    path=checkpoint.path,
                    fqn=fqn,
                    hint="take the adapter from the sharded checkpoint: ckpt convert auto peft CHECKPOINT",
                )
            found[name.in_file] = choice
        elif checkpoint.is_adapter or _is_saved(fqn, parsed, bias):
            found[fqn if fqn.startswith(PREFIX) else PREFIX + fqn] = choice
        elif fqn in trained:
            raise LossError("this parameter was trained, but the adapter does not include it", fqn=fqn)
    return found


def _is_saved(fqn: str, parsed: Mapping[str, AdapterName], bias: str) -> bool:
    if bias == "all" and fqn.endswith(".bias") and ".original_module." not in fqn:
        return True
    targeted = re.fullmatch(r"(.+)\.base_layer\.(\w+)", fqn.removeprefix(PREFIX))
    if targeted is None:
        return False
    if bias.endswith("_only") and targeted[2] == "bias":
        return True
    leaf = targeted[1].rpartition(".")[2]
    return leaf in _EMBEDDINGS and any(
        other.module == targeted[1] and other.kind in (A, EMBEDDING_A) for other in parsed.values()
    )
