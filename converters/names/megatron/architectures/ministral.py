"""Ministral: Mistral's names, with a sliding window in the layers that the config lists."""

from __future__ import annotations

from dataclasses import replace

from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import llama
from converters.names.megatron.args import gated

TABLE = replace(llama.TABLE, family=FAMILIES["ministral"], args=gated)
