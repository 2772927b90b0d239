"""Values accepted by PEFT in `adapter_config.json`.

Facts from peft 0.21.2; `tests/lora/test_entry_values.py` asks live PEFT. An unlisted entry may have any value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.base.errors import CorruptError

_TASKS = ("CAUSAL_LM", "FEATURE_EXTRACTION", "QUESTION_ANS", "SEQ_2_SEQ_LM", "SEQ_CLS", "TOKEN_CLS")


@dataclass(frozen=True)
class _Values:
    """Values of one entry: in `words`, and as a test. `entries` belong to a nested config."""

    words: str
    fits: Callable[[Any], bool]
    entries: Mapping[str, _Values] | None = None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _one_of(*values: str) -> _Values:
    return _Values(", ".join(values), lambda value: isinstance(value, str) and value in values)


def _or_null(values: _Values) -> _Values:
    return _Values(f"null, {values.words}", lambda value: value is None or values.fits(value), values.entries)


def _or_off(values: _Values) -> _Values:
    return _Values(f"null, {values.words}", lambda value: not value or values.fits(value), values.entries)


def _or_not_mapping(values: _Values) -> _Values:
    return _Values(values.words, lambda value: not isinstance(value, Mapping) or values.fits(value), values.entries)


def _filled(config: _Values) -> _Values:
    return _Values("a non-empty object", lambda value: config.fits(value) and bool(value), config.entries)


def _config(**entries: _Values) -> _Values:
    return _Values("an object", lambda value: isinstance(value, Mapping), entries)


def _closed(config: _Values) -> _Values:
    """Refuse other entries."""
    names = config.entries or {}
    words = f"an object with {', '.join(names)}"
    return _Values(words, lambda value: config.fits(value) and value.keys() <= names.keys(), names)


def _by_pattern(values: _Values) -> _Values:
    def fits(given: Any) -> bool:
        return isinstance(given, Mapping) and all(map(_compiles, given)) and all(map(values.fits, given.values()))

    return _Values(f"regular expressions, each with {values.words}", fits)


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _is_float(value: Any) -> bool:
    try:
        return isinstance(value, int | float | str) and isinstance(float(value), float)
    except ValueError:
        return False


_NUMBER = _Values("a number", _is_number)
_FLOAT = _Values("a number", _is_float)
_POSITIVE = _Values("a number above zero", lambda value: _is_number(value) and value > 0)
_NOT_NEGATIVE = _Values("a number, zero or above", lambda value: _is_number(value) and value >= 0)
_BELOW_ONE = _Values("a number from 0, below 1", lambda value: _is_number(value) and 0 <= value < 1)
_FRACTION = _Values("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
_DROPOUT = _Values("a number, 1 or below", lambda value: _is_number(value) and value <= 1)
_COUNT = _Values("an integer above zero", lambda value: type(value) is int and value > 0)
_INTEGER = _Values("an integer", lambda value: isinstance(value, int))
_SEED = _Values("an integer", lambda value: type(value) is int and -(1 << 63) <= value < 1 << 64)
_NATURAL = _Values("an integer, zero or above", lambda value: isinstance(value, int) and value >= 0)
_MAPPING = _Values("an object", lambda value: isinstance(value, Mapping))
_NAMES = _Values("a list of names or a pattern", lambda value: isinstance(value, str | list | Mapping))
_LAYERS = _Values("a layer number or a list of layer numbers", lambda value: isinstance(value, int | list | Mapping))

_BIAS = _Values(
    "none, all, or a kind's own, for example lora_only", lambda value: isinstance(value, str) and _is_bias(value)
)
_EVEN = _Values("an even integer above zero", lambda value: _COUNT.fits(value) and value % 2 == 0)
_TOKENS = _Values(
    "a list of token indices", lambda value: isinstance(value, list) and bool(value) and all(map(_INTEGER.fits, value))
)
_LIST = _Values(
    "null or a list of names",
    lambda value: isinstance(value, list | Mapping) or not (value or isinstance(value, str)),
)
_MASKS = _Values(
    "null, an object of lists",
    lambda value: (
        value is None or (isinstance(value, Mapping) and all(isinstance(one, list) for one in value.values()))
    ),
)
_FLAG = _Values("true or false", lambda value: isinstance(value, bool))
_RELEASE = _Values("a release", lambda value: isinstance(value, str) and re.match(r"v?\d", value) is not None)
#: First and last number of each family of wavelets.
_FAMILIES = {"db": (1, 38), "sym": (2, 20), "coif": (1, 17)}
_WAVELETS = frozenset(f"{name}{n}" for name, (first, last) in _FAMILIES.items() for n in range(first, last + 1))
_WAVELET = _Values(
    ", ".join(f"{name}{first} to {name}{last}" for name, (first, last) in _FAMILIES.items()),
    lambda value: isinstance(value, str) and value in _WAVELETS,
)
_FLAG_OR_TEXT = _Values("true or false", lambda value: not isinstance(value, list | Mapping))
_OFF = _Values("false", lambda value: not value)
_ANY = _Values("anything", lambda value: True)


def _is_bias(value: str) -> bool:
    return value in ("none", "all") or value.endswith("_only")


#: Entries of every kind.
_OF_ALL: Mapping[str, _Values] = {
    "task_type": _or_null(_one_of(*_TASKS)),
    "target_modules": _or_null(_NAMES),
    "exclude_modules": _or_off(_NAMES),
    "layers_to_transform": _or_null(_LAYERS),
    "layers_pattern": _or_off(_NAMES),
    "modules_to_save": _or_off(_NAMES),
    "bias": _BIAS,
    # sizes
    "r": _COUNT,
    **dict.fromkeys(("block_size", "gralora_k", "n_frequency", "num_vectors"), _COUNT),
    **dict.fromkeys(("theta_d_length", "topk", "u", "vector_length"), _COUNT),
    **dict.fromkeys(("boft_block_num", "boft_block_size", "boft_n_butterfly_factor"), _INTEGER),
    **dict.fromkeys(("decompose_factor", "oft_block_size"), _INTEGER),
    **dict.fromkeys(("depth", "hybrid_r"), _NATURAL),
    "group_size": _EVEN,
    # numbers
    **dict.fromkeys(("alpha", "boft_dropout", "d_initial", "lora_alpha", "num_cayley_neumann_terms"), _NUMBER),
    **dict.fromkeys(("psoft_alpha", "randlora_alpha", "regularization_alpha", "scaling"), _NUMBER),
    **dict.fromkeys(("init_logits_std", "init_vector_bank_bound"), _NOT_NEGATIVE),
    **dict.fromkeys(("lora_dropout", "frod_dropout", "gralora_dropout", "miss_dropout"), _DROPOUT),
    **dict.fromkeys(("psoft_dropout", "pvera_dropout", "randlora_dropout", "tinylora_dropout"), _DROPOUT),
    **dict.fromkeys(("deft_dropout", "hira_dropout", "unilora_dropout", "vblora_dropout", "vera_dropout"), _DROPOUT),
    **dict.fromkeys(("sparse_rate", "weight_tying"), _FRACTION),
    "delora_lambda": _FLOAT,
    "init_theta_d_bound": _POSITIVE,
    # seeds
    **dict.fromkeys(("projection_prng_key", "random_loc_seed"), _SEED),
    **dict.fromkeys(("generator_seed", "random_seed"), _or_null(_SEED)),
    "projection_seed": _INTEGER,
    "proj_seed": _NATURAL,
    # switches
    **dict.fromkeys(("runtime_offload_base_weight", "save_precomputed_indices", "save_projection"), _FLAG_OR_TEXT),
    # patterns of layers
    **dict.fromkeys(("alpha_pattern", "block_size_pattern", "n_frequency_pattern", "rank_pattern"), _MAPPING),
    "lambda_pattern": _by_pattern(_FLOAT),
    # choices
    "variant": _one_of("road_1", "road_2", "road_4"),
    "decomposition_method": _one_of("qr", "relu"),
    "ab_svd_init": _one_of("pissa_init", "psoft_init"),
    "psoft_svd": _one_of("full", "lowrank"),
    "wavelet_family": _WAVELET,
    "config_A_B": _one_of("constant", "lora", "none", "vector"),
    "config_C": _one_of("lora", "none", "vector"),
    "config_D_E": _one_of("constant", "none", "vector"),
}
_SAMPLED = {"dirichlet_prior": _POSITIVE, "num_samples": _POSITIVE, "buffer_size": _POSITIVE}
_MONTECLORA = _closed(_config(**_SAMPLED, use_entropy=_ANY, sample_scaler=_ANY, kl_loss_weight=_ANY))
#: AdaLoRA has them too.
_OF_LORA: dict[str, _Values] = {
    "target_parameters": _LIST,
    "arrow_config": _or_null(_filled(_config(top_k=_POSITIVE, router_temperature=_POSITIVE))),
    "corda_config": _or_null(_config()),
    "eva_config": _or_null(
        _config(rho=_Values("a number, 1 or above", lambda v: _is_number(v) and v >= 1), tau=_FRACTION)
    ),
    "kasa_config": _or_null(_config(beta=_NOT_NEGATIVE, gamma=_NOT_NEGATIVE)),
    "lora_ga_config": _or_null(_config()),
    "monteclora_config": _or_off(_MONTECLORA),
    "use_bdlora": _or_null(
        _config(nblocks=_COUNT, target_modules_bd_a=_or_off(_NAMES), target_modules_bd_b=_or_off(_NAMES))
    ),
    "velora_config": _or_null(
        _config(
            num_groups=_POSITIVE,
            scale=_POSITIVE,
            init_type=_one_of("batch_average", "batch_average_once", "random"),
        )
    ),
}
_INIT_OF_C3A = _Values(
    "true, false, gaussian, kaiming_uniform, xavier_uniform",
    lambda value: value is True or value in (False, "gaussian", "kaiming_uniform", "xavier_uniform"),
)
_INIT_OF_HIRA = _Values(
    "true, false, gaussian",
    lambda value: not value or value is True or (isinstance(value, str) and value.lower() == "gaussian"),
)
_FACTOR = _Values("an integer other than 0", lambda value: type(value) is int and value != 0)
#: transformers 5.23 (`activations.py`).
_ACTIVATION = _one_of(
    *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh"),
    *("gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "prelu", "quick_gelu"),
    *("relu", "relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh", "xielu"),
)
#: Entries that one kind reads in another way.
_BY_KIND: Mapping[str, Mapping[str, _Values]] = {
    "LORA": _OF_LORA,
    "ADALORA": _OF_LORA
    | {"r": _ANY, "init_r": _COUNT, "rank_pattern": _MASKS, "alpha_pattern": _or_off(_NAMES), "use_dora": _OFF}
    | {"orth_reg_weight": _NOT_NEGATIVE, "tfinal": _NUMBER, "tinit": _NUMBER, "total_step": _POSITIVE}
    | {"arrow_config": _or_null(_MAPPING), "monteclora_config": _or_not_mapping(_MONTECLORA)},
    "BOFT": {"init_weights": _FLAG},
    "C3A": {"init_weights": _INIT_OF_C3A},
    "DEFT": {"alpha": _or_off(_NUMBER)},
    "DELORA": {"module_dropout": _DROPOUT},
    "HIRA": {"init_weights": _INIT_OF_HIRA},
    "LOHA": {"alpha_pattern": _by_pattern(_NUMBER)},
    "LOKR": {"alpha_pattern": _by_pattern(_NUMBER), "decompose_factor": _FACTOR},
    "OFT": {"r": _INTEGER, "module_dropout": _NUMBER, "init_weights": _FLAG, "peft_version": _RELEASE},
    "OSF": {"effective_rank": _or_null(_POSITIVE), "rank_pattern": _or_off(_by_pattern(_POSITIVE))},
    "PEANUT": {"act_fn": _ACTIVATION},
    "SUPERTUNING": {"r": _or_null(_COUNT), "lora_alpha": _or_null(_NUMBER), "lora_dropout": _BELOW_ONE}
    | {"select_top": _FLAG, "sparsity": _BELOW_ONE},
    "TRAINABLE_TOKENS": {"token_indices": _TOKENS},
    "UNILORA": {"unilora_dropout": _FRACTION},
}
_REFUSED_DEFAULTS: Mapping[str, Mapping[str, Any]] = {"ADALORA": {"total_step": None}}
#: Kinds whose `target_modules` may not be a pattern together with `layers_to_transform`.
_LISTS_LAYERS = (
    "ADALORA",
    "C3A",
    "DEFT",
    "DELORA",
    "FOURIERFT",
    "HIRA",
    "HRA",
    "LORA",
    "MISS",
    "PSOFT",
    "UNILORA",
    "WAVEFT",
)
#: One of the two is zero.
_ONE_SIZE = {"BOFT": ("boft_block_size", "boft_block_num"), "OFT": ("r", "oft_block_size")}
#: Kinds with a `layers_pattern` that needs `layers_to_transform`.
_TAKES_LAYERS = (
    *("ADALORA", "BOFT", "DEFT", "DELORA", "FOURIERFT", "FROD", "HRA", "LOHA", "LOKR", "LORA", "OFT", "PEANUT"),
    *("PSOFT", "PVERA", "TINYLORA", "VBLORA", "VERA", "WAVEFT"),
)


#: Entry that PEFT only reads if another one is on.
_READ_IF = {"PSOFT": {"num_cayley_neumann_terms": "use_cayley_neumann"}}


def known(kind: str) -> frozenset[str]:
    return frozenset(_of_kind(kind))


def _of_kind(kind: str) -> Mapping[str, _Values]:
    return {**_OF_ALL, **_BY_KIND.get(kind, {})}


def check(raw: Mapping[str, Any], path: object) -> None:
    """Raise CorruptError if the config has a value that PEFT does not load."""
    kind = str(raw.get("peft_type"))
    given = {**_REFUSED_DEFAULTS.get(kind, {}), **raw}
    idle = {entry for entry, switch in _READ_IF.get(kind, {}).items() if not raw.get(switch)}
    given = {entry: value for entry, value in given.items() if entry not in idle}
    for entry, value, expected in _faults(given, _of_kind(kind)):
        raise CorruptError(
            f"{entry} in the adapter config is wrong", path=str(path), expected=expected, found=repr(value)
        )
    for message, entries in _contradictions(raw):
        raise CorruptError(
            f"the adapter's config is wrong: {message}",
            path=str(path),
            found=", ".join(f"{entry}: {raw[entry]!r}" for entry in entries if entry in raw),
        )


def _faults(raw: Mapping[str, Any], known: Mapping[str, _Values], within: str = "") -> Iterator[tuple[str, Any, str]]:
    for entry, values in known.items():
        if entry not in raw:
            continue
        value = raw[entry]
        if not values.fits(value):
            yield within + entry, value, values.words
        elif values.entries and isinstance(value, Mapping):
            yield from _faults(value, values.entries, f"{within}{entry}.")


#: Entries that PEFT refuses for parameters (0.21, `lora/layer.py`, `ParamWrapper`).
_NOT_OF_PARAMETERS = ("lora_dropout", "fan_in_fan_out", "lora_bias", "use_dora", "velora_config", "kasa_config")


def _contradictions(raw: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    kind, layers = raw.get("peft_type"), raw.get("layers_to_transform")
    if kind in _TAKES_LAYERS and raw.get("layers_pattern") and layers is None:
        yield "layers_pattern needs layers_to_transform", ("layers_pattern", "layers_to_transform")
    for entry in ("layers_to_transform", "layers_pattern"):
        if kind in _LISTS_LAYERS and isinstance(raw.get("target_modules"), str) and raw.get(entry) is not None:
            yield f"{entry} needs a list in target_modules", ("target_modules", entry)
    if raw.get("lora_bias") and (raw.get("use_dora") or raw.get("init_lora_weights", True) not in (True, False)):
        yield "lora_bias works with neither DoRA nor another init", ("lora_bias", "use_dora", "init_lora_weights")
    if kind == "LORA" and raw.get("target_parameters"):
        for entry in filter(raw.get, _NOT_OF_PARAMETERS):
            yield f"{entry} works with no target_parameters", ("target_parameters", entry)
    if kind == "SUPERTUNING" and raw.get("lora_alpha") is not None and raw.get("r") is None:
        yield "lora_alpha needs r", ("lora_alpha", "r")
    sizes = _ONE_SIZE.get(str(kind), ())
    if sizes and sum(bool(raw.get(entry)) for entry in sizes) != 1:
        yield f"only one of {' and '.join(sizes)} is zero", sizes
