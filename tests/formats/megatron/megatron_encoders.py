"""Bert and T5 from megatron-core in both formats: `python -m tests.formats.megatron.megatron_encoders FOLDER`."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from train.megatron.cpu import on_this_machine
from train.megatron.files import TRACKER

_SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with on_this_machine():
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.models.bert import bert_model
        from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
        from megatron.core.transformer.transformer_config import TransformerConfig

        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        config = TransformerConfig(**_SIZES)
        sizes: dict[str, Any] = {"vocab_size": 32, "max_sequence_length": 8}
        for name, has_pairs in (("bert", True), ("bert-one-head", False)):
            more = sizes | {"share_embeddings_and_output_weights": True, "add_binary_head": has_pairs}
            _save(bert_model.BertModel(config, 2, bert_layer_local_spec, **more), folder / name)
        _save(_t5(config, "learned_absolute"), folder / "t5")
        tokens, mask = torch.ones(1, 8, dtype=torch.long), torch.zeros(1, 1, 8, 8, dtype=torch.bool)
        try:
            _t5(config, "relative")(tokens, tokens, mask, mask, mask)
        except AssertionError as error:
            (folder / "relative").write_text(str(error))


def _t5(config: Any, positions: str) -> Any:
    from megatron.core.models.T5 import t5_model, t5_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    specs = t5_spec.encoder_model_with_local_spec(), t5_spec.decoder_model_with_local_spec()
    blocks = [TransformerBlockSubmodules([spec] * config.num_layers, layer_norm=t5_spec.LNImpl) for spec in specs]
    sizes: dict[str, Any] = {"vocab_size": 32, "max_sequence_length": 8, "position_embedding_type": positions}
    return t5_model.T5Model(config, config, *blocks, **sizes)


def _save(model: Any, folder: Path) -> None:
    """Save like Megatron-LM."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy

    sizes = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "padded_vocab_size": 32}
    common = {"args": Namespace(**_SIZES, **sizes), "checkpoint_version": 3.0, "iteration": 1}
    for name, place in (("torch", "iter_0000001/mp_rank_00"), ("torch_dist", "iter_0000001")):
        (folder / name / place).mkdir(parents=True)
        (folder / name / TRACKER).write_text("1")
    state = common | {"model": model.state_dict_for_save_checkpoint()}
    torch.save(state, folder / "torch/iter_0000001/mp_rank_00/model_optim_rng.pt")
    strategy = get_default_save_sharded_strategy("torch_dist")
    sharded = common | {"model": model.sharded_state_dict()}
    dist_checkpointing.save(sharded, str(folder / "torch_dist/iter_0000001"), strategy)


if __name__ == "__main__":
    main()
