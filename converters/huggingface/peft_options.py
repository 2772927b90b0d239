"""Option `--server` of the format `peft`: the server to load the adapter."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.plan.options import option

VLLM, SGLANG = "vllm", "sglang"


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options for served adapters. `server` None means PEFT itself."""

    server: str | None = option(
        "peft: write the layout for this server: one tensor per expert, with ranks and scalings for the server. "
        "Tensors that the server would ignore or misread are refused.",
        choices=(VLLM, SGLANG),
    )
