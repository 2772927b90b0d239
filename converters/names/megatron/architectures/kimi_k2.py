"""Kimi K2: DeepSeek-V3 under another `model_type`."""

from __future__ import annotations

from converters.names.megatron.architectures import deepseek_v3

TABLE = deepseek_v3.TABLE
