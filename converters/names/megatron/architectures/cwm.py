"""Code World Model: Llama's names, with a sliding window in layers listed in the config."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import llama
from converters.names.megatron.args import gated

TABLE = replace(llama.TABLE, family=FAMILIES["cwm"], args=partial(gated, base=1e6, listed=True, epsilon=1e-5))
