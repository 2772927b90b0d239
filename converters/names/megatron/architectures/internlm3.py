"""InternLM 3: Llama under another `model_type`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import llama
from converters.names.megatron.args import gated

TABLE = replace(llama.TABLE, family=FAMILIES["internlm3"], args=partial(gated, slides=False, epsilon=1e-5))
