"""`converters/names/families/config.py`: ckpt knows every config entry read by transformers' models."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from tests.support.places import REPOSITORY

_HOME = REPOSITORY / "converters" / "names"
ROWS = sorted(path.stem for path in (_HOME / "megatron" / "architectures").glob("[a-z]*.py"))
#: Entries without effect on the language model's result for the same weights, with the reason.
HARMLESS = {
    **dict.fromkeys(
        ("use_cache", "output_attentions", "output_hidden_states", "return_dict", "use_return_dict"), "outputs"
    ),
    **dict.fromkeys(("output_router_logits", "router_aux_loss_coef", "num_logits_to_keep", "problem_type"), "outputs"),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"), "training"),
    **dict.fromkeys(("classifier_dropout", "embedding_dropout", "projection_dropout", "residual_dropout"), "training"),
    **dict.fromkeys(("hidden_dropout_prob", "router_jitter_noise", "gradient_checkpointing"), "training"),
    **dict.fromkeys(("initializer_range", "embedding_initializer_range", "layer_scale_init_value"), "first values"),
    **dict.fromkeys(("rescale_prenorm_residual", "time_step_floor", "time_step_max", "time_step_min"), "first values"),
    **dict.fromkeys(("chunk_size_feed_forward", "chunk_size", "use_mamba_kernels"), "how it is computed"),
    **dict.fromkeys(("reorder_and_upcast_attn", "scale_attention_softmax_in_fp32"), "how it is computed"),
    **dict.fromkeys(("enable_moe_fp32_combine", "_attn_implementation"), "how it is computed"),
    **dict.fromkeys(("summary_type", "summary_activation", "summary_use_proj"), "a head for classes"),
    **dict.fromkeys(("summary_first_dropout", "summary_last_dropout", "summary_proj_to_labels"), "a head for classes"),
    **dict.fromkeys(("projector_hidden_act", "image_grid_pinpoints", "fullatt_block_indexes"), "a vision tower"),
    **dict.fromkeys(("projector_patch_to_query_dict", "max_value_projector_patch_to_query_dict"), "a vision tower"),
    **dict.fromkeys(("get", "to_dict", "get_text_config"), "functions"),
    "sliding_window_pattern": "EXAONE's: `layer_types` is made of it when the config is loaded",
}


@pytest.fixture(scope="module")
def known() -> set[str]:
    """Return the words in the sources of the tables and config rules."""
    return {word for path in _HOME.rglob("*.py") for word in re.findall(r"\w+", path.read_text())}


def source(architecture: str) -> Path | None:
    """Return the source file of transformers' model, or None if it is remote code."""
    if architecture not in CONFIG_MAPPING:
        return None
    found = find_spec(CONFIG_MAPPING[architecture].__module__.replace("configuration", "modeling"))
    return Path(found.origin) if found and found.origin else None


SOURCES = {architecture: path for architecture in ROWS if (path := source(architecture))}


@pytest.mark.parametrize("architecture", SOURCES)
def test_every_entry_that_the_model_reads_is_known(architecture: str, known: set[str]) -> None:
    text = SOURCES[architecture].read_text()
    entries = {*re.findall(r"config\.(\w+)", text), *re.findall(r'getattr\((?:self\.)?config, "(\w+)"', text)}
    assert len(entries) > 3
    assert sorted(entries - known - HARMLESS.keys()) == []
