"""`adapter_config.json`, in which PEFT says what a LoRA adapter is and how it is merged.

Facts from peft 0.21.2 (`tuners/lora/config.py`, `tuners/lora/layer.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any, Literal

from ckpt.adapters import names
from ckpt.base.errors import CorruptError, NotFoundError, UsageError
from ckpt.move.files import confined
from ckpt.move.json_files import read_object
from ckpt.move.source import read_file
from ckpt.plan.checkpoint import Checkpoint

CONFIG = "adapter_config.json"
#: What verl writes beside rank files in its place, with nothing but these entries (verl 0.9.1,
#: `utils/checkpoint/lora_metadata.py`); of its LoRA nothing else can be set but the layers.
VERL_META = "lora_train_meta.json"
_OF_VERL = {"r", "lora_alpha", "task_type"}
#: Entries of mlx-lm's `lora_parameters`.
_OF_MLX = {"rank", "scale", "dropout", "keys", "alpha"}
#: A float that no rank and no alpha reaches. PEFT merges it into infinite values.
_TOO_LARGE = 1 << 127
#: Values of LoRA's `bias`. PEFT raises NotImplementedError for any other.
_BIASES = ("none", "all", "lora_only")
#: Options of LoraConfig under which a merge is something else than W + BA.  For each, what it is called.
_VARIANTS = {
    "arrow_config": "Arrow, which routes each token",
    "alora_invocation_tokens": "activated LoRA, which no merged model can express",
    "use_qalora": "QA-LoRA",
    "layer_replication": "layer replication, which PEFT does not merge either",
    "megatron_config": "LoRA over Megatron's parallel layers",
}
#: Inits that PEFT runs again when it loads the adapter, and that change the base weights: at random, or by data.
_MUTATING_INITS = ("pissa_niter_", "corda", "loftq", "lora_ga")
#: Options and inits under which PEFT itself merges, layer by layer (`ckpt.commands.merge_lora.layer`): block-diagonal
#: LoRA, VeLoRA, MonteCLoRA, KaSA, and inits that are made of the base weight.
OF_PEFT = ("use_bdlora", "velora_config", "monteclora_config", "kasa_config")
_INITS_OF_PEFT = ("pissa", "olora", "mica")
#: Inits that take the adapter out of the base weight.
_INITS_OF_BASE = ("pissa", "olora")
LORA, TRAINABLE_TOKENS = "LORA", "TRAINABLE_TOKENS"
#: Other kinds, which PEFT itself merges layer by layer: it takes a layer's weight and its tensors in the file.
BY_LAYER = (
    *("ADALORA", "BEFT", "BOFT", "C3A", "DEFT", "DELORA", "FOURIERFT", "GLORA", "GRALORA", "HIRA", "HRA"),
    *("IA3", "LN_TUNING", "LOHA", "LOKR", "MISS", "OFT", "OSF", "PEANUT", "PSOFT", "ROAD", "SHIRA", "SUPERTUNING"),
    *(TRAINABLE_TOKENS, "VBLORA", "WAVEFT"),
)
#: Kinds whose layers share tensors by the shapes of all layers: PEFT merges them in a model without weights.
BY_MODEL = ("PVERA", "RANDLORA", "VERA")
ADAMSS, FROD, TINYLORA, UNILORA = "ADAMSS", "FROD", "TINYLORA", "UNILORA"
#: Kinds that PEFT merges in the loaded model, like any kind that is not known here.
WHOLE = (ADAMSS, FROD, TINYLORA, UNILORA)
KINDS = (LORA, *BY_LAYER, *BY_MODEL, *WHOLE)
#: Kinds that PEFT does not merge: prompts, prefixes, adapters that route each token, and layers of its own.
NOT_MERGED = (
    *("ADAPTION_PROMPT", "CARTRIDGE", "CPT", "LILY", "MULTITASK_PROMPT_TUNING", "POLY", "PREFIX_TUNING"),
    *("PROMPT_TUNING", "P_TUNING", "SHADOW", "XLORA"),
)
_NAMED = (*KINDS, *NOT_MERGED)
#: Entries of a config that mean the same in all kinds.
_OF_ALL_KINDS = ("bias", "modules_to_save", "base_model_name_or_path", "revision")
#: How the columns of a `lora_B` of stacked experts are packed: PEFT has all experts of a rank together, Unsloth before
#: 2026.9.6 all ranks of an expert.
Columns = Literal["rank_major", "grouped_by_expert"]
#: What Unsloth records of it, in the config itself or in its `auto_mapping` (unsloth_zoo 2026.10.9,
#: temporary_patches/moe_utils.py, `write_fused_expert_lora_layout` and `saved_lora_b_layouts`): for all parameters, or
#: for each by its name.  The parameters are the two that its own forward computes.
_LAYOUT, _LAYOUTS_BY_NAME = "lora_B_layout", "unsloth_fused_expert_lora"
_COLUMNS: tuple[Columns, ...] = ("rank_major", "grouped_by_expert")
#: The releases that PEFT's source called itself, as 0.19.1.dev0, while it changed how square experts lie.
_FIRST_BETWEEN, _LAST_BETWEEN = (0, 18, 1), (0, 19, 1)
_CARD, _CARDS_HEAD = "README.md", 1 << 16
_UNSLOTHS_PARAMETERS = ("gate_up_proj", "down_proj")


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
    kind: str = LORA
    #: Whether Unsloth trained it, by its mark in the config or by the tag in the model card, which TRL's trainer writes
    #: where the model is Unsloth's (trl 1.16.0, `base_trainer.py`, `create_model_card`).
    is_of_unsloth: bool = False
    #: What the user says of the layout of stacked experts, which comes before what is recorded.
    given_layout: Columns | None = None
    #: Names that the adapter's file and config have for modules of the base, by the name in the base.
    former: Mapping[str, str] = field(default_factory=dict)

    def rank_of(self, key: str) -> int:
        """The rank of module (or targeted parameter) `key`."""
        key = self.former.get(key, key)
        return self.rank_pattern.get(self._pattern(self.rank_pattern, key), self.rank)

    def alpha_of(self, key: str) -> float:
        """The alpha of module (or targeted parameter) `key`."""
        key = self.former.get(key, key)
        return self.alpha_pattern.get(self._pattern(self.alpha_pattern, key), self.alpha)

    def scaling(self, key: str) -> float:
        """alpha / r, or alpha / sqrt(r) with rsLoRA, of the patterns' r and alpha."""
        rank, alpha = self.rank_of(key), self.alpha_of(key)
        return alpha / sqrt(rank) if self.use_rslora else alpha / rank

    def expert_layout(self, fqn: str) -> Columns | None:
        """How `lora_B` of the stacked experts `fqn` is packed; None where Unsloth trained it and did not record it."""
        recorded = set(self._recorded_layouts(fqn))
        if self.given_layout is not None or recorded:
            return self.given_layout or (recorded.pop() if len(recorded) == 1 else None)
        return None if self.is_of_unsloth and _is_of_unsloth(fqn) else "rank_major"

    @property
    def peft_release(self) -> tuple[int, ...] | None:
        """The release of PEFT that saved the adapter, or that its source was on the way to.

        None where it is not recorded, or where the source may have been one or the other of those that differ.
        """
        found = re.match(r"(\d+)\.(\d+)\.(\d+)(?P<rest>.*)", str(self.raw.get("peft_version")), re.DOTALL)
        if found is None:
            return None
        release = (int(found[1]), int(found[2]), int(found[3]))
        return None if found["rest"] and _FIRST_BETWEEN <= release <= _LAST_BETWEEN else release

    def has_input_last(self, is_transposed: bool) -> bool | None:
        """Whether stacked experts [experts, n, n] are [experts, out, in] to the PEFT that trained; None where unknown.

        `is_transposed` is what transformers says of a model that has [experts, in, out].  PEFT took all for such ones
        before 0.19.0, in 0.19.0 the others, and since 0.19.1 those (`tuners/lora/layer.py`, `ParamWrapper`).
        """
        release = self.peft_release
        if release is None:
            return None
        return is_transposed if release == (0, 19, 0) else release > (0, 19, 0) and not is_transposed

    def overrules(self, fqn: str) -> bool:
        """Whether the user says another layout of the stacked experts `fqn` than is recorded."""
        return self.given_layout is not None and any(one != self.given_layout for one in self._recorded_layouts(fqn))

    def _recorded_layouts(self, fqn: str) -> Iterator[Columns | None]:
        """What each record says of the layout of `fqn`; None for a record that is no layout."""
        for source in (self.raw, _mapping(self.raw.get("auto_mapping"))) if _is_of_unsloth(fqn) else ():
            by_name = _mapping(_mapping(source.get(_LAYOUTS_BY_NAME)).get("parameters"))
            recorded = _mapping(by_name.get(fqn.rpartition(".")[2])).get(_LAYOUT, source.get(_LAYOUT))
            if recorded is not None:
                yield next((columns for columns in _COLUMNS if columns == recorded), None)

    @property
    def is_of_peft(self) -> bool:
        """Whether PEFT itself merges it, as its arithmetic is not W + BA of the base as it is."""
        is_variant = any(self.raw.get(key) is not None for key in OF_PEFT)
        return self.kind != LORA or is_variant or self.raw.get("init_lora_weights") in _INITS_OF_PEFT

    @property
    def optional_tensors(self) -> dict[str, tuple[str, bool]]:
        """The entry that turns on a kind of tensor beside a layer's factors, by that kind, and if it is on."""
        return {
            names.MAGNITUDE: ("use_dora", self.use_dora),
            names.BIAS: ("lora_bias", bool(self.raw.get("lora_bias"))),
            names.DIAGONAL: ("kasa_config", self.raw.get("kasa_config") is not None),
            names.SAMPLER: ("monteclora_config", self.raw.get("monteclora_config") is not None),
        }

    @property
    def init_changes_base(self) -> bool:
        """True if the init took the adapter out of the base weight."""
        return self.kind == LORA and self.raw.get("init_lora_weights") in _INITS_OF_BASE

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


def _is_of_unsloth(fqn: str) -> bool:
    """Whether Unsloth's own forward computes the parameter."""
    return fqn.rpartition(".")[2] in _UNSLOTHS_PARAMETERS


def _has_unsloths_tag(folder: Path) -> bool:
    """Whether the model card in `folder` has the tag `unsloth`."""
    if not (folder / _CARD).is_file():
        return False
    text = read_file(confined(folder, _CARD), _CARDS_HEAD).decode(errors="replace")
    head = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
    return head is not None and re.search(r"^\s*- unsloth\s*$", head[1], re.MULTILINE) is not None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def find_config(folders: Iterable[str | Path]) -> Path | None:
    """`adapter_config.json` of the nearest folder that has one, or what verl writes in its place, in that order."""
    for folder in map(Path, folders):
        for name in (CONFIG, VERL_META):
            if (folder / name).exists():
                return confined(folder, name)
    return None


def config_path(checkpoint: Checkpoint, folder: Path | None = None) -> Path:
    """`adapter_config.json` of the adapter in `checkpoint`: in `folder`, or in its own ones; NotFoundError without."""
    path = find_config([*filter(None, [folder]), *checkpoint.folders])
    if path is not None:
        return path
    raise NotFoundError(
        f"there is no {CONFIG}, and the weights do not tell alpha or the adapter's other options",
        path=checkpoint.path,
        hint="give the folder that has it with --config",
    )


def settings_of(
    checkpoint: Checkpoint, folder: Path | None = None, layers: Iterable[str] = ()
) -> tuple[Mapping[str, Any], Path]:
    """What `adapter_config.json` says of the adapter in `checkpoint`, of these `layers`, and the file that it is from.

    It is in `folder`, or in the checkpoint's own; NotFoundError without, where no other config of the trainer's says
    the same.
    """
    if checkpoint.adapter_config is not None and find_config([folder] if folder else []) is None:
        return checkpoint.adapter_config, Path(checkpoint.path)
    path = config_path(checkpoint, folder)
    return read_raw(path, layers), path


def read_config(path: Path, layers: Iterable[str] = ()) -> AdapterConfig:
    """The config of a LoRA adapter of these `layers`.  UsageError names the feature that cannot be merged."""
    return parse_config(read_raw(path, layers), path)


def read_raw(path: Path, layers: Iterable[str] = ()) -> dict[str, Any]:
    """The config of an adapter as PEFT has it; of verl's and MLX's adapters in PEFT's words, with these `layers`."""
    raw = read_object(path, "the adapter's config")
    if path.name == VERL_META:
        return _of_verl(raw, path, layers)
    return _of_mlx(raw, path, layers) if is_of_mlx(raw) else raw


def is_of_mlx(raw: Mapping[str, Any]) -> bool:
    """Whether this is the `adapter_config.json` that mlx-lm writes, which is its own."""
    return "peft_type" not in raw and "fine_tune_type" in raw


def _of_verl(raw: Mapping[str, Any], path: Path, layers: Iterable[str]) -> dict[str, Any]:
    if unknown := sorted(raw.keys() - _OF_VERL):
        raise UsageError(
            "verl recorded something of this adapter that is not known here", path=path, found=", ".join(unknown)
        )
    for name in ("r", "lora_alpha"):
        if raw.get(name) is None:
            raise CorruptError(f"{name} of the adapter is not recorded", path=path)
    return {"peft_type": "LORA", **raw, "bias": "none", "target_modules": _leaves(layers)}


def _of_mlx(raw: Mapping[str, Any], path: Path, layers: Iterable[str]) -> dict[str, Any]:
    """mlx-lm 0.32 (`tuner/lora.py`): what is added is `scale` times the product, so that alpha is `scale` times r."""
    if raw["fine_tune_type"] != "lora":
        raise UsageError(
            "of mlx-lm's fine-tuning only LoRA is read",
            path=path,
            found=f"fine_tune_type {raw['fine_tune_type']!r}",
            hint="mlx_lm.fuse merges it, where MLX runs",
        )
    fields = _Fields(_mapping(raw.get("lora_parameters")), path)
    if unknown := sorted(fields.raw.keys() - _OF_MLX):
        raise UsageError(
            "mlx-lm recorded something of this adapter that is not known here",
            path=path,
            expected=f"lora_parameters {', '.join(sorted(_OF_MLX))}",
            found=", ".join(unknown),
            hint="mlx_lm.fuse merges it, where MLX runs",
        )
    rank, scale = fields.get("rank", int, None), fields.number("scale", 0)
    if rank is None or "scale" not in fields.raw:
        raise CorruptError("rank and scale of the adapter are not recorded", path=path)
    found = {"peft_type": "LORA", "r": rank, "lora_alpha": scale * rank, "bias": "none"}
    return {**found, "target_modules": _leaves(layers), "base_model_name_or_path": raw.get("model")}


def _leaves(layers: Iterable[str]) -> list[str]:
    return sorted({layer.rpartition(".")[2] for layer in layers})


def parse_config(raw: Mapping[str, Any], path: Path) -> AdapterConfig:
    """Same as `read_config`, for a config that was read; `path` is for messages."""
    kind = raw.get("peft_type")
    if not isinstance(kind, str):
        raise CorruptError(
            "peft_type of the adapter's config is missing or wrong", path=path, expected="LORA, or another", found=kind
        )
    if kind not in _NAMED and (meant := kind.strip().upper()) in _NAMED:
        raise CorruptError(
            "peft_type of the adapter's config is misspelled, so PEFT does not load it",
            path=path,
            expected=repr(meant),
            found=repr(kind),
        )
    if kind in NOT_MERGED:
        raise _unmerged_kind(kind, path)
    for key, what in _VARIANTS.items():
        if raw.get(key):
            raise UsageError(f"this adapter is not merged: it uses {what}", path=path, found=f"{key}: {raw[key]!r}")
    init = raw.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_MUTATING_INITS):
        raise UsageError(
            "this adapter is not merged: its init takes part of the base weights into the adapter",
            path=path,
            found=f"init_lora_weights: {init!r}",
            hint="where the model that this init left as the base was saved, give that with --base and set "
            "init_lora_weights to true in a copy of adapter_config.json; otherwise convert the adapter with PEFT: "
            "save_pretrained(path_initial_model_for_weight_conversion=...)",
        )
    fields = _Fields(raw if kind == LORA else {key: raw.get(key) for key in _OF_ALL_KINDS}, path)
    return AdapterConfig(
        path=str(path),
        raw=raw,
        rank=fields.get("r", int, 8),
        alpha=fields.number("lora_alpha", 8),
        rank_pattern=fields.pattern("rank_pattern"),
        alpha_pattern=fields.pattern("alpha_pattern"),
        use_rslora=bool(fields.raw.get("use_rslora")),
        use_dora=bool(fields.raw.get("use_dora")),
        fan_in_fan_out=bool(fields.raw.get("fan_in_fan_out")),
        bias=fields.one_of("bias", _BIASES) if kind == LORA else fields.get("bias", str, "none"),
        target_parameters=tuple(fields.strings("target_parameters")),
        saved=tuple(fields.strings("modules_to_save")),
        token_indices=fields.indices("trainable_token_indices"),
        kind=kind,
        is_of_unsloth=bool(_mapping(raw.get("auto_mapping")).get("unsloth_fixed")) or _has_unsloths_tag(path.parent),
        base=fields.name("base_model_name_or_path"),
        revision=fields.name("revision"),
    )


def _unmerged_kind(kind: object, path: Path) -> UsageError:
    return UsageError(
        "this kind of adapter is not merged",
        path=path,
        expected=f"peft_type {', '.join(KINDS)}, or another one that the installed PEFT merges",
        found=f"peft_type {kind!r}",
        hint="PEFT does not merge prompts, prefixes, adapters that route each token, and layers of its own either",
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
        return self._checked(name, self.raw.get(name, default))

    def pattern(self, name: str) -> dict[str, Any]:
        value: dict[str, Any] = self.get(name, dict, {})
        for number in value.values():
            if name != "rank_pattern":
                self._checked(name, number)
            elif type(number) is not int or not 0 < number < _TOO_LARGE:
                raise self._fault(name, "integers above zero", number)
        return dict(value)

    def one_of(self, name: str, values: tuple[str, ...]) -> str:
        value = self.raw.get(name) or values[0]
        if value not in values:
            raise self._fault(name, ", ".join(values), value)
        return str(value)

    def name(self, name: str) -> str | None:
        """Return a name that only the search for the base uses: PEFT takes any value."""
        value = self.raw.get(name)
        return str(value) if value else None

    def indices(self, name: str) -> Any:
        """Return token indices, or lists of them by module."""
        value = self.raw.get(name)
        for one in value.values() if isinstance(value, dict) else [value]:
            if one is not None and not (isinstance(one, list) and all(type(index) is int for index in one)):
                raise self._fault(name, "a list of token indices, or one for each module", one)
        return value

    def _checked(self, name: str, value: Any) -> float:
        if not isinstance(value, (int, float)) or not abs(value) < _TOO_LARGE:
            raise self._fault(name, "a number", value)
        return value

    def strings(self, name: str) -> Iterator[str]:
        for value in self.get(name, list, []) if self.raw.get(name) else ():
            if not isinstance(value, str):
                raise self._fault(name, "a list of names", value)
            yield value

    def _fault(self, name: str, expected: str, value: object) -> CorruptError:
        return CorruptError(
            f"{name} of the adapter's config is wrong", path=self.path, expected=expected, found=repr(value)
        )
