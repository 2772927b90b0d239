"""Sizes in both an adapter's config and its tensors.

Facts from peft 0.21.2 (`tuners/*/layer.py`); `tests/lora/test_entry_values.py` compares with live PEFT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import isqrt
from typing import Any

from ckpt.adapters.config import KINDS, AdapterConfig
from ckpt.adapters.names import PREFIX
from ckpt.adapters.targets import matches
from ckpt.base.errors import CorruptError
from ckpt.plan.tensors import Shape

#: Entry, value in the config, and size in the tensor.
_Pairs = Iterator[tuple[str, Any, Any]]
_Pair = Callable[[AdapterConfig, str, Shape], _Pairs]

#: Prefix of tensor names, by kind.
_PREFIXES = {kind: f"{kind.lower()}_" for kind in KINDS} | {"ADALORA": "lora_", "LOHA": "hada_"}
_PATTERNS = {"r": "rank_pattern", "n_frequency": "n_frequency_pattern", "block_size": "block_size_pattern"}


def _axes(**axes: int) -> _Pair:
    """Return a reader of entries with sizes along these axes."""

    def pairs(config: AdapterConfig, module: str, shape: Shape) -> _Pairs:
        for entry, axis in axes.items():
            if axis < len(shape):
                yield entry, _value(config, entry, module), shape[axis]

    return pairs


def _value(config: AdapterConfig, entry: str, module: str) -> Any:
    patterns = config.raw.get(_PATTERNS.get(entry, ""))
    found = config.raw.get(entry)
    return config.of_pattern(patterns, module, found) if isinstance(patterns, Mapping) else found


def _unless(condition: Callable[[Mapping[str, Any]], Any], pair: _Pair) -> _Pair:
    return lambda config, module, shape: iter(()) if condition(config.raw) else pair(config, module, shape)


def _of_deft(config: AdapterConfig, module: str, shape: Shape) -> _Pairs:
    """DEFT's rank is at most the layer's number of outputs."""
    rank = config.raw.get("r")
    yield "r", min(rank, shape[0]) if isinstance(rank, int) else rank, shape[1]


def _of_oft(config: AdapterConfig, module: str, shape: Shape) -> _Pairs:
    """Yield pairs of OFT: `r` blocks, or one if they are shared. PEFT takes other sizes if these do not fit."""
    if config.raw.get("block_share"):
        yield "block_share", 1, shape[0]
        return
    sizes = {"r": shape[0], "oft_block_size": (1 + isqrt(1 + 8 * shape[1])) // 2}
    for entry, size in sizes.items():
        wanted = config.raw.get(entry)
        if wanted and (sizes["r"] * sizes["oft_block_size"]) % wanted == 0:
            yield entry, wanted, size


def _of_miss(config: AdapterConfig, module: str, shape: Shape) -> _Pairs:
    """Yield pairs of MiSS: blocks of `r` rows and columns, or rows as wide as `mini_r`, or else as the layer."""
    init = config.raw.get("init_weights", True)
    yield "init_weights", init, init if (init == "bat") == (len(shape) == 3) else "bat" if len(shape) == 3 else True
    yield "r", config.raw.get("r"), shape[-2]
    if init == "mini":
        yield "mini_r", config.raw.get("mini_r"), shape[-1]


def _of_ia3(config: AdapterConfig, module: str, shape: Shape) -> _Pairs:
    """Yield pairs of IA3: a row for a linear layer's inputs, a column for its outputs."""
    if len(shape) == 2 and shape[0] != shape[1] and config.raw.get("feedforward_modules") is not None:
        yield "feedforward_modules", matches(config.raw["feedforward_modules"], module), shape[0] == 1


def _of_tokens(config: AdapterConfig, module: str, shape: Shape) -> _Pairs:
    tokens = config.raw.get("token_indices")
    if isinstance(tokens, list):
        yield "token_indices", len(tokens), shape[0]


#: WaveFT's tensor in each layer, and its entry for more frequencies in larger layers.
SPECTRUM, PROPORTIONAL = "waveft_spectrum", "proportional_parameters"
#: Default of `n_frequency`.
_FREQUENCIES = 2592
#: By kind and by the tensor's name.
_PAIRS: Mapping[str, Mapping[str, _Pair]] = {
    "ADALORA": {"lora_E": _unless(lambda raw: raw.get("rank_pattern"), _axes(init_r=0))},
    "BOFT": {"boft_R": _axes(boft_n_butterfly_factor=0, boft_block_num=1, boft_block_size=2)},
    "C3A": {"c3a_kernel": _axes(block_size=2)},
    "DEFT": {"deft_P": _of_deft},
    "DELORA": {"delora_A": _axes(r=0)},
    "FOURIERFT": {"fourierft_spectrum": _axes(n_frequency=0)},
    "GLORA": {f"glora_{one}.Xd": _axes(r=1) for one in "AB"},
    "GRALORA": {"gralora_A": _axes(gralora_k=0, r=2), "gralora_A_general.weight": _axes(hybrid_r=0)},
    "HIRA": {"hira_A": _axes(r=0)},
    "HRA": {"hra_u": _axes(r=1)},
    "IA3": {"ia3_l": _of_ia3},
    "LOHA": {"hada_w1_b": _axes(r=0)},
    "LOKR": {"lokr_w1_b": _axes(r=0), "lokr_w2_b": _axes(r=0)},
    "MISS": {"miss_block": _of_miss},
    "OFT": {"oft_R.weight": _of_oft},
    "PEANUT": {"peanut_A.weight": _axes(r=0)},
    "PSOFT": {"psoft_R.vector_a": _axes(r=0)},
    "PVERA": {"pvera_B": _axes(r=1)},
    "RANDLORA": {"randlora_lambda": _axes(r=0)},
    "TINYLORA": {"tinylora_v.0": _axes(u=0)},
    "TRAINABLE_TOKENS": {"trainable_tokens_delta": _of_tokens},
    "UNILORA": {"unilora_theta_d": _axes(theta_d_length=0)},
    "VBLORA": {"vblora_vector_bank": _axes(num_vectors=0, vector_length=1), "vblora_logits_A": _axes(r=0)},
    "VERA": {"vera_lambda_d": _axes(r=0)},
    "WAVEFT": {SPECTRUM: _unless(lambda raw: raw.get(PROPORTIONAL), _axes(n_frequency=0))},
}


#: Prefix of tensors that an entry adds to a layer, by kind. `{last}` is one less than the entry's value.
_ADDED: Mapping[str, Mapping[str, str]] = {
    "GRALORA": {"hybrid_r": "gralora_A_general."},
    "PEANUT": {"depth": "peanut_encoders.{last}."},
    "SUPERTUNING": {"r": "supertuning_lora_A."},
    "UNILORA": {"save_indices": "unilora_indices_A"},
}


def place(kind: str, fqn: str) -> tuple[str, str] | None:
    """Return a tensor's layer and name. Shared tensors have no layer."""
    prefix = _PREFIXES.get(kind)
    parts = fqn.removeprefix(PREFIX).split(".")
    at = next((at for at, part in enumerate(parts) if prefix and part.startswith(prefix)), None)
    if at is None:
        return None
    module = "" if not fqn.startswith(PREFIX) else ".".join(parts[:at]).removesuffix(".token_adapter")
    return module, ".".join(parts[at:])


def check(config: AdapterConfig, shapes: Mapping[str, Shape], path: str) -> None:
    """Raise CorruptError if a tensor contradicts the config. LoRA has its own checks."""
    readers = _PAIRS.get(config.kind, {})
    _check_added(config, shapes, path)
    for fqn, shape in shapes.items():
        module, name = place(config.kind, fqn) or ("", "")
        for entry, wanted, found in readers[name](config, module, shape) if name in readers else ():
            if (wanted or wanted is False) and wanted != found:
                raise CorruptError(
                    f"the adapter's config and weights disagree about {entry}",
                    path=path,
                    fqn=fqn,
                    expected=f"{entry} {wanted}, from {config.path}",
                    found=f"{entry} {found}, by shape {list(shape)}",
                )


def _check_added(config: AdapterConfig, shapes: Mapping[str, Shape], path: str) -> None:
    names = [found[1] for found in (place(config.kind, fqn) for fqn in shapes) if found]
    for entry, form in _ADDED.get(config.kind, {}).items():
        value = config.raw.get(entry)
        prefix = form.format(last=value - 1 if isinstance(value, int) else 0)
        if value and not any(name.startswith(prefix) for name in names):
            raise CorruptError(
                f"the adapter's config and weights disagree about {entry}",
                path=path,
                expected=f"tensors named {prefix}*, as {entry} {value!r} of {config.path} says",
                found="none",
            )


def check_shares(config: AdapterConfig, shapes: Mapping[str, Shape], sizes: Mapping[str, int], path: str) -> None:
    """Raise CorruptError if WaveFT's frequencies do not follow the layers' sizes.

    See peft 0.21.2 (`tuners/waveft/model.py`).
    """
    if config.kind != "WAVEFT" or not config.raw.get(PROPORTIONAL):
        return
    budget, total = config.raw.get("n_frequency", _FREQUENCIES) * len(sizes), sum(sizes.values())
    for fqn, shape in shapes.items():
        module, name = place(config.kind, fqn) or ("", "")
        if name != SPECTRUM or module not in sizes:
            continue
        wanted = max(1, round(sizes[module] / total * budget))
        if shape[0] != wanted:
            raise CorruptError(
                f"the adapter's config and weights disagree about {PROPORTIONAL}",
                path=path,
                fqn=fqn,
                expected=f"{wanted} frequencies, by the layer's share of all weights",
                found=f"{shape[0]} frequencies",
            )
