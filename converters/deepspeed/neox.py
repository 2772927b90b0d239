"""GPT-NeoX without a pipeline (`pipe_parallel_size` 0): tensor-parallel ranks with separate files.

The model is the pipeline's layers in a row, `sequential.N.` plus layer N's own names (EleutherAI/gpt-neox:
megatron/model/gpt2_model.py, `to_sequential`; megatron/model/utils.py, `SequentialWrapper`). The sharding is not
recorded: it follows from the names, and the sizes in the run's arguments prove it (megatron/checkpointing.py,
`save_ds_checkpoint`). With a parallel residual, the ranks' biases in row-parallel layers are summed
(tools/ckpts/convert_neox_to_hf.py does the same); otherwise they are equal (megatron/model/transformer.py,
`ParallelTransformerLayer.forward`). Only the Hub's config tells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError, LossError
from ckpt.base.text import pluralize
from ckpt.base.words import Message
from ckpt.containers.sources import RankFile
from ckpt.plan.tensors import Shape
from ckpt.runs.model_files import read_config
from converters.deepspeed import model_file
from converters.deepspeed.pipeline.args import attributes, recorded
from converters.deepspeed.pipeline.layers import Layers, is_recomputed, sequential
from converters.deepspeed.pipeline.read import check_neox
from converters.deepspeed.sharing import Cut, Sharing
from converters.names.megatron.model.splits import Split, full_shape, rank_boxes, split_of

#: Whole tensors' dims by name ending: h hidden, v padded vocabulary, p positions, f MLP.
_DIMS = {
    "word_embeddings.weight": "v h",
    "output_layer.weight": "v h",
    "position_embeddings.weight": "p h",
    "linear_qkv.weight": "3h h",
    "linear_qkv.bias": "3h",
    "linear_proj.weight": "h h",
    "linear_proj.bias": "h",
    "linear_fc1.weight": "f h",
    "linear_fc1.bias": "f",
    "linear_fc2.weight": "h f",
    "linear_fc2.bias": "h",
}
_ROW_BIASES = ("linear_proj.bias", "linear_fc2.bias")


def known_by_name(file: RankFile, ranks: Sequence[int], folders: Sequence[Path]) -> Sharing | None:
    """Return None unless `file`, one rank's model file, is GPT-NeoX's."""
    args, module = attributes(file.content.get("args")), file.content.get("module")
    if "model_parallel_size" not in args or not isinstance(module, Mapping) or not all(map(sequential, module)):
        return None
    size = len(ranks)
    if args["model_parallel_size"] != size or list(ranks) != list(range(size)):
        raise CorruptError(
            "the tensor parallel rank files do not match the run",
            path=file.path,
            expected=f"{pluralize(args['model_parallel_size'], 'rank')}",
            found=f"files of ranks {', '.join(map(str, ranks))}",
        )
    entries: dict[int, dict[str, Any]] = {}
    for fqn, stored in model_file.module(file, size).items():
        number, name = sequential(fqn) or (0, fqn)
        entries.setdefault(number, {})[name] = stored
    names = {number: [name for name in held if not is_recomputed(name)] for number, held in entries.items()}
    layers = Layers.of_names({number: held for number, held in names.items() if held}, file.path)
    sizes = {"h": args["hidden_size"], "v": args["padded_vocab_size"], "p": args["max_position_embeddings"]}
    if args["num_layers"] != len(layers.transformers):
        raise CorruptError(
            "the layers do not match the run's arguments",
            path=file.path,
            expected=f"{pluralize(args['num_layers'], 'layer')}",
            found=f"{pluralize(len(layers.transformers), 'layer')}",
        )
    cuts: dict[str, Cut] = {}
    are_added = _are_added(folders)
    for number, held in entries.items():
        hint = Message("{config} with the Hub's config.json of the model, for its use_parallel_residual")
        check_neox(held, file, size if are_added is None else 1, hint)
        for name, stored in held.items():
            if is_recomputed(name):
                continue  # a buffer
            fqn = f"sequential.{number}.{name}"
            canonical = layers.canonical(number, name)
            split = split_of(canonical) if canonical else None
            if canonical is None or split is None:
                raise LossError("this layer entry is unknown", path=file.path, fqn=fqn)
            known = _neox_cut(fqn, canonical, split, stored.extent.shape, size, sizes, file)
            cuts[fqn] = replace(known, is_added=bool(are_added) and canonical.endswith(_ROW_BIASES))
    how = "by GPT-NeoX's rules"
    if any(one.is_added for one in cuts.values()):
        how += ", with row parallel biases added up for the parallel residual"
    client = {"args": recorded(file.content["args"], {"tensor_model_parallel_size": 1})}
    return Sharing(file.path, size, cuts, how=how, client=client)


def _are_added(folders: Sequence[Path]) -> bool | None:
    """Return True if ranks' biases in row-parallel layers are summed."""
    config = read_config(folders) or {}
    told = config.get("use_parallel_residual") if config.get("model_type") == "gpt_neox" else None
    return told if isinstance(told, bool) else None


def _neox_cut(
    fqn: str, canonical: str, split: Split, local: Shape, size: int, sizes: dict[str, int], file: RankFile
) -> Cut:
    """Return a tensor's cut. The first MLP tensor adds the MLP's size to `sizes`."""
    shape = full_shape(split, local, size)
    dims = _DIMS.get(".".join(canonical.split(".")[-2:]), "h").split()
    if "f" in dims and len(shape) == len(dims):
        sizes.setdefault("f", shape[dims.index("f")])
    expected = tuple((3 if dim[0] == "3" else 1) * sizes.get(dim[-1], 0) for dim in dims)
    if shape != expected:
        raise CorruptError(
            "a tensor parallel rank's part does not match the run's arguments",
            path=file.path,
            fqn=fqn,
            expected=f"a part with shape {list(expected)}",
            found=list(local),
        )
    boxes = tuple(rank_boxes(split, shape, size, rank) for rank in range(size))
    return Cut(shape, (local,) * size, boxes)
