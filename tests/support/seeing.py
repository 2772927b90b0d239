"""Megatron-Bridge's Qwen2.5-VL: while `sees` is open, the trainer's megatron-core also has a trained tower."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch

from train.megatron import engine
from train.truth import megatron as megatron_truth

_LANGUAGE = "language_model."


@contextlib.contextmanager
def sees(sizes: Mapping[str, Any]) -> Iterator[None]:
    """While open, let the trainer's megatron-core engine build models with a tower of these sizes."""
    make, build, name = engine.megatron_args.arguments, engine.build_chunks, megatron_truth.canonical

    def arguments(*given: Any) -> Namespace:
        found = make(*given)
        positions = {"position_embedding_type": "mrope", "mrope_section": [1, 1, 1]}
        vars(found).update(positions, untie_embeddings_and_output_weights=True)
        return found

    def canonical(chunk: Any, own: str) -> str:
        return name(chunk.language_model, own.removeprefix(_LANGUAGE)) if own.startswith(_LANGUAGE) else own

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(engine.megatron_args, "arguments", arguments))
        stack.enter_context(
            mock.patch.object(engine, "build_chunks", lambda *given: [_seeing(one, sizes) for one in build(*given)])
        )
        stack.enter_context(mock.patch.object(megatron_truth, "canonical", canonical))
        yield


def _seeing(language_model: Any, sizes: Mapping[str, Any]) -> Any:
    from megatron.core import tensor_parallel
    from megatron.core.transformer.module import MegatronModule
    from transformers import AutoConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    class Seeing(MegatronModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(language_model.config)
            for name in ("model_type", "pre_process", "post_process"):
                setattr(self, name, getattr(language_model, name))
            self.share_embeddings_and_output_weights, self.mtp_process = False, False
            if self.pre_process:
                own = {**sizes, "out_hidden_size": language_model.config.hidden_size}
                vision = AutoConfig.for_model("qwen2_5_vl", vision_config=own).vision_config
                self.visual = Qwen2_5_VisionTransformerPretrainedModel._from_config(vision)
                generator, side = torch.Generator().manual_seed(0), 2 * vision.spatial_merge_size
                size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
                self.seen = torch.randn(side * side, size, generator=generator), torch.tensor([[1, side, side]])
                for parameter in self.visual.parameters():
                    tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
            self.language_model = language_model

        def set_input_tensor(self, tensor: Any) -> None:
            self.language_model.set_input_tensor(tensor)

        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **more: Any) -> torch.Tensor:
            if self.pre_process:
                image = self.visual(self.seen[0], grid_thw=self.seen[1]).pooler_output
                text = self.language_model.embedding(input_ids=input_ids, position_ids=position_ids)
                more["decoder_input"] = torch.cat([text[: len(image)] + image[:, None], text[len(image) :]])
            positions = position_ids.expand(3, *position_ids.shape)
            found: torch.Tensor = self.language_model(input_ids=input_ids, position_ids=positions, **more)
            return found

    return Seeing()
