"""Mistral: Llama's names, with a sliding window in the first releases."""

from __future__ import annotations

from dataclasses import replace

from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import llama
from converters.names.megatron.args import gated

TABLE = replace(llama.TABLE, family=FAMILIES["mistral"], args=gated)
