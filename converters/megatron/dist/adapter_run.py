"""Adapters in Megatron's `torch_dist` format, saved by Megatron-Bridge, NeMo 2 and ms-swift.

    <run>/iter_0000100/.metadata, __0_0.distcp, common.pt, metadata.json    only the adapter's tensors
    <run>/iter_0000100/run_config.yaml    `peft`: the adapter's class, rank and alpha; `model`: axis sizes
    <run>/iter_0000100/train_state.pt, <run>/latest_train_state.pt, <run>/latest_checkpointed_iteration.txt

Tensors are stored whole, but the row order of `linear_fc1` depends on the tensor-parallel size:

- `linear_out` is stored like stacked gate and up: first the first halves of all ranks' parts, then the second halves.
  The rows of a factor with only one of them are permuted.
- DoRA's `weight_magnitude` is stored in rank order: each rank's gate, then its up.

    <run>/checkpoint-100/args.json    ms-swift's arguments: `lora_rank`, `lora_alpha`, axis sizes
    <run>/checkpoint-100/iter_0000100/.metadata, ...    PEFT's factors of Megatron's modules, `lora_A.default.weight`

ms-swift stores all rows in rank order.

    <run>/weights/.metadata, ...    NeMo's adapter, with Megatron-Bridge's names and order
    <run>/weights/adapter_metadata.json    its base's folder: `model_ckpt_path`
    <run>/context/model.yaml    `model_transform`: the adapter's class, rank and alpha; `config`: axis sizes

If experts share one factor of each layer (`experts_shared_outer_loras`), this factor has no expert dim.

Format facts: nemo_toolkit 2.5.0, collections/llm/peft, lightning/pytorch/callbacks/peft.py, lightning/ckpt_utils.py;
mcore-bridge 1.6.5, tuners/lora.py; ms-swift 4.6, megatron/utils/megatron_lm_utils.py; megatron-bridge 0.3.1,
peft/utils.py and dora_layers.py (`sharded_state_dict` of each), training/checkpointing.py
(`apply_peft_adapter_filter_to_state_dict`), training/utils/config_utils.py; Megatron-Bridge 0.6.0, peft/utils.py
(SharedOuterGroupedExpertAdapter).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError, LossError, NotFoundError, UsageError
from ckpt.base.text import pluralize
from ckpt.move.files import confined
from ckpt.move.json_files import read_object
from ckpt.plan.checkpoint import MEGATRON, MODEL_ROLES, Checkpoint, SourceFile
from ckpt.plan.relation import Link, Relation, translate
from ckpt.plan.tensors import Box, Tensor
from ckpt.runs.yaml_files import read_run_config
from converters.megatron.dist.adapter_slots import MULTI, MULTIS_CLASS, cut_to_rank, select_slot, slots_in
from converters.megatron.dist.bridge import model_settings
from converters.megatron.dist.folder import CONTEXT, MODEL, RUN_CONFIG, WEIGHTS, is_nemo
from converters.megatron.dist.read import DistReading
from converters.megatron.optimizer import Optimizers
from converters.names.megatron.adapter import MAGNITUDE, OUT, ModuleName, parse_name
from converters.names.megatron.facts import SWIFT, AdapterRun, MegatronFacts
from converters.names.megatron.model.splits import ROUTED_BLOCK, SHARED_BLOCK, GateBlocks
from converters.names.megatron.settings import CHANGES, COMPARED, is_off

#: Classes in megatron.bridge.peft, by module.
CLASSES = {"lora": "LoRA", "canonical_lora": "CanonicalLoRA", "dora": "DoRA"}
#: Experts share linear_fc1's first factor and linear_fc2's second factor.
OUTER = "experts_shared_outer_loras"
#: Settings without effect on a merge, or implied by the tensors.
_KNOWN = {
    *("_target_", "n_adapters", "dim", "alpha", "dropout", "dropout_position", "lora_dtype", "normalize_moe_lora"),
    *("target_modules", "exclude_modules", "canonical_mapping", "params_to_save", "sequence_parallel_input_regather"),
    *("lora_A_init_method", "lora_B_init_method", "a2a_experimental"),
    *("share_expert_adapters", OUTER),
}
#: The adapter, and its model's Megatron-LM settings.
_Read = tuple[AdapterRun, Mapping[str, Any]]
_MARK = ".adapter."
#: ms-swift's PEFT names.
_PEFTS = re.compile(r"\.lora_(?P<factor>[AB])\.default\.(?=weight$)")
_FACTORS = {"A": ".adapter.linear_in.", "B": ".adapter.linear_out."}
SWIFTS_CONFIG = "args.json"
NEMOS_BASE = "adapter_metadata.json"


def has_adapter(fqns: Iterable[str]) -> bool:
    return any(_MARK in fqn or _PEFTS.search(fqn) or slots_in([fqn]) for fqn in fqns)


def without_optimizer(reading: DistReading) -> Optimizers:
    states = [key for key in reading.placed if key[1] not in MODEL_ROLES]
    if states or reading.flat or reading.common.get("optimizer"):
        reading.notes.append("the adapter's optimizer is not read: no other trainer has a place for it")
    for key in states:
        del reading.placed[key]
    reading.flat.clear()
    return Optimizers()


def as_adapter(checkpoint: Checkpoint, folder: Path, requested: str | None = None) -> Checkpoint:
    """Put an adapter's rows in whole-tensor order. From a MultiLoRA run take the slot `requested`.

    Raise NotFoundError without the run's config, UsageError for an unsupported class.
    """
    slot = None
    if slots_in(fqn for fqn, _ in checkpoint.tensors):
        checkpoint, slot = select_slot(checkpoint, requested, folder)
    is_swifts = any(_PEFTS.search(fqn) for fqn, _ in checkpoint.tensors)
    if is_swifts:
        renamed = {key: _PEFTS.sub(lambda found: _FACTORS[found["factor"]], key[0]) for key in checkpoint.tensors}
        tensors = {(renamed[key], key[1]): one.renamed(renamed[key]) for key, one in checkpoint.tensors.items()}
        checkpoint = replace(checkpoint, tensors=tensors)
    trainer = _SWIFTS if is_swifts else _NEMOS if is_nemo(folder) else _BRIDGES
    others = [fqn for fqn, _ in checkpoint.tensors if parse_name(fqn) is None]
    if others:
        raise LossError(
            "the checkpoint holds an adapter and other model tensors",
            path=folder,
            fqn=others[0],
            expected=f"only the adapter's factors, saved by {trainer.name} without modules_to_save",
            found=f"{pluralize(len(others), 'other tensor')}",
        )
    path = trainer.config_of(folder)
    if not path.is_file():
        raise NotFoundError(
            "the run's config is missing, so the adapter's alpha and class are unknown",
            path=path.parent,
            expected=f"{path.name}, written by {trainer.name}",
        )
    run, settings = trainer.read(confined(path.parent, path.name))
    if trainer is _NEMOS:
        _refuse_experts(checkpoint, path)
    checkpoint = trainer.in_order(checkpoint, run)
    if (slot is not None) != (run.kind == MULTI):
        raise CorruptError(
            "the run's config and its files disagree about having several adapters",
            path=path,
            expected=f"names with `.adapters.` in them for {MULTIS_CLASS}, and for no other class",
            found=f"{CLASSES.get(run.kind, MULTIS_CLASS)}, {'with' if slot else 'without'} these names",
        )
    if slot is not None:
        checkpoint, run = cut_to_rank(checkpoint, run, slot)
    return replace(
        checkpoint,
        is_adapter=True,
        framework=trainer.name,
        facts=MegatronFacts(adapter=run, settings=settings),
        files=(*checkpoint.files, SourceFile.stat(str(path))),
    )


def _refuse_experts(checkpoint: Checkpoint, path: Path) -> None:
    """Refuse NeMo's adapters of experts: not proved against its model."""
    for fqn, _ in checkpoint.tensors:
        if (parsed := parse_name(fqn)) is not None and parsed[0].is_expert:
            raise UsageError("NeMo's expert adapters are not supported", path=path, fqn=fqn)


def read_run(path: Path) -> _Read:
    content = read_run_config(path)
    peft, model, checkpoint = (_section(content, name) for name in ("peft", "model", "checkpoint"))
    base = model.get("hf_model_id") or checkpoint.get("pretrained_checkpoint")
    run = _run_of_class(path, {"peft": peft, "model": model}, "megatron.bridge.peft", [*CLASSES, MULTI], base)
    return run, model_settings(model)


def read_nemos_run(path: Path) -> _Read:
    content = read_run_config(path)
    sections = {name: _section(content, name) for name in ("model_transform", "config")}
    beside = path.parents[1] / WEIGHTS / NEMOS_BASE
    base = read_object(beside, "the adapter's base").get("model_ckpt_path") if beside.is_file() else None
    is_known = base not in (None, "None")
    base = base if is_known else None
    run = _run_of_class(path, sections, "nemo.collections.llm.peft", ["lora", "dora"], base)
    return run, model_settings(sections["config"])


def _section(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = content.get(name)
    return found if isinstance(found, Mapping) else {}


def _run_of_class(
    path: Path, sections: Mapping[str, Mapping[str, Any]], package: str, kinds: Sequence[str], base: object
) -> AdapterRun:
    """Describe the adapter by its own section, then the model's."""
    (of_adapter, peft), (of_model, model) = sections.items()
    target = str(peft.get("_target_") or "")
    classes = CLASSES | {MULTI: MULTIS_CLASS}
    kind = next((one for one in kinds if target == f"{package}.{one}.{classes[one]}"), None)
    if kind is None:
        raise UsageError(
            "this adapter class is not supported",
            path=path,
            expected=" or ".join(classes[one] for one in kinds) + f" in `{of_adapter}._target_`",
            found=target or "no adapter",
        )
    if unknown := sorted(f"{name}: {value!r}" for name, value in peft.items() if value and name not in _KNOWN):
        raise UsageError("the run's config has unknown adapter settings", path=path, found=", ".join(unknown))
    _refuse_blocks(path, model)
    fields = _Sections(path, sections)
    dim, expert_dim = fields.count(of_adapter, "dim"), None
    if peft.get("normalize_moe_lora"):
        expert_dim = dim // fields.count(of_model, "moe_router_topk")
    tp = fields.count(of_model, "tensor_model_parallel_size", 1)
    etp = fields.count(of_model, "expert_tensor_parallel_size", tp)
    if peft.get(OUTER) and etp > 1:
        raise UsageError(
            "adapters with a factor shared by experts are supported only for expert tensor parallel size 1: "
            "Megatron-Bridge doesn't cut single experts' factors",
            path=path,
            found=f"{OUTER} and expert_tensor_parallel_size {etp}",
        )
    return AdapterRun(
        path=str(path),
        kind=kind,
        dim=dim,
        alpha=fields.number(of_adapter, "alpha"),
        dropout=fields.number(of_adapter, "dropout", 0.0),
        expert_dim=expert_dim,
        num_layers=fields.count(of_model, "num_layers") if model.get("num_layers") is not None else None,
        base=str(base) if base else None,
        gated=model.get("gated_linear_unit") is not False,
        tp=tp,
        ep=fields.count(of_model, "expert_model_parallel_size", 1),
        etp=etp,
        shares_outer=bool(peft.get(OUTER)),
    )


#: Adapter settings in ms-swift's `args.json`.
_OF_ADAPTERS = re.compile(r"lora|dora|adapter|tuner")
#: Supported settings, and settings without effect (ms-swift 3.5 to 4.5, megatron/arguments/megatron_args.py,
#: arguments/tuner_args.py).
_SWIFTS_ENTRIES = (
    *("tuner_type", "tuner_backend", "lora_rank", "lora_alpha", "lora_dropout", "lora_bias", "lora_dtype"),
    *("lorap_lr_ratio", "use_rslora", "adapters", "ref_adapters", "adapter_load", "ref_adapter_load", "mcore_adapter"),
    *("mcore_adapters", "mcore_ref_adapter", "mcore_ref_adapters", "merge_lora", "vllm_enable_lora"),
    *("_teacher_use_disable_adapter", "adapter_act", "adapter_length"),
)
_OF_OTHER_TUNERS = ("adalora_", "lora_ga_")


def read_swifts_run(path: Path) -> _Read:
    """Read the adapter and the model's settings from ms-swift's `args.json`.

    Raise UsageError unless it is a plain LoRA.
    """
    content = read_object(path, "the run's arguments")
    for name, plain in (("tuner_type", "lora"), ("lora_bias", "none"), ("modules_to_save", [])):
        if content.get(name) not in (plain, None):
            raise UsageError(
                "only plain LoRA adapters from ms-swift are supported", path=path, found=f"{name}: {content[name]!r}"
            )
    unknown = {
        name: value
        for name, value in content.items()
        if _OF_ADAPTERS.search(name)
        and name not in _SWIFTS_ENTRIES
        and not name.startswith(_OF_OTHER_TUNERS)
        and not is_off(value)
    }
    for name, value in unknown.items():
        raise UsageError("ms-swift recorded an unknown adapter setting", path=path, found=f"{name}: {value!r}")
    if content.get("expert_tensor_parallel_size") not in (1, None):
        raise UsageError(
            "ms-swift doesn't train adapters with this setting", path=path, found="expert_tensor_parallel_size above 1"
        )
    if content.get("use_rslora"):
        raise UsageError(
            "this adapter's scaling is unknown: with PEFT 0.19 and later, ms-swift ignores use_rslora",
            path=path,
            found="use_rslora: true",
            hint="set it to false in args.json; for older PEFT, also multiply lora_alpha by the square root of "
            "lora_rank",
        )
    _refuse_blocks(path, content)
    fields = _Sections(path, {"arguments": content})
    base = content.get("model")
    run = AdapterRun(
        path=str(path),
        kind=SWIFT,
        dim=fields.count("arguments", "lora_rank"),
        alpha=fields.number("arguments", "lora_alpha"),
        dropout=fields.number("arguments", "lora_dropout", 0.0),
        base=base if isinstance(base, str) else None,
        tp=fields.count("arguments", "tensor_model_parallel_size", 1),
        ep=fields.count("arguments", "expert_model_parallel_size", 1),
    )
    # Unknown entries are ms-swift's own.
    known = COMPARED | CHANGES.keys() | {"megatron_extra_kwargs"}
    return run, {name: value for name, value in content.items() if name in known}


def _refuse_blocks(path: Path, model: Mapping[str, Any]) -> None:
    """Raise LossError if gate and up rows alternate in blocks."""
    blocks = GateBlocks.of_args(model)
    sizes = ((ROUTED_BLOCK, blocks.routed), (SHARED_BLOCK, blocks.shared))
    if found := ", ".join(f"{name} {size}" for name, size in sizes if size):
        raise LossError(
            "the adapter's rows for gate and up may alternate in blocks, and the run does not record if they do",
            path=path,
            found=found,
            hint="remove the setting from this file if all gate rows come first",
        )


@dataclass(frozen=True)
class _Sections:
    path: Path
    sections: Mapping[str, Mapping[str, Any]]

    def count(self, section: str, name: str, default: int | None = None) -> int:
        found = self.sections[section].get(name)
        value = default if found is None else found
        if type(value) is not int or value < 1:
            raise self._fault(section, name, "a number above zero", found)
        return value

    def number(self, section: str, name: str, default: float | None = None) -> float:
        found = self.sections[section].get(name)
        value = default if found is None else found
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1 << 64:
            raise self._fault(section, name, "a number", found)
        return value

    def _fault(self, section: str, name: str, expected: str, found: object) -> CorruptError:
        return CorruptError(
            f"invalid {name} in the run's {section}", path=self.path, expected=expected, found=repr(found)
        )


# -- rows ----------------------------------------------------------------------------------------------------

#: (first row as stored, first row in the whole, number of rows)
RowRuns = tuple[tuple[int, int, int], ...]


def stored_rows(name: ModuleName, kind: str, rows: int, run: AdapterRun) -> RowRuns:
    """Return the stored order of a tensor's rows. Raise UsageError if they do not divide by its ranks."""
    size = tp_of(name, run)
    if size == 1 or not is_of_ranks(name, kind, run):
        return ((0, 0, rows),)
    halves = _halves(name.of(kind), rows, size)
    return halves if kind == OUT else _swapped(halves)


def is_of_ranks(name: ModuleName, kind: str, run: AdapterRun) -> bool:
    """Return True if the row order depends on the tensor-parallel size."""
    if name.leaf != "linear_fc1":
        return False
    return (kind == OUT and bool(name.part or not run.gated)) or (kind == MAGNITUDE and run.gated)


def _row_parts(name: ModuleName, kind: str, run: AdapterRun) -> tuple[int, ...]:
    """Return the possible numbers of row parts, first the number for a changed row order.

    Megatron-Bridge after 0.3 only treats `linear_fc1` as gate and up if it is.
    """
    size = tp_of(name, run)
    if kind == MAGNITUDE:
        return (size,)
    return (2 * size, size) if size == 1 or not run.gated else (2 * size,)


def tp_of(name: ModuleName, run: AdapterRun) -> int:
    return run.etp if name.is_expert else run.tp


def _exchanged(checkpoint: Checkpoint, run: AdapterRun) -> Iterator[tuple[str, RowRuns]]:
    for tensor in checkpoint.parameters.values():
        parsed = parse_name(tensor.fqn)
        assert parsed is not None
        if not is_of_ranks(*parsed, run):
            continue
        expected = _row_parts(*parsed, run)
        if _cut(tensor, parsed[0], expected, run) == expected[0] > 1:
            yield tensor.fqn, stored_rows(*parsed, tensor.shape[0], run)


def _by_rank(checkpoint: Checkpoint, run: AdapterRun) -> Checkpoint:
    """Check the parts only: ms-swift stores rows in rank order."""
    for tensor in checkpoint.parameters.values():
        name, kind = parse_name(tensor.fqn) or (None, None)
        if name and kind == OUT and name.leaf in ("linear_fc1", "linear_qkv"):
            _cut(tensor, name, (tp_of(name, run),), run)
    return checkpoint


def _cut(tensor: Tensor, name: ModuleName, expected: tuple[int, ...], run: AdapterRun) -> int:
    cuts = {fragment.region.offsets[0] for fragment in tensor.fragments() if isinstance(fragment.region, Box)}
    if len(cuts) not in expected:
        raise CorruptError(
            "the adapter's tensor parallel size doesn't match its run's config",
            path=run.path,
            fqn=tensor.fqn,
            expected=f"{pluralize(expected[0], 'row part')} from {pluralize(tp_of(name, run), 'rank')}",
            found=pluralize(len(cuts), "part"),
        )
    return len(cuts)


def _halves(fqn: str, rows: int, size: int) -> RowRuns:
    """Put all ranks' first halves first."""
    if rows % (2 * size):
        raise UsageError(
            "the factor's rows do not divide among the tensor parallel ranks",
            fqn=fqn,
            expected=f"a multiple of {2 * size}",
            found=f"{pluralize(rows, 'row')}",
        )
    half = rows // (2 * size)
    return tuple(
        (part * rows // 2 + rank * half, (2 * rank + part) * half, half) for rank in range(size) for part in range(2)
    )


def _swapped(runs: RowRuns) -> RowRuns:
    return tuple((whole, stored, number) for stored, whole, number in runs)


def _in_order(checkpoint: Checkpoint, run: AdapterRun) -> Checkpoint:
    rows = dict(_exchanged(checkpoint, run))
    if not rows:
        return checkpoint
    shapes = checkpoint.shapes
    links = []
    for fqn, shape in shapes.items():
        if fqn not in rows:
            links.append(Link.rename(fqn, fqn, shape))
            continue
        tail, dims = shape[1:], tuple(range(len(shape)))
        for first, place, number in rows[fqn]:
            before, after = (Box((start, *(0,) * len(tail)), (number, *tail)) for start in (first, place))
            links.append(Link(fqn, before, fqn, after, dims))
    return translate(checkpoint, Relation(tuple(links), shapes, shapes), MEGATRON)


# -- trainers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Trainer:
    name: str
    config_of: Callable[[Path], Path]
    read: Callable[[Path], _Read]
    in_order: Callable[[Checkpoint, AdapterRun], Checkpoint]


_BRIDGES = _Trainer("Megatron-Bridge", lambda folder: folder / RUN_CONFIG, read_run, _in_order)
_NEMOS = _Trainer("NeMo", lambda folder: folder.parent / CONTEXT / MODEL, read_nemos_run, _in_order)
_SWIFTS = _Trainer("ms-swift", lambda folder: folder.parent / SWIFTS_CONFIG, read_swifts_run, _by_rank)
