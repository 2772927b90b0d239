"""Options for Megatron targets, named like Megatron-LM's own arguments (August 2026)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ckpt.plan.options import MAX_SIZE, option

TORCH_DIST, TORCH_DCP, FSDP_DTENSOR = "torch_dist", "torch_dcp", "fsdp_dtensor"
#: NeMo 2's folder: `torch_dist` inside another folder.
NEMO = "nemo"


@dataclass(frozen=True)
class DistOptions:
    about: ClassVar[str] = "Megatron's distributed formats"

    ckpt_format: str | None = option(
        "File layout: torch_dcp for torch's FSDP2, fsdp_dtensor for Megatron-FSDP, nemo for NeMo 2 (with its "
        "context in --config). [default: torch_dist]",
        choices=(TORCH_DIST, TORCH_DCP, FSDP_DTENSOR, NEMO),
    )


@dataclass(frozen=True)
class MegatronOptions:
    """Sizes of Megatron's parallel axes, pipeline stages, and the layer implementation.

    A size None is the source's, or 1. The source's stages are kept if they still fit; otherwise stages are even.
    """

    about: ClassVar[str] = "Megatron's parallel axes"

    tp: int | None = option("Tensor parallel size.", min=1, max=MAX_SIZE)
    pp: int | None = option("Pipeline parallel size.", min=1, max=MAX_SIZE)
    ep: int | None = option("Expert parallel size.", min=1, max=MAX_SIZE)
    vpp: int | None = option("Virtual pipeline size: model chunks on each pipeline rank.", min=1, max=MAX_SIZE)
    etp: int | None = option("Expert tensor parallel size. [default: same as --tp]", min=1, max=MAX_SIZE)
    decoder_first_pipeline_num_layers: int | None = option(
        "Layers in the first pipeline stage, if stages differ.", min=1
    )
    decoder_last_pipeline_num_layers: int | None = option("Layers in the last pipeline stage, if stages differ.", min=1)
    account_for_embedding_in_pipeline_split: bool = option(
        "Count the embedding as a layer in the first stage.", default=False
    )
    account_for_loss_in_pipeline_split: bool = option("Count the loss as a layer in the last stage.", default=False)
    pipeline_model_parallel_layout: str | None = option(
        "Pipeline stages in Megatron's notation, for example 'Et*3|t*4|t*3L'.", metavar="LAYOUT"
    )
    transformer_impl: str | None = option(
        "Layer implementation, if tensor names depend on it. [default: the source's, or transformer_engine]",
        choices=("local", "transformer_engine"),
    )
    make_vocab_size_divisible_by: int | None = option(
        "Pad the vocabulary to a multiple of this number times --tp. [default: 128]", min=1, max=1 << 20
    )
