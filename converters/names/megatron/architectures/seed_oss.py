"""Seed-OSS: Llama's names, and biases of queries, keys and values."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import llama
from converters.names.megatron.args import gated

TABLE = replace(llama.TABLE, family=FAMILIES["seed_oss"], args=partial(gated, slides=False))
