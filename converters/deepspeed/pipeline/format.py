"""Megatron-DeepSpeed: DeepSpeed's pipeline of tensor parallel layers, with ZeRO-1 partitions of the optimizer.

    <run>/latest                                                       "global_step100"
    <run>/global_step100/layer_LL-model_TT-model_states.pt             a layer's weights on a tensor parallel rank
    <run>/global_step100/mp_rank_SS_model_states.pt                    training state; S = pp * TP + tp
    <run>/global_step100/[bf16_]zero_pp_rank_D_mp_rank_SS_optim_states.pt    masters and states of data rank D

L counts the layers of the whole pipeline; `-model_TT` is there where the topology has an axis `model`.  An embedding
that is also the output layer has one file, and is in the optimizer of the first and of the last stage.

Format facts: deepspeed 0.19.8, runtime/pipe/module.py (`save_state_dict`, `ckpt_layer_path`), runtime/pipe/topology.py,
runtime/pipe/engine.py, runtime/bf16_optimizer.py, runtime/zero/stage_1_and_2.py; for names
`converters.names.megatron.layers`.  What is in the files is in `converters.deepspeed.pipeline.read`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt.base.errors import CkptError
from ckpt.containers.sources import RankFile
from ckpt.plan.checkpoint import MEGATRON as NAMESPACE
from ckpt.plan.checkpoint import Checkpoint, Format, Layout, QuantizedStates, ReadRequest, Target, TrainingState
from ckpt.run_folder.companions import read_config
from ckpt.run_folder.finding import Steps, find_step
from ckpt.run_folder.steps import LATEST
from converters.deepspeed.facts import DeepSpeedFacts
from converters.deepspeed.folder import ALIASES
from converters.deepspeed.keys import MODEL_FILE, MODEL_STATE, OPTIMIZER_FILE, PIPELINE, UNIVERSAL_INFO
from converters.deepspeed.pipeline.args import attributes, current
from converters.deepspeed.pipeline.read import (
    PipelineReading,
    is_pipeline,
    list_folder,
    read_layers,
    read_partitions,
    read_slices,
    stage_sizes,
)
from converters.deepspeed.pipeline.write import OF_SLICES, lay_out
from converters.deepspeed.rank_files import known_structure
from converters.names.families.config import Config
from converters.names.megatron.architectures.gpt_neox import parallel_residual
from converters.names.megatron.model.spelling import EMBEDDING, OUTPUT


def _is_whole(folder: Path) -> bool:
    try:
        list_folder(folder)
    except CkptError:
        return False
    return True


_STEPS = Steps(
    is_pipeline,
    of_tag=lambda tag: (f"global_step{tag}" if tag.isdecimal() else tag,),
    record=LATEST,
    needs_record=True,
    is_finished=_is_whole,
)


class MegatronDeepSpeed(Format):
    """The format `megatron-deepspeed`."""

    name = "megatron-deepspeed"
    title = "Megatron-DeepSpeed, pipeline"
    aliases = ALIASES
    namespace = NAMESPACE
    loads_from = "run"
    fits_other_ranks = False
    takes = ("world_size",)

    def find(self, path: Path, tag: str | None) -> Path | None:
        """A step's folder: `path` itself, the one that `tag` names, or the one that `latest` records."""
        return find_step(path, tag, _STEPS)

    def read(self, path: Path, request: ReadRequest) -> Checkpoint:
        """Describe the checkpoint of one step."""
        reading = PipelineReading(list_folder(path))
        with known_structure(path):
            return self._read(reading, path, request)

    def _read(self, reading: PipelineReading, path: Path, request: ReadRequest) -> Checkpoint:
        read_layers(reading)
        slices = read_slices(reading)
        optimizer = read_partitions(reading, slices)
        first = slices[0]
        folders = tuple(p for p in (request.config, path, path.parent) if p)
        config = read_config(folders)
        dp, step = (first.content.get(name) for name in ("dp_world_size", "global_steps"))
        version = first.content.get("ds_version")
        return Checkpoint(
            path=str(path),
            format=self.name,
            tensors=reading.tensors(),
            files=reading.sources.files,
            framework=f"deepspeed {version}" if version else "deepspeed",
            tag=path.name,
            facts=DeepSpeedFacts(reading.own_module_order),
            world_size=len(slices) * dp if isinstance(dp, int) else None,
            namespace=NAMESPACE,
            ties={OUTPUT: EMBEDDING} if reading.layers.tied else {},
            state=TrainingState.of_entries(
                "deepspeed",
                _entries(reading, slices, optimizer, config),
                step=step if isinstance(step, int) else None,
                engine_version=version,
                **reading.states.recorded(),
            ),
            config=config,
            folders=tuple(str(p) for p in folders if p.is_dir()),
            notes=(*reading.notes, *reading.sources.notes),
            computed=reading.states.computed,
            quantized=QuantizedStates(reading.states.quantized),
            unread=reading.states.left_out(),
        )

    def lay_out(self, checkpoint: Checkpoint, layout: Layout) -> Target:
        """The files of a run folder; see `converters.deepspeed.pipeline.write`."""
        return lay_out(checkpoint, layout)


MEGATRON_DEEPSPEED = MegatronDeepSpeed()


def _entries(
    reading: PipelineReading, slices: Sequence[RankFile], optimizer: RankFile | None, config: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What describes the run, by the names in the files.

    The client's entries are one item, as of other files of DeepSpeed's; `args` has the run's arguments also under the
    names that Megatron-LM has now, and `pipeline` what the same layout is written again from.
    """
    first = slices[0].content
    items = {name: first[name] for name in (*MODEL_STATE, "ds_config") if first.get(name) is not None}
    if optimizer is not None:
        items |= {k: v for k, v in optimizer.content.items() if k not in OPTIMIZER_FILE and v is not None}
    known = MODEL_FILE - {UNIVERSAL_INFO} | set(OF_SLICES)  # here it is the client that hands it over
    client = {str(name): value for name, value in first.items() if name not in known and value is not None}
    items |= {"client_state": client} if client else {}
    items["args"] = current(attributes(first.get("args"))) | {
        "tensor_model_parallel_size": reading.folder.tp,
        "pipeline_model_parallel_size": reading.folder.pp,
        "untie_embeddings_and_output_weights": not reading.layers.tied,
    }
    if reading.layers.neox and config and config.get("model_type") == "gpt_neox":
        items["args"] |= parallel_residual(Config(config))
    of_slices = {
        name: {file.rank: file.content[name] for file in slices if file.content.get(name) is not None}
        for name in OF_SLICES
    }
    items[PIPELINE] = {
        "kinds": {number: kind.value for number, kind in reading.layers.kinds.items()},
        "neox": reading.layers.neox,
        "stages": stage_sizes(reading, slices),
        "recomputed": reading.recomputed,
        "of_slices": {name: found for name, found in of_slices.items() if found},
    }
    return items
