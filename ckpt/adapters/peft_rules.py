"""PEFT's rules for `rank_pattern` and `alpha_pattern`, which differ between releases.

Facts from the sources of peft 0.8.2 to 0.21.2 (`tuners/lora/model.py`, `tuners/loha/model.py`, `tuners/lokr/model.py`,
`utils/other.py`):

- LoRA before 0.14 finds the first matching pattern in both entries, and uses it for both values.
- LoRA in 0.14 finds one in each entry. As before, a dot precedes the pattern, without brackets around it.
- Since 0.15 the pattern is in brackets, and nothing must precede it.
- LoHa and LoKr change once, in 0.15; before, the dot is optional and the brackets are missing.

`peft_version` is recorded since 0.18. An older config is dated by its entries, because PEFT writes all it knows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

from ckpt.base.errors import CorruptError, UsageError
from ckpt.base.words import Keyword, Message

_LATEST = 99
#: LoRA config entries, by the minor release that added them.
_SINCE: Mapping[int, frozenset[str]] = {
    9: frozenset(("use_dora",)),
    10: frozenset(("layer_replication",)),
    14: frozenset(("eva_config", "exclude_modules", "lora_bias")),
    15: frozenset(("corda_config", "trainable_token_indices")),
    16: frozenset(("qalora_group_size", "use_qalora")),
    17: frozenset(("target_parameters",)),
    18: frozenset(("alora_invocation_tokens", "arrow_config", "ensure_weight_tying", "peft_version")),
    19: frozenset(("lora_ga_config", "use_bdlora")),
    20: frozenset(("monteclora_config", "velora_config")),
    21: frozenset(("kasa_config",)),
}
#: The same for other configs.
_SINCE_OTHERS: Mapping[int, frozenset[str]] = {14: frozenset(("exclude_modules",)), 18: frozenset(("peft_version",))}
#: Entries in every config with patterns since PEFT 0.8.
_OF_OTHERS = frozenset(
    (
        *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "inference_mode", "layers_pattern"),
        *("layers_to_transform", "modules_to_save", "peft_type", "r", "rank_pattern", "revision", "target_modules"),
        "task_type",
    )
)
_OF_LORA = _OF_OTHERS | frozenset(
    (
        *("bias", "fan_in_fan_out", "init_lora_weights", "loftq_config", "lora_alpha", "lora_dropout"),
        *("megatron_config", "megatron_core", "use_rslora"),
    )
)
_ALPHAS = {"LORA": "lora_alpha", "LOHA": "alpha", "LOKR": "alpha"}
_PATTERNS = ("rank_pattern", "alpha_pattern")
_TODAY = "0.15 and later"
#: The pattern to use in each entry, or the layer's own name.
_Rule = Callable[[Mapping[str, Any], Mapping[str, Any], str], tuple[str, str]]


def release_of(raw: Mapping[str, Any]) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", str(raw.get("peft_version")))
    return (int(found[1]), int(found[2])) if found else None


def with_explicit_patterns(
    raw: Mapping[str, Any], path: str | PathLike[str], ranks: Mapping[str, int], *, option: str = ""
) -> Mapping[str, Any]:
    """Return `raw` with patterns that every release reads alike.

    `ranks` holds the adapted layers' ranks, from their factors. Raise UsageError if the release is unknown and the
    rules differ for these layers.
    """
    alpha, patterns = _ALPHAS.get(str(raw.get("peft_type"))), [raw.get(entry) for entry in _PATTERNS]
    if alpha is None or not any(patterns) or not all(one is None or isinstance(one, Mapping) for one in patterns):
        return raw
    by_rank, by_alpha = (one or {} for one in patterns)
    try:
        found = [
            (since, {layer: _values(raw, alpha, rule(by_rank, by_alpha, layer)) for layer in ranks})
            for since, rule in _rules(raw)
        ]
    except re.error as error:
        raise CorruptError("a pattern in the adapter config is not a regular expression", path=path) from error
    fitting = [(since, one) for since, one in found if all(one[layer][0] == rank for layer, rank in ranks.items())]
    possible = fitting or found
    values = possible[0][1]
    if differing := [layer for layer in ranks if any(one[layer] != values[layer] for _, one in possible)]:
        words = "; ".join(f"{since}: {one[differing[0]][1]:g}" for since, one in possible)
        hint = 'write peft_version into a copy of adapter_config.json: "0.13.2" for 0.13 and older, "0.14.0", or '
        hint += '"0.15.2" for 0.15 to 0.17'
        if option:
            older, middle, later = (Keyword(option, release) for release in ("0.13", "0.14", "0.15"))
            hint = Message("{} for PEFT 0.13 and older, {}, or {} for later ones; or {}", older, middle, later, hint)
        raise UsageError(
            "the adapter's PEFT release is not recorded, and releases read rank_pattern and alpha_pattern differently",
            path=str(path),
            fqn=differing[0],
            expected="peft_version, or every entry PEFT writes",
            found=f"this layer's alpha by the rules in PEFT {words}",
            hint=hint,
        )
    if len(found) == 1 and found[0][0] == _TODAY:
        return raw
    longest_first = sorted(ranks, key=lambda layer: (-len(layer), layer))
    entries = {entry: {layer: values[layer][at] for layer in longest_first} for at, entry in enumerate(_PATTERNS)}
    return {**raw, **entries}


def _values(raw: Mapping[str, Any], alpha: str, keys: tuple[str, str]) -> tuple[Any, Any]:
    rank = (raw.get("rank_pattern") or {}).get(keys[0], raw.get("r", 8))
    return rank, (raw.get("alpha_pattern") or {}).get(keys[1], raw.get(alpha, 8))


def _rules(raw: Mapping[str, Any]) -> list[tuple[str, _Rule]]:
    if raw.get("peft_type") == "LORA":
        older = [(0, 13, "0.13 and older", _joint(r".*\.{}$")), (14, 14, "0.14", _apart(r".*\.{}$"))]
    else:
        older = [(0, 14, "0.14 and older", _joint(r"(.*\.)?{}$"))]
    first, last = _release_range(raw)
    rules = [*older, (15, _LATEST, _TODAY, _apart(r"(.*\.)?({})$"))]
    return [(words, rule) for since, until, words, rule in rules if since <= last and first <= until]


def _release_range(raw: Mapping[str, Any]) -> tuple[int, int]:
    recorded = release_of(raw)
    if recorded is not None:
        minor = recorded[1] if recorded[0] == 0 else _LATEST
        return minor, minor
    is_lora = raw.get("peft_type") == "LORA"
    since, of_all = (_SINCE, _OF_LORA) if is_lora else (_SINCE_OTHERS, _OF_OTHERS)
    first = max((minor for minor, entries in since.items() if entries & raw.keys()), default=0)
    is_complete = of_all | since.get(first, frozenset()) <= raw.keys()
    later = [minor for minor in since if minor > first]
    return first, min(later) - 1 if is_complete and later else _LATEST


def _joint(form: str) -> _Rule:
    def keys(by_rank: Mapping[str, Any], by_alpha: Mapping[str, Any], layer: str) -> tuple[str, str]:
        key = next((one for one in (*by_rank, *by_alpha) if re.match(form.format(one), layer)), layer)
        return key, key

    return keys


def _apart(form: str) -> _Rule:
    def keys(by_rank: Mapping[str, Any], by_alpha: Mapping[str, Any], layer: str) -> tuple[str, str]:
        rank, alpha = (
            next((one for one in of if re.match(form.format(one), layer)), layer) for of in (by_rank, by_alpha)
        )
        return rank, alpha

    return keys
