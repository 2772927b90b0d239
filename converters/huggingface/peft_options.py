"""Option `--server` of the format `peft`: the server to load the adapter."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.plan.options import option

VLLM, SGLANG = "vllm", "sglang"


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options for served adapters. `server` None means PEFT itself."""

    server: str | None = option(
        "peft: the layout that this server loads: a tensor for each expert, ranks and scalings as it reads them. What "
        "it would pass over or compute otherwise is refused.",
        choices=(VLLM, SGLANG),
    )
