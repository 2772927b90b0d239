"""Ling 2 under the `model_type` of derived models."""

from __future__ import annotations

from converters.names.megatron.architectures import bailing_moe

TABLE = bailing_moe.TABLE
