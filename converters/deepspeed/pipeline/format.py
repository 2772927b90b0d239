"""Megatron-DeepSpeed: DeepSpeed's pipeline of tensor-parallel layers, with ZeRO-1 optimizer partitions.

    <run>/latest                                                       "global_step100"
    <run>/global_step100/layer_LL-model_TT-model_states.pt             a layer's weights on a tensor-parallel rank
    <run>/global_step100/mp_rank_SS_model_states.pt                    training state; S = pp * TP + tp
    <run>/global_step100/[bf16_]zero_pp_rank_D_mp_rank_SS_optim_states.pt    masters and states on data rank D

L counts the whole pipeline's layers. `-model_TT` is present if the topology has an axis `model`. A tied embedding has
one file, and is in the first and the last stage's optimizer.

Format facts: deepspeed 0.19.8, runtime/pipe/module.py (`save_state_dict`, `ckpt_layer_path`), runtime/pipe/topology.py,
runtime/pipe/engine.py, runtime/bf16_optimizer.py, runtime/zero/stage_1_and_2.py; for names
`converters.deepspeed.pipeline.layers`.
"""

from __future__ import annotations

from pathlib import Path

from ckpt.base.errors import CkptError
from ckpt.plan.checkpoint import MEGATRON as NAMESPACE
from ckpt.plan.checkpoint import Checkpoint, Format, Layout, ReadRequest, Target
from ckpt.runs.finding import Steps, find_step
from ckpt.runs.steps import LATEST
from converters.deepspeed.folder import ALIASES
from converters.deepspeed.pipeline.folder import is_pipeline, list_folder


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
    name = "megatron-deepspeed"
    title = "Megatron-DeepSpeed, pipeline"
    aliases = ALIASES
    namespace = NAMESPACE
    loads_from = "run"
    fits_other_ranks = False
    takes = ("world_size",)

    def find(self, path: Path, tag: str | None) -> Path | None:
        return find_step(path, tag, _STEPS)

    def read(self, path: Path, request: ReadRequest) -> Checkpoint:
        from converters.deepspeed.pipeline.checkpoint import read_step

        return read_step(path, request)

    def lay_out(self, checkpoint: Checkpoint, layout: Layout) -> Target:
        from converters.deepspeed.pipeline.write import lay_out

        return lay_out(checkpoint, layout)


MEGATRON_DEEPSPEED = MegatronDeepSpeed()
