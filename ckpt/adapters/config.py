"""`adapter_config.json`: PEFT's description of a LoRA adapter and its merge.

Facts from peft 0.21.2 (`tuners/lora/config.py`, `tuners/lora/layer.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any, Literal, cast

from ckpt.adapters import names
from ckpt.base.errors import CorruptError, NotFoundError, UsageError
from ckpt.base.words import Message
from ckpt.move.files import confined
from ckpt.move.json_files import read_object
from ckpt.move.source import read_file
from ckpt.plan.checkpoint import Checkpoint

#: verl's substitute next to rank files (verl 0.9.1, `utils/checkpoint/lora_metadata.py`). verl's LoRA has no other
#: settings except the layers.
VERL_META = "lora_train_meta.json"
_OF_VERL = {"r", "lora_alpha", "task_type"}
_OF_MLX = {"rank", "scale", "dropout", "keys", "alpha"}
#: Larger than any rank or alpha.
_TOO_LARGE = 1 << 127
_REPLICATION = "layer_replication"
#: LoraConfig options that make a merge different from W + BA. AdaLoRA ignores the others.
_VARIANTS = {
    "arrow_config": "Arrow, a router for tokens",
    "alora_invocation_tokens": "activated LoRA, and a merged model can't express it",
    "use_qalora": "QA-LoRA",
    _REPLICATION: "layer replication, and PEFT adds every copy's changes to one shared layer",
    "megatron_config": "LoRA over Megatron's parallel layers",
}
#: Random or data-based inits that PEFT repeats on loading, and that change the base weights.
_MUTATING_INITS = ("pissa_niter_", "corda", "loftq", "lora_ga")
#: PEFT itself merges these, layer by layer.
OF_PEFT = ("use_bdlora", "velora_config", "monteclora_config", "kasa_config")
_INITS_OF_PEFT = ("pissa", "olora", "mica")
#: Inits that subtract the adapter from the base weight.
_INITS_OF_BASE = ("pissa", "olora")
LORA, TRAINABLE_TOKENS = "LORA", "TRAINABLE_TOKENS"
BY_LAYER = (
    *("ADALORA", "BEFT", "BOFT", "C3A", "DEFT", "DELORA", "FOURIERFT", "GLORA", "GRALORA", "HIRA", "HRA"),
    *("IA3", "LN_TUNING", "LOHA", "LOKR", "MISS", "OFT", "OSF", "PEANUT", "PSOFT", "ROAD", "SHIRA", "SUPERTUNING"),
    *(TRAINABLE_TOKENS, "VBLORA", "WAVEFT"),
)
#: Kinds with tensors shared by layers. PEFT merges them in a model without weights.
BY_MODEL = ("PVERA", "RANDLORA", "VERA")
ADAMSS, FROD, TINYLORA, UNILORA = "ADAMSS", "FROD", "TINYLORA", "UNILORA"
#: Kinds that PEFT merges in the loaded model, like unknown kinds.
WHOLE = (ADAMSS, FROD, TINYLORA, UNILORA)
KINDS = (LORA, *BY_LAYER, *BY_MODEL, *WHOLE)
#: Prompts, prefixes, adapters that route each token, and extra layers.
NOT_MERGED = (
    *("ADAPTION_PROMPT", "CARTRIDGE", "CPT", "LILY", "MULTITASK_PROMPT_TUNING", "POLY", "PREFIX_TUNING"),
    *("PROMPT_TUNING", "P_TUNING", "SHADOW", "XLORA"),
)
_NAMED = (*KINDS, *NOT_MERGED)
#: Config entries with one meaning in all kinds.
_OF_ALL_KINDS = ("bias", "modules_to_save", "trainable_token_indices", "base_model_name_or_path", "revision")
#: Column packing in a `lora_B` with stacked experts: PEFT groups by rank, Unsloth before 2026.9.6 by expert.
Columns = Literal["rank_major", "grouped_by_expert"]
#: Unsloth's packing record, in the config or in its `auto_mapping` (unsloth_zoo 2026.10.9,
#: temporary_patches/moe_utils.py, `write_fused_expert_lora_layout` and `saved_lora_b_layouts`), for all parameters or
#: by name.
_LAYOUT, _LAYOUTS_BY_NAME = "lora_B_layout", "unsloth_fused_expert_lora"
_COLUMNS: tuple[Columns, ...] = ("rank_major", "grouped_by_expert")
#: Releases named by PEFT's source (for example 0.19.1.dev0) while it changed square experts' layout.
_FIRST_BETWEEN, _LAST_BETWEEN = (0, 18, 1), (0, 19, 1)
_CARD, _CARDS_HEAD = "README.md", 1 << 16
_UNSLOTHS_PARAMETERS = ("gate_up_proj", "down_proj")


@dataclass(frozen=True)
class AdapterConfig:
    """`raw` has all settings."""

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
    #: True if the config has Unsloth's mark, or the model card its tag (from trl 1.16.0, `base_trainer.py`,
    #: `create_model_card`).
    is_of_unsloth: bool = False
    #: It overrides the recorded layout.
    given_layout: Columns | None = None
    #: By the name in the base.
    former: Mapping[str, str] = field(default_factory=dict)

    def rank_of(self, key: str) -> int:
        return int(self.of_pattern(self.rank_pattern, key, self.rank))

    def alpha_of(self, key: str) -> float:
        return cast(float, self.of_pattern(self.alpha_pattern, key, self.alpha))

    def scaling(self, key: str) -> float:
        """Return alpha / r, or alpha / sqrt(r) with rsLoRA, after applying the patterns."""
        rank, alpha = self.rank_of(key), self.alpha_of(key)
        return alpha / sqrt(rank) if self.use_rslora else alpha / rank

    def expert_layout(self, fqn: str) -> Columns | None:
        """Return the `lora_B` packing for stacked experts, or None if Unsloth trained it without a record."""
        recorded = set(self._recorded_layouts(fqn))
        if self.given_layout is not None or recorded:
            return self.given_layout or (recorded.pop() if len(recorded) == 1 else None)
        return None if self.is_of_unsloth and _is_of_unsloth(fqn) else "rank_major"

    @property
    def peft_release(self) -> tuple[int, ...] | None:
        """PEFT release that saved the adapter, or the next release if PEFT ran from source.

        None if unknown, or if a source version could mean two layouts.
        """
        found = re.match(r"(\d+)\.(\d+)\.(\d+)(?P<rest>.*)", str(self.raw.get("peft_version")), re.DOTALL)
        if found is None:
            return None
        release = (int(found[1]), int(found[2]), int(found[3]))
        return None if found["rest"] and _FIRST_BETWEEN <= release <= _LAST_BETWEEN else release

    def has_input_last(self, is_transposed: bool) -> bool | None:
        """Return True if stacked experts [experts, n, n] were [experts, out, in] in training, None if unknown.

        `is_transposed` is transformers' flag for models with [experts, in, out]. PEFT assumed that layout for all
        models before 0.19.0, and for the opposite ones in 0.19.0. It is right since 0.19.1 (`tuners/lora/layer.py`,
        `ParamWrapper`).
        """
        release = self.peft_release
        if release is None:
            return None
        return is_transposed if release == (0, 19, 0) else release > (0, 19, 0) and not is_transposed

    def overrules(self, fqn: str) -> bool:
        """Return True if the user's layout differs from the recorded one."""
        return self.given_layout is not None and any(one != self.given_layout for one in self._recorded_layouts(fqn))

    def _recorded_layouts(self, fqn: str) -> Iterator[Columns | None]:
        """Yield each record's layout, None if invalid."""
        for source in (self.raw, _mapping(self.raw.get("auto_mapping"))) if _is_of_unsloth(fqn) else ():
            by_name = _mapping(_mapping(source.get(_LAYOUTS_BY_NAME)).get("parameters"))
            recorded = _mapping(by_name.get(fqn.rpartition(".")[2])).get(_LAYOUT, source.get(_LAYOUT))
            if recorded is not None:
                yield next((columns for columns in _COLUMNS if columns == recorded), None)

    @property
    def is_of_peft(self) -> bool:
        """True if PEFT itself merges it, because its arithmetic is not W + BA on the unchanged base."""
        is_variant = any(self.raw.get(key) is not None for key in OF_PEFT)
        return self.kind != LORA or is_variant or self.raw.get("init_lora_weights") in _INITS_OF_PEFT

    @property
    def optional_tensors(self) -> dict[str, tuple[str, bool]]:
        """Config entries for a layer's optional tensors, by kind, with True if on."""
        return {
            names.MAGNITUDE: ("use_dora", self.use_dora),
            names.BIAS: ("lora_bias", bool(self.raw.get("lora_bias"))),
            names.DIAGONAL: ("kasa_config", self.raw.get("kasa_config") is not None),
            names.SAMPLER: ("monteclora_config", isinstance(self.raw.get("monteclora_config"), Mapping)),
            names.PROJECTION: ("velora_config", self.raw.get("velora_config") is not None),
        }

    @property
    def init_changes_base(self) -> bool:
        return self.kind == LORA and self.raw.get("init_lora_weights") in _INITS_OF_BASE

    def of_pattern(self, values: Mapping[str, Any], key: str, default: Any) -> Any:
        """Return the first matching pattern's value (peft `get_pattern_key`)."""
        key = self.former.get(key, key)
        for pattern, value in values.items():
            try:
                if re.match(rf"(.*\.)?({pattern})$", key):
                    return value
            except re.error as error:
                raise CorruptError(
                    "a pattern in the adapter config is not a regular expression", path=self.path, found=repr(pattern)
                ) from error
        return values.get(key, default)

    def targets_parameter(self, fqn: str) -> bool:
        """Return True if `target_parameters` names the parameter (peft `_inject_parameters`)."""
        return any(fqn == target or fqn.endswith(f".{target}") for target in self.target_parameters)


def _is_of_unsloth(fqn: str) -> bool:
    return fqn.rpartition(".")[2] in _UNSLOTHS_PARAMETERS


def _has_unsloths_tag(folder: Path) -> bool:
    if not (folder / _CARD).is_file():
        return False
    text = read_file(confined(folder, _CARD), _CARDS_HEAD).decode(errors="replace")
    head = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
    return head is not None and re.search(r"^\s*- unsloth\s*$", head[1], re.MULTILINE) is not None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def find_config(folders: Iterable[str | Path]) -> Path | None:
    """Return the nearest `adapter_config.json` or verl's substitute."""
    for folder in map(Path, folders):
        for name in (names.ADAPTER_CONFIG, VERL_META):
            if (folder / name).exists():
                return confined(folder, name)
    return None


def config_path(checkpoint: Checkpoint, folder: Path | None = None) -> Path:
    """Raise NotFoundError if no folder has a config."""
    path = find_config([*filter(None, [folder]), *checkpoint.folders])
    if path is not None:
        return path
    raise NotFoundError(
        f"there is no {names.ADAPTER_CONFIG}, and the weights don't record alpha or other options",
        path=checkpoint.path,
        hint=Message("give the folder with the adapter's config with {config}"),
    )


def settings_of(
    checkpoint: Checkpoint, folder: Path | None = None, layers: Iterable[str] = ()
) -> tuple[Mapping[str, Any], Path]:
    """Return the adapter's settings for `layers`, and the file they come from.

    Raise NotFoundError without a config, unless another trainer's config has the same settings.
    """
    if checkpoint.adapter_config is not None and find_config([folder] if folder else []) is None:
        return checkpoint.adapter_config, Path(checkpoint.path)
    path = config_path(checkpoint, folder)
    return read_raw(path, layers), path


def read_config(path: Path, layers: Iterable[str] = ()) -> AdapterConfig:
    """Raise UsageError with the feature that can't be merged."""
    return parse_config(read_raw(path, layers), path)


def read_raw(path: Path, layers: Iterable[str] = ()) -> dict[str, Any]:
    """Read an adapter's config in PEFT's terms. For verl and MLX, `layers` become the target modules."""
    raw = read_object(path, "the adapter's config")
    if path.name == VERL_META:
        return _verl_config(raw, path, layers)
    return _mlx_config(raw, path, layers) if is_of_mlx(raw) else raw


def is_of_mlx(raw: Mapping[str, Any]) -> bool:
    return "peft_type" not in raw and "fine_tune_type" in raw


def _verl_config(raw: Mapping[str, Any], path: Path, layers: Iterable[str]) -> dict[str, Any]:
    if unknown := sorted(raw.keys() - _OF_VERL):
        raise UsageError("verl's adapter record has an unknown entry", path=path, found=", ".join(unknown))
    for name in ("r", "lora_alpha"):
        if raw.get(name) is None:
            raise CorruptError(f"{name} is not recorded for the adapter", path=path)
    return {"peft_type": "LORA", **raw, "bias": "none", "target_modules": _leaves(layers)}


def _mlx_config(raw: Mapping[str, Any], path: Path, layers: Iterable[str]) -> dict[str, Any]:
    """Convert mlx-lm 0.32's config (`tuner/lora.py`): it adds `scale` times the product, so alpha is `scale` * r."""
    if raw["fine_tune_type"] != "lora":
        raise UsageError(
            "ckpt reads only LoRA from mlx-lm",
            path=path,
            found=f"fine_tune_type {raw['fine_tune_type']!r}",
            hint="use mlx_lm.fuse on a machine with MLX",
        )
    fields = _Fields(_mapping(raw.get("lora_parameters")), path)
    if unknown := sorted(fields.raw.keys() - _OF_MLX):
        raise UsageError(
            "mlx-lm's adapter record has an unknown entry",
            path=path,
            expected=f"lora_parameters {', '.join(sorted(_OF_MLX))}",
            found=", ".join(unknown),
            hint="use mlx_lm.fuse on a machine with MLX",
        )
    rank, scale = fields.get("rank", int, None), fields.number("scale", 0)
    if rank is None or "scale" not in fields.raw:
        raise CorruptError("the adapter's rank and scale are not recorded", path=path)
    found = {"peft_type": "LORA", "r": rank, "lora_alpha": scale * rank, "bias": "none"}
    return {**found, "target_modules": _leaves(layers), "base_model_name_or_path": raw.get("model")}


def _leaves(layers: Iterable[str]) -> list[str]:
    return sorted({layer.rpartition(".")[2] for layer in layers})


def parse_config(raw: Mapping[str, Any], path: Path) -> AdapterConfig:
    kind = raw.get("peft_type")
    if not isinstance(kind, str):
        raise CorruptError(
            "the adapter config's peft_type is missing or wrong", path=path, expected="LORA, or another", found=kind
        )
    if kind not in _NAMED and (meant := kind.strip().upper()) in _NAMED:
        raise CorruptError(
            "PEFT does not load this adapter: peft_type is misspelled",
            path=path,
            expected=repr(meant),
            found=repr(kind),
        )
    if kind in NOT_MERGED:
        raise _unmerged_kind(kind, path)
    from ckpt.adapters import entry_values  # builds a table for each kind of adapter

    entry_values.check(raw, path)
    for key, what in _VARIANTS.items():
        if raw.get(key) and (kind != "ADALORA" or key == _REPLICATION):
            raise UsageError(f"this adapter can't be merged: it uses {what}", path=path, found=f"{key}: {raw[key]!r}")
    init = raw.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_MUTATING_INITS):
        raise UsageError(
            "this adapter can't be merged: its init moves part of the base weights into the adapter",
            path=path,
            found=f"init_lora_weights: {init!r}",
            hint=Message(
                "if you saved the base model after this init, give it with {base} and set init_lora_weights to true "
                "in a copy of adapter_config.json; otherwise convert the adapter with PEFT: "
                "save_pretrained(path_initial_model_for_weight_conversion=...)"
            ),
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
        bias=fields.get("bias", str, "none"),
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
        "ckpt can't merge this kind of adapter",
        path=path,
        expected=f"peft_type {', '.join(KINDS)}, or another type the installed PEFT merges",
        found=f"peft_type {kind!r}",
        hint="PEFT does not merge prompts, prefixes, routed adapters or extra layers either",
    )


@dataclass(frozen=True)
class _Fields:
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

    def name(self, name: str) -> str | None:
        value = self.raw.get(name)
        return str(value) if value else None

    def indices(self, name: str) -> Any:
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
        given = self.raw.get(name) or ()
        for value in given if isinstance(given, str | list | tuple | Mapping) else [given]:
            if not isinstance(value, str) or not value:
                raise self._fault(name, "a list of names", value)
            yield value

    def _fault(self, name: str, expected: str, value: object) -> CorruptError:
        return CorruptError(
            f"{name} in the adapter config is wrong", path=self.path, expected=expected, found=repr(value)
        )
