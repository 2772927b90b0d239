"""The option `--server` of the format `peft`: who is to load the adapter."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.plan.options import option

VLLM, SGLANG = "vllm", "sglang"


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """`server`: None is PEFT itself."""

    server: str | None = option(
        "peft: the layout that this server loads: a tensor for each expert, ranks and scalings as it reads them. What "
        "it would pass over or compute otherwise is refused.",
        choices=(VLLM, SGLANG),
    )
