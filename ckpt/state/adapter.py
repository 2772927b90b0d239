"""PEFT's LoRA adapters: their config, and how their tensors are named in files and in training.

Facts from peft 0.21.2 (`tuners/lora/config.py`, `tuners/lora/layer.py`, `utils/save_and_load.py`, `utils/other.py`).
In memory every tensor of an adapter carries the adapter's name, in files it does not:

    base_model.model.X.lora_A.default.weight             base_model.model.X.lora_A.weight
    base_model.model.X.lora_embedding_A.default          base_model.model.X.lora_embedding_A
    base_model.model.X.lora_magnitude_vector.default.weight     ...lora_magnitude_vector
    base_model.model.X.modules_to_save.default.weight    base_model.model.X.weight
    base_model.model.X.token_adapter.trainable_tokens_delta.default     ...trainable_tokens_delta
    base_model.model.X.base_layer.weight                 base_model.model.X.base_layer.weight (embeddings only)
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError, LossError, NotFoundError, UsageError
from ckpt.move.files import confined
from ckpt.plan.checkpoint import MODEL_ROLES, OWN, Checkpoint
from ckpt.plan.dtypes import DType
from ckpt.plan.precision import Choice, choices
from ckpt.run_folder.companions import read_object

CONFIG = "adapter_config.json"
#: No rank and no alpha comes near, and it is a float.
_TOO_LARGE = 1 << 64
PREFIX = "base_model.model."

A, B, BIAS, EMBEDDING_A, EMBEDDING_B = "lora_A", "lora_B", "lora_B.bias", "lora_embedding_A", "lora_embedding_B"
MAGNITUDE, TOKENS, SAVED, BASE = "lora_magnitude_vector", "trainable_tokens_delta", "modules_to_save", "base"
SAMPLER = "lora_monteclora_sampler"

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
#: What a wrapped module calls the module that it wraps.
_WRAPPED = re.compile(r"\.(?:base_layer|original_module|token_adapter\.base_layer)(?=\.)")
#: Names of other methods' tensors, which no LoRA has: DoRA, embeddings and tokens are known above.
_UNKNOWN = re.compile(r"\.(lora_(?!A\b|B\b|embedding_|magnitude_vector|diag\b|velora_|monteclora_)\w+|token_adapter)\b")

#: Options of LoraConfig under which a merge is something else than W + BA.  For each, what it is called.
_VARIANTS = {
    "arrow_config": "Arrow, which routes each token",
    "alora_invocation_tokens": "activated LoRA, which no merged model can express",
    "use_qalora": "QA-LoRA",
    "layer_replication": "layer replication, which PEFT does not merge either",
    "megatron_config": "LoRA over Megatron's parallel layers",
}
#: Modules of which PEFT saves the base weights too, where they are targeted (`EMBEDDING_LAYER_NAMES`).
_EMBEDDINGS = ("embed_tokens", "lm_head")
#: Inits that PEFT runs again when it loads the adapter, and that change the base weights: at random, or by data.
_MUTATING_INITS = ("pissa_niter_", "corda", "loftq", "lora_ga")
#: Options and inits under which PEFT itself merges, layer by layer (`ckpt.lora.layer`): block-diagonal LoRA, VeLoRA,
#: MonteCLoRA, KaSA, and inits that are made of the base weight.
OF_PEFT = ("use_bdlora", "velora_config", "monteclora_config", "kasa_config")
_INITS_OF_PEFT = ("pissa", "olora", "mica")


@dataclass(frozen=True, slots=True)
class AdapterName:
    """What the tensor of an adapter is: `kind` of `module`; `rest` is the parameter's name within a saved module.

    `adapter` is the adapter's name where the tensor's name has it (in training checkpoints).
    """

    kind: str
    module: str
    rest: str = ""
    adapter: str | None = None

    @property
    def in_file(self) -> str:
        """The name that PEFT gives the tensor in `adapter_model.safetensors`."""
        ends = {A: f"{A}.weight", B: f"{B}.weight", TOKENS: f"token_adapter.{TOKENS}"}
        ends |= {SAVED: self.rest, SAMPLER: f"{SAMPLER}.{self.rest}"}
        return f"{PREFIX}{self.module}.{ends.get(self.kind, self.kind)}"


def parse_name(fqn: str) -> AdapterName:
    """What the tensor called `fqn` is.  A base model's own parameter is of kind `base`, its name in `module`."""
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
    """Whether a LoRA adapter is among these tensors."""
    return any(parse_name(fqn).kind in (A, EMBEDDING_A) for fqn in fqns)


def under_saved_names(checkpoint: Checkpoint, saved: Container[str]) -> Checkpoint:
    """A run's `checkpoint` under the names of PEFT's files: the adapter, and what else was trained or is in `saved`.

    One with several adapters stays as it is, as their names would meet.
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


def is_foreign(fqn: str) -> bool:
    """Whether `fqn` belongs to a PEFT method that `parse_name` does not know."""
    return parse_name(fqn).kind == BASE and bool(_UNKNOWN.search(fqn))


@dataclass(frozen=True)
class AdapterConfig:
    """What a merge needs of `adapter_config.json`; `raw` is all of it."""

    path: str
    raw: Mapping[str, Any]
    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    use_rslora: bool
    use_dora: bool
    fan_in_fan_out: bool
    bias: str
    target_parameters: tuple[str, ...]
    saved: tuple[str, ...]
    token_indices: Mapping[str, list[int]] | list[int] | None
    base: str | None
    revision: str | None

    def rank_of(self, key: str) -> int:
        """The rank of module (or targeted parameter) `key`."""
        return self.rank_pattern.get(self._pattern(self.rank_pattern, key), self.rank)

    def scaling(self, key: str) -> float:
        """alpha / r, or alpha / sqrt(r) with rsLoRA, of the patterns' r and alpha."""
        rank = self.rank_of(key)
        alpha = self.alpha_pattern.get(self._pattern(self.alpha_pattern, key), self.alpha)
        return alpha / sqrt(rank) if self.use_rslora else alpha / rank

    @property
    def is_of_peft(self) -> bool:
        """Whether PEFT itself merges it, as its arithmetic is not W + BA of the base as it is."""
        return any(map(self.raw.get, OF_PEFT)) or self.raw.get("init_lora_weights") in _INITS_OF_PEFT

    def _pattern(self, patterns: Iterable[str], key: str) -> str:
        """The first pattern that matches the end of `key` (peft `get_pattern_key`)."""
        for pattern in patterns:
            try:
                if re.match(rf"(.*\.)?({pattern})$", key):
                    return pattern
            except re.error as error:
                raise CorruptError(
                    "a pattern of the adapter's config is no regular expression", path=self.path, found=repr(pattern)
                ) from error
        return key

    def targets_parameter(self, fqn: str) -> bool:
        """Whether `target_parameters` names the parameter `fqn` (peft `_inject_parameters`)."""
        return any(fqn == target or fqn.endswith(f".{target}") for target in self.target_parameters)


def find_config(folders: Iterable[str | Path]) -> Path | None:
    """`adapter_config.json` of the nearest folder that has one."""
    for folder in map(Path, folders):
        if (folder / CONFIG).exists():
            return confined(folder, CONFIG)
    return None


def config_path(checkpoint: Checkpoint, folder: Path | None = None) -> Path:
    """`adapter_config.json` of the adapter in `checkpoint`: in `folder`, or in its own ones.

    Raises UsageError where there is no adapter, NotFoundError where it lacks the file.
    """
    path = find_config([*filter(None, [folder]), *checkpoint.folders])
    if path is not None:
        return path
    if not is_adapter(fqn for fqn, _ in checkpoint.tensors):
        raise UsageError("this checkpoint holds no LoRA adapter", path=checkpoint.path)
    raise NotFoundError(
        f"there is no {CONFIG}, and the weights do not tell alpha or the adapter's other options",
        path=checkpoint.path,
        hint="give the folder that has it with --config",
    )


def read_config(path: Path) -> AdapterConfig:
    """The config of a LoRA adapter.  UsageError names the feature that cannot be merged."""
    return parse_config(read_object(path, "the adapter's config"), path)


def parse_config(raw: Mapping[str, Any], path: Path) -> AdapterConfig:
    """Same as `read_config`, for a config that was read; `path` is for messages."""
    if raw.get("peft_type") != "LORA":
        raise UsageError("only LoRA adapters are merged", path=path, found=f"peft_type {raw.get('peft_type')!r}")
    for key, what in _VARIANTS.items():
        if raw.get(key):
            raise UsageError(f"this adapter is not merged: it uses {what}", path=path, found=f"{key}: {raw[key]!r}")
    init = raw.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_MUTATING_INITS):
        raise UsageError(
            "this adapter is not merged: its init takes part of the base weights into the adapter",
            path=path,
            found=f"init_lora_weights: {init!r}",
            hint="convert it with PEFT: save_pretrained(path_initial_model_for_weight_conversion=...)",
        )
    fields = _Fields(raw, path)
    return AdapterConfig(
        path=str(path),
        raw=raw,
        rank=fields.get("r", int, 8),
        alpha=fields.number("lora_alpha", 8),
        rank_pattern=fields.pattern("rank_pattern"),
        alpha_pattern=fields.pattern("alpha_pattern"),
        use_rslora=fields.get("use_rslora", bool, False),
        use_dora=fields.get("use_dora", bool, False),
        fan_in_fan_out=fields.get("fan_in_fan_out", bool, False),
        bias=fields.get("bias", str, "none"),
        target_parameters=tuple(fields.strings("target_parameters")),
        saved=tuple(fields.strings("modules_to_save")),
        token_indices=raw.get("trainable_token_indices"),
        base=fields.get("base_model_name_or_path", str, None) or None,
        revision=fields.get("revision", str, None) or None,
    )


@dataclass(frozen=True)
class _Fields:
    """Fields of a config that somebody else wrote, with their types checked."""

    raw: Mapping[str, Any]
    path: Path

    def get(self, name: str, kind: type, default: Any) -> Any:
        value = self.raw.get(name)
        if value is None:
            return default
        no_count = kind is int and isinstance(value, int) and (isinstance(value, bool) or value < 1)
        if not isinstance(value, kind) or no_count:
            raise self._fault(name, kind.__name__, value)
        return value

    def number(self, name: str, default: float) -> float:
        value = self.raw.get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < _TOO_LARGE:
            raise self._fault(name, "a number", value)
        return value

    def pattern(self, name: str) -> dict[str, Any]:
        value: dict[str, Any] = self.get(name, dict, {})
        for number in value.values():
            if not isinstance(number, (int, float)) or isinstance(number, bool) or not 0 < number < _TOO_LARGE:
                raise self._fault(name, "numbers above zero", number)
        return dict(value)

    def strings(self, name: str) -> Iterator[str]:
        for value in self.get(name, list, []):
            if not isinstance(value, str):
                raise self._fault(name, "a list of names", value)
            yield value

    def _fault(self, name: str, expected: str, value: object) -> CorruptError:
        return CorruptError(
            f"{name} of the adapter's config is wrong", path=self.path, expected=expected, found=repr(value)
        )


def tensors(checkpoint: Checkpoint, config: Mapping[str, Any], dtype: DType | None = None) -> dict[str, Choice]:
    """What PEFT would save of the adapter in `checkpoint`, by its name in the file.

    `config` is that of the adapter.  From an adapter's own file, everything is taken under the name that it has.
    Raises LossError where something was trained that PEFT would not save.
    """
    parsed = {fqn: parse_name(fqn) for fqn, role in checkpoint.tensors if role in MODEL_ROLES}
    if not is_adapter(parsed):
        raise UsageError("this checkpoint holds no LoRA adapter", path=checkpoint.path)
    for fqn in parsed:
        if is_foreign(fqn):
            raise LossError("this tensor belongs to a method that is not LoRA", path=checkpoint.path, fqn=fqn)
    names = sorted({name.adapter for name in parsed.values() if name.adapter is not None})
    if len(names) > 1:
        raise UsageError("the checkpoint holds several adapters", path=checkpoint.path, found=", ".join(names))
    trained = {fqn for group in checkpoint.state.param_groups for fqn in group.fqns}
    bias = str(config.get("bias", "none"))
    found: dict[str, Choice] = {}
    for fqn, choice in choices(checkpoint, dtype).items():
        name = parsed[fqn]
        if name.kind != BASE:
            if choice.tensor.numel == 0:
                raise CorruptError(
                    "this tensor of the adapter is empty: under ZeRO-3 or FSDP it was saved without its partitions",
                    path=checkpoint.path,
                    fqn=fqn,
                    hint="take the adapter from the sharded checkpoint: ckpt convert auto peft CHECKPOINT",
                )
            found[name.in_file] = choice
        elif checkpoint.is_adapter or _is_saved(fqn, parsed, bias):
            found[fqn if fqn.startswith(PREFIX) else PREFIX + fqn] = choice
        elif fqn in trained:
            raise LossError("this parameter was trained, but is no part of the adapter", fqn=fqn)
    return found


def _is_saved(fqn: str, parsed: Mapping[str, AdapterName], bias: str) -> bool:
    """Whether PEFT saves a parameter of the base model with the adapter."""
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
