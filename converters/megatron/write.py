"""Megatron-LM's `torch` format: write, for any tensor, pipeline, expert and virtual pipeline sizes.

What is written is what a run of that layout would have saved: megatron-core's `load_state_dict(strict=True)`,
`optimizer.load_state_dict` and `load_parameter_state` take it.  Format facts: see `converters.megatron.format`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ckpt.containers.torchfile.values import Record, StoredDict
from ckpt.containers.torchfile.write import FromSource, NewTensor, Part, Zeros, number, torch_file
from ckpt.errors import LossError, UsageError
from ckpt.plan.checkpoint import BUFFER, MASTER, WEIGHT, Checkpoint, Key, Layout, Target, TargetFile
from ckpt.plan.dtypes import BFLOAT16, FLOAT16, FLOAT32
from ckpt.plan.precision import CAST_SOURCES, Choice, choices, describe
from ckpt.plan.tensors import Shape, Tensor
from ckpt.run_folder.carried import model_files
from converters.megatron.buffers import bucket_sizes, stored_buffer
from converters.megatron.folder import RELEASE, TRACKER, iteration_folder
from converters.megatron.optimizer_read import IDENTITY, is_decayed, is_decoupled
from converters.megatron.read import DISTRIBUTED, EXTRA, MODEL, OTHER_ORDER, Piece, folder_name, pieces_of
from converters.names.megatron.model.axes import STAGE_ARGS, Grid, Rank, Stages, expert_range
from converters.names.megatron.model.spelling import (
    EMBEDDING,
    OUTPUT,
    LayerKind,
    Spelling,
    expert_of,
    is_expert,
    layer_kinds,
    registered,
    split_layer,
)
from converters.names.megatron.model.splits import is_gated, rank_shape, second_linear, split_of
from converters.names.megatron.options import MegatronOptions

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
#: Entries that each rank has for itself.
_OF_RANKS = ("rng_state", "rerun_state_machine")
#: Formats whose other entries are Megatron's, and go into the file as they are.
_MEGATRON = ("megatron", "megatron-dist")
#: What Megatron-LM builds layers from where nothing else is said.
_ENGINE = "transformer_engine"
#: What the distributed optimizer's file has places for.
_ADAM = ("exp_avg", "exp_avg_sq")


def lay_out(checkpoint: Checkpoint, layout: Layout) -> Target:
    """The files of a run folder: an iteration's folder (or `release`), the tracker, config and tokenizer.

    Raises UsageError for a layout that does not fit the model, LossError for what the format has no place for.
    """
    model = describe_model(checkpoint, layout)
    folder = iteration_folder(checkpoint.state.step)
    files: list[TargetFile] = []
    if model.has_optimizer and OTHER_ORDER in checkpoint.notes:
        raise LossError(
            f"{OTHER_ORDER}, and an optimizer knows parameters by their order alone",
            path=checkpoint.path,
            hint="convert the weights alone, by way of hf",
        )
    optimizer = Optimizer(model) if model.has_optimizer else None
    items, dropped = _items(model)
    for rank in model.grid.ranks():
        name = f"{folder}/{folder_name(rank, model.grid)}"
        chunks = [model.chunk(rank, vp) for vp in range(model.grid.vpp)]
        root = _root(model, rank, chunks, items)
        if optimizer is not None:
            root["optimizer"] = optimizer.of_rank(rank, chunks)
        files.append(torch_file(f"{name}/{MODEL}", root | _of_rank(model, rank)))
        if optimizer is not None and optimizer.distributed:
            state = optimizer.distributed_state(rank, chunks)
            files.append(torch_file(f"{name}/{DISTRIBUTED}", state))
    tracker = RELEASE if checkpoint.state.step is None else str(checkpoint.state.step)
    return Target(
        files=(*files, *model_files(checkpoint, layout.dtype)[0], TargetFile.of_bytes(TRACKER, tracker.encode())),
        dropped=tuple(dropped),
        notes=tuple(_notes(model, layout, optimizer)),
    )


# -- what is to be written -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor of a chunk on one rank: its own name there, its name in the whole model, and the parts it holds."""

    name: str
    fqn: str
    shape: Shape
    pieces: tuple[Piece, ...]
    shared: bool

    @property
    def numel(self) -> int:
        return sum(piece.box.numel for piece in self.pieces)

    def tensor(self, key: Key, dtype: Any) -> NewTensor:
        """The tensor with its elements from the source's tensor `key`."""
        return NewTensor(dtype, self.shape, tuple(FromSource(key, p.box, p.offset) for p in self.pieces))


@dataclass(frozen=True)
class Chunk:
    """A model chunk of one rank: its tensors in the order of the modules, and the names of empty extra states."""

    vp: int
    tensors: tuple[Placed, ...]
    extra: tuple[str, ...]


@dataclass(frozen=True)
class Model:
    """The source as Megatron's model, and the layout that it is to have."""

    checkpoint: Checkpoint
    args: Mapping[str, Any]
    grid: Grid
    stages: Stages
    spelling: Spelling
    chosen: Mapping[str, Choice]
    kinds: Mapping[str, LayerKind]
    num_experts: int
    notes: list[str] = field(default_factory=list)

    @property
    def tied(self) -> bool:
        return OUTPUT not in self.chosen

    @cached_property
    def has_optimizer(self) -> bool:
        return any(role not in (WEIGHT, MASTER, BUFFER) for _, role in self.checkpoint.tensors)

    @cached_property
    def members(self) -> dict[tuple[int, int], list[str]]:
        """Names of the whole model's tensors in every chunk, copies of the embedding not among them."""
        found: dict[tuple[int, int], list[str]] = {
            (pp, vp): [] for pp in range(self.grid.pp) for vp in range(self.grid.vpp)
        }
        for name in (*self.chosen, *self.extra):
            found[self._home(name)].append(name)
        return found

    @cached_property
    def extra(self) -> tuple[str, ...]:
        """Names of entries without content, `_extra_state`: the source's, or those that linear layers have."""
        items = self.checkpoint.state.items
        recorded, args = items.get(EXTRA), items.get("args") or {}
        if isinstance(recorded, Mapping) and args.get("transformer_impl", _ENGINE) == self.args["transformer_impl"]:
            return tuple(name for name in recorded if isinstance(name, str))
        linear = (name for name in self.chosen if re.search(r"(linear_\w+|eh_proj|output_layer)\.weight$", name))
        found = {_extra_name(name, self.spelling): None for name in linear} | {"output_layer._extra_state": None}
        if not self.spelling.local_spec:
            found |= {
                f"{name.partition('linear_proj')[0]}core_attention._extra_state": None
                for name in self.chosen
                if name.endswith("self_attention.linear_proj.weight")
            }
        return tuple(found)

    def _home(self, name: str) -> tuple[int, int]:
        """(pipeline rank, chunk) of a tensor."""
        stages = self.stages
        if match := _LAYER.match(name):
            pp, vp, _ = stages.place(int(match[1]))
            return pp, vp
        if name.startswith("embedding."):
            return 0, 0
        chunks = [(pp, vp) for vp in range(self.grid.vpp) for pp in range(self.grid.pp)]
        if name.startswith("mtp."):
            return next(((pp, vp) for pp, vp in chunks if stages.has_mtp(pp, vp)), chunks[-1])
        if name.startswith("decoder."):
            return next((pp, vp) for pp, vp in chunks if stages.has_final_norm(pp, vp))
        return chunks[-1]

    def chunk(self, rank: Rank, vp: int) -> Chunk:
        """What a rank's chunk holds."""
        experts = expert_range(rank, self.grid, self.num_experts)
        first_layer = self.stages.layers(rank.pp, vp).start
        placed, extra = [], []
        for name in self.members[rank.pp, vp]:
            expert = expert_of(name)
            if expert is not None and expert not in experts:
                continue
            kind = self.kinds.get(split_layer(name)[0])
            own = self.spelling.spelled(name, kind, first_layer, experts.start)
            if name.endswith("_extra_state"):
                extra.append(own)
            else:
                placed.append(self._placed(rank, own, name, self._is_shared(rank, vp, name)))
        for own, name, shared in self._copies(rank, vp):
            placed.append(self._placed(rank, own, name, shared))
        placed.sort(key=lambda one: registered(one.name))
        return Chunk(vp, tuple(placed), tuple(dict.fromkeys(extra)))

    def _is_shared(self, rank: Rank, vp: int, name: str) -> bool:
        """Whether another stage keeps a copy: language_module.py, `setup_embeddings_and_output_layer`."""
        return name == EMBEDDING and self.grid.pp > 1 and (self.tied or self.stages.num_mtp > 0)

    def _copies(self, rank: Rank, vp: int) -> Iterator[tuple[str, str, bool]]:
        """Copies of the embedding on later stages: (own name, name in the model, kept equal)."""
        if self.grid.pp == 1 or self.stages.is_first(rank.pp, vp):
            return
        if self.stages.has_mtp(rank.pp, vp):
            for name in self.chosen:
                if name.startswith("embedding."):
                    yield name, name, name == EMBEDDING
        if self.tied and self.stages.is_last(rank.pp, vp):
            yield OUTPUT, EMBEDDING, not self.stages.has_mtp(rank.pp, vp)

    def _placed(self, rank: Rank, own: str, name: str, shared: bool) -> Placed:
        shape = self.chosen[name].tensor.shape
        split = split_of(name, gated=self._gated(name), local_spec=self.spelling.local_spec)
        if split is None:
            raise LossError("nothing is known of how tensor parallel ranks share this tensor", fqn=name)
        size, part = (self.grid.etp, rank.etp) if is_expert(name) else (self.grid.tp, rank.tp)
        try:
            return Placed(own, name, rank_shape(split, shape, size), pieces_of(name, shape, split, size, part), shared)
        except UsageError as error:
            error.fqn = name
            raise

    def _gated(self, name: str) -> bool:
        second = second_linear(name)
        if second is None:
            return False
        if second in self.chosen:
            return is_gated(self.chosen[name].tensor.shape, self.chosen[second].tensor.shape)
        return bool(self.args.get("swiglu"))


def _extra_name(name: str, spelling: Spelling) -> str:
    """The entry of the module that a weight belongs to; grouped experts are one module."""
    module = name.rpartition(".")[0]
    if spelling.grouped:
        module = re.sub(r"\.local_experts\.\d+\.", ".", module)
    return f"{module}._extra_state"


def describe_model(checkpoint: Checkpoint, layout: Layout) -> Model:
    """The source's tensors, and the layout to write them in.

    Raises UsageError for a layout that does not fit the model.
    """
    recorded = checkpoint.state.items.get("args")
    args: dict[str, Any] = dict(recorded) if isinstance(recorded, Mapping) else {}
    chosen = choices(checkpoint, layout.dtype)
    names = list(chosen)
    layers = {int(m[1]) for name in names if (m := _LAYER.match(name))}
    experts = {number for name in names if (number := expert_of(name)) is not None}
    for what, numbers in (("layers", layers), ("experts", experts)):
        if numbers != set(range(len(numbers))):
            missing = next(number for number in range(max(numbers)) if number not in numbers)
            raise LossError(f"the source lacks some of the model's {what}", expected=f"number {missing}")
    options = layout.read(MegatronOptions)
    grid = _grid(args, options)
    if grid.ep > 1 and not experts:  # megatron/core/transformer/transformer_config.py refuses this too
        raise UsageError("a model without experts has no expert parallel ranks", found=f"ep {grid.ep}")
    stages = _stages(args, grid, options, len(layers))
    if options.transformer_impl:
        args["transformer_impl"] = options.transformer_impl
    local = args.setdefault("transformer_impl", _ENGINE) == "local"
    grouped = bool(args.get("moe_grouped_gemm"))
    if grouped and experts and (local or args.get("moe_use_legacy_grouped_gemm")):
        raise LossError(
            "the legacy grouped GEMM's weights are not written: megatron-core 0.17 has left that layout",
            expected="experts one by one, or grouped in Transformer Engine's way",
            found="moe_grouped_gemm with " + ("transformer_impl local" if local else "moe_use_legacy_grouped_gemm"),
        )
    if args.get("untie_embeddings_and_output_weights") and OUTPUT not in chosen:
        raise LossError(
            "the arguments say that the output layer is not the embedding, and the source has none", fqn=OUTPUT
        )
    return Model(
        checkpoint,
        _args(args, grid, stages, checkpoint, layout, chosen),
        grid,
        stages,
        Spelling(local, grouped),
        chosen,
        layer_kinds(names),
        len(experts),
    )


def _grid(args: Mapping[str, Any], options: MegatronOptions) -> Grid:
    """The sizes that were asked for, and otherwise the source's."""
    source = Grid.of_args(args)
    tp, pp = options.tp or source.tp, options.pp or source.pp
    etp = options.etp or (tp if source.etp == source.tp else source.etp)
    vpp = options.vpp or (source.vpp if pp > 1 else 1)
    grid = Grid(tp, pp, options.ep or source.ep, vpp, etp)
    grid.check()
    heads, groups = args.get("num_attention_heads"), args.get("num_query_groups")
    if heads and (heads % tp or (args.get("group_query_attention") and groups and groups % tp and tp % groups)):
        raise UsageError(
            "attention does not divide among the tensor parallel ranks",
            expected="heads that --tp divides, and query groups that it divides or that divide it",
            found=f"{heads} heads, {groups} query groups, tp {tp}",
        )
    return grid


def _stages(args: Mapping[str, Any], grid: Grid, options: MegatronOptions, num_layers: int) -> Stages:
    """As asked for; otherwise the source's way where it fits, and even stages where it does not."""
    num_mtp = args.get("mtp_num_layers") or 0
    even = Stages(num_layers, grid.pp, grid.vpp, num_mtp=num_mtp)
    asked = {name: value for name in STAGE_ARGS if (value := getattr(options, name, None))}
    if asked:
        wanted = even.with_args(asked)
        wanted.check()
        return wanted
    recorded = {name: value for name in STAGE_ARGS if (value := args.get(name))}
    if recorded and grid.pp > 1:
        kept = even.with_args(recorded)
        try:
            kept.check()
        except UsageError:
            pass
        else:
            return kept
    try:
        even.check()
    except UsageError as error:
        error.hint = "--pp and --vpp that divide the layers, or --decoder-first-pipeline-num-layers and its like"
        raise
    return even


def _args(
    args: Mapping[str, Any],
    grid: Grid,
    stages: Stages,
    checkpoint: Checkpoint,
    layout: Layout,
    chosen: Mapping[str, Choice],
) -> dict[str, Any]:
    """The source's arguments with the target's layout."""
    result = {**args, **grid.args, "num_layers": stages.num_layers}
    even = grid.vpp > 1 and stages == replace(stages, first=None, last=None, embedding=False, loss=False, layout=None)
    result["num_layers_per_virtual_pipeline_stage"] = stages.num_layers // (grid.pp * grid.vpp) if even else None
    result["transformer_pipeline_model_parallel_size"] = grid.pp
    result |= {
        "decoder_first_pipeline_num_layers": stages.first,
        "decoder_last_pipeline_num_layers": stages.last,
        "account_for_embedding_in_pipeline_split": stages.embedding,
        "account_for_loss_in_pipeline_split": stages.loss,
    }
    if stages.layout is None:
        result["pipeline_model_parallel_layout"] = None
    elif asked := layout.read(MegatronOptions).pipeline_model_parallel_layout:
        result["pipeline_model_parallel_layout"] = asked
    result["untie_embeddings_and_output_weights"] = OUTPUT in chosen
    if EMBEDDING in chosen:
        result["padded_vocab_size"] = chosen[EMBEDDING].tensor.shape[0]
    world_size = layout.world_size or checkpoint.world_size
    model_ranks = grid.tp * grid.pp * (args.get("context_parallel_size") or 1)
    if layout.world_size and layout.world_size % (grid.pp * grid.ranks_in_stage):
        raise UsageError(
            f"{layout.world_size} ranks do not divide into this layout",
            expected=f"a multiple of {grid.pp * grid.ranks_in_stage}",
            found=f"--world-size {layout.world_size}",
        )
    if not world_size or world_size % model_ranks or world_size % (grid.pp * grid.ranks_in_stage):
        world_size = grid.pp * grid.ranks_in_stage
    result["world_size"] = world_size
    result["data_parallel_size"] = max(1, world_size // model_ranks)
    return result


# -- the model's file ----------------------------------------------------------------------------------------


def _root(model: Model, rank: Rank, chunks: Sequence[Chunk], items: Mapping[str, Any]) -> dict[str, Any]:
    """training/checkpointing.py, `generate_state_dict`."""
    root: dict[str, Any] = {
        "args": Record("argparse", "Namespace", (), state=dict(model.args)),
        "checkpoint_version": items.get("checkpoint_version", 3.0),
        "iteration": model.checkpoint.state.step or 0,
    }
    for chunk in chunks:
        state = StoredDict("OrderedDict")
        for placed in chunk.tensors:
            choice = model.chosen[placed.fqn]
            state[placed.name] = placed.tensor(choice.key, choice.dtype)
        state.update(dict.fromkeys(chunk.extra))
        root["model" if len(chunks) == 1 else f"model{chunk.vp}"] = state
    return root | {name: value for name, value in items.items() if name not in root}


def _items(model: Model) -> tuple[dict[str, Any], list[str]]:
    """Entries that are the same in every file, and what is not written."""
    kept: dict[str, Any] = {}
    dropped = []
    source = model.checkpoint
    for name, value in source.state.items.items():
        if name in ("args", EXTRA, "grad_scaler"):
            continue
        if name in _OF_RANKS:
            if not _keeps_ranks(model):
                dropped.append(f"{name} of {len(value)} ranks: the layout is another one; resume with --no-load-rng")
        elif source.format not in _MEGATRON and name not in ("checkpoint_version", "opt_param_scheduler"):
            dropped.append(f"training state {name}")
        else:
            try:
                torch_file(MODEL, value)
            except LossError as error:
                dropped.append(f"training state {name}: {error.what}")
            else:
                kept[name] = value
    if "grad_scaler" in source.state.items and not model.has_optimizer:
        dropped.append("training state grad_scaler")
    return kept, dropped


def _keeps_ranks(model: Model) -> bool:
    """Whether the target's ranks are the source's."""
    recorded = model.checkpoint.state.items.get("args")
    args = recorded if isinstance(recorded, Mapping) else {}
    return model.checkpoint.format == "megatron" and Grid.of_args(args) == model.grid


def _of_rank(model: Model, rank: Rank) -> dict[str, Any]:
    if not _keeps_ranks(model):
        return {}
    name = folder_name(rank, model.grid)
    items = model.checkpoint.state.items
    return {item: items[item][name] for item in _OF_RANKS if name in items.get(item, {})}


# -- the optimizer -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Group:
    """A param group: its options, and what of the model is in it."""

    options: Mapping[str, Any]
    expert: bool
    decayed: bool | None
    decoupled: bool


class Optimizer:
    """The optimizer's state, dealt to ranks."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.args = model.args
        self.distributed = bool(self.args.get("use_distributed_optimizer", True))
        self.masters = {fqn: self._master(fqn) for fqn, c in model.chosen.items() if c.tensor.role != BUFFER}
        self.states: dict[str, dict[str, Tensor]] = {fqn: {} for fqn in self.masters}
        for (fqn, role), tensor in model.checkpoint.tensors.items():
            if role not in (WEIGHT, MASTER, BUFFER):
                self.states[fqn][role] = tensor
        if self.distributed:
            self._check_adam()
        self.apart = model.grid.ep > 1 and model.num_experts > 0
        self.groups = self._groups()

    def _master(self, fqn: str) -> Tensor:
        found = self.model.checkpoint.get(fqn, MASTER) or self.model.checkpoint.get(fqn, WEIGHT)
        assert found is not None
        return found

    def _check_adam(self) -> None:
        for fqn, states in self.states.items():
            if set(states) != set(_ADAM):
                raise LossError(
                    "Megatron's distributed optimizer has places for Adam's states of every parameter, and no others",
                    fqn=fqn,
                    expected=", ".join(_ADAM),
                    found=", ".join(states) or "none",
                )

    # -- param groups ----------------------------------------------------------------------------------------

    def _groups(self) -> list[_Group]:
        """Megatron's own groups: with and without decay, of experts apart where they have an optimizer of their own.

        Options are those of the source's group that has a parameter of this kind.
        """
        option_of = {fqn: group.options for group in self.model.checkpoint.state.param_groups for fqn in group.fqns}
        found: dict[tuple[bool, bool, bool], _Group] = {}
        for fqn, master in self.masters.items():
            expert = self.apart and is_expert(fqn)
            name = self._own_name(fqn)
            kind = (expert, is_decayed(name, len(master.shape), self.args), is_decoupled(name, self.args))
            if kind not in found:
                options = self._options(dict(option_of.get(fqn, {})), *kind)
                found[kind] = _Group(options, *kind)
        if self.apart:  # ranks without experts, and without an expert bias, list the groups all the same
            for expert, decayed, decoupled in list(found):
                if not expert and (True, decayed, decoupled) not in found and not decoupled:
                    options = self._options(dict(found[expert, decayed, decoupled].options), True, decayed, decoupled)
                    if any(kind[0] for kind in found) and decayed:
                        found[True, decayed, decoupled] = _Group(options, True, decayed, decoupled)
        return [found[kind] for kind in sorted(found, key=lambda kind: (kind[0], not kind[1], kind[2]))]

    def _own_name(self, fqn: str) -> str:
        kind = self.model.kinds.get(split_layer(fqn)[0])
        return self.model.spelling.spelled(fqn, kind, 0, 0)

    def _options(self, options: dict[str, Any], expert: bool, decayed: bool, decoupled: bool) -> dict[str, Any]:
        if not any(name in options or f"pre_{name}" in options for name in IDENTITY):
            options |= {
                "wd_mult": 1.0 if decayed else 0.0,
                "lr_mult": 1.0,
                "is_decoupled_lr": decoupled,
                "default_config": not decoupled,
            }
            # The peak of the group's schedule.  Without it Megatron takes that of the run's options, and the rate
            # that the group has now is not it.
            if "initial_lr" in options:
                options["max_lr"] = options["initial_lr"]
        step = next(iter(self.model.checkpoint.state.scalars.get("step", {}).values()), None)
        if step is not None and self.distributed:
            options.setdefault("step", step)
        return options | {"is_expert_parallel": expert}

    def _kind(self, placed: Placed) -> tuple[bool, bool, bool]:
        return (
            self.apart and is_expert(placed.fqn),
            is_decayed(placed.name, len(placed.shape), self.args),
            is_decoupled(placed.name, self.args),
        )

    # -- a rank's optimizers ---------------------------------------------------------------------------------

    def _split(self, chunks: Sequence[Chunk]) -> list[tuple[list[_Group], list[tuple[int, Placed]]]]:
        """The groups and the parameters of each optimizer of a rank."""
        everything = [(c.vp, p) for c in chunks for p in c.tensors if p.fqn in self.masters]
        dense = [(vp, p) for vp, p in everything if not (self.apart and is_expert(p.fqn))]
        groups = [group for group in self.groups if not group.expert]
        parts = [(groups, dense)]
        if self.args.get("overlap_param_gather_with_optimizer_step"):
            parts = [(groups, [one for one in dense if one[0] == 0]), (groups, [one for one in dense if one[0] > 0])]
        if self.apart:
            experts = [group for group in self.groups if group.expert]
            parts.append((experts, [(vp, p) for vp, p in everything if is_expert(p.fqn)]))
        return parts

    def of_rank(self, rank: Rank, chunks: Sequence[Chunk]) -> Any:
        """What a rank's file has as `optimizer`."""
        contents = []
        for groups, members in self._split(chunks):
            placed = [one for _, one in members]
            contents.append(self._without_states(groups) if self.distributed else self._plain(groups, placed))
        return contents[0] if len(contents) == 1 else contents

    def _without_states(self, groups: Sequence[_Group]) -> dict[str, Any]:
        """distrib_optimizer.py, `state_dict`."""
        content: dict[str, Any] = {"optimizer": {"param_groups": [dict(group.options) for group in groups]}}
        return content | self._scaler()

    def _scaler(self) -> dict[str, Any]:
        scaler = self.model.checkpoint.state.items.get("grad_scaler")
        return {} if scaler is None else {"grad_scaler": scaler}

    def _plain(self, groups: Sequence[_Group], placed: Sequence[Placed]) -> dict[str, Any]:
        """optimizer.py, `Float16OptimizerWithFloat16Params.state_dict` and `FP32Optimizer.state_dict`."""
        state: dict[int, dict[str, Any]] = {}
        masters: list[list[NewTensor]] = []
        listed = []
        identity = 0
        for group in groups:
            kind = (group.expert, group.decayed, group.decoupled)
            members = [one for one in placed if self._kind(one) == kind]
            ids = list(range(identity, identity + len(members)))
            identity += len(members)
            listed.append({**group.options, "params": ids})
            halves = []
            for number_, one in zip(ids, members, strict=True):
                values = self._state_of(one, "step" in group.options)
                if values:
                    state[number_] = values
                if self.model.chosen[one.fqn].dtype in (BFLOAT16, FLOAT16):
                    master = self.masters[one.fqn]
                    halves.append(one.tensor((master.fqn, master.role), FLOAT32))
            masters.append(halves)
        inner = {"state": state, "param_groups": listed}
        if not any(choice.dtype in (BFLOAT16, FLOAT16) for choice in self.model.chosen.values()):
            return inner
        return {"optimizer": inner, **self._scaler(), "fp32_from_fp16_params": masters}

    def _state_of(self, one: Placed, step_in_group: bool) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, by_fqn in self.model.checkpoint.state.scalars.items():
            if one.fqn in by_fqn and not (name == "step" and step_in_group):
                value = by_fqn[one.fqn]
                values[name] = number(value) if isinstance(value, int | float) and name == "step" else value
        for role, tensor in self.states[one.fqn].items():
            values[role] = one.tensor((one.fqn, role), tensor.dtype)
        return values

    def distributed_state(self, rank: Rank, chunks: Sequence[Chunk]) -> Any:
        """What a rank's `distrib_optim.pt` holds: None for what another rank of the same data has gathered."""
        contents = []
        for groups, members in self._split(chunks):
            expert = any(group.expert for group in groups)
            gathers = rank.in_stage < (self.model.grid.etp * self.model.grid.ep if expert else self.model.grid.tp)
            contents.append(self._buffers(rank, chunks, members) if gathers else None)
        return contents[0] if len(contents) == 1 else contents

    def _buffers(self, rank: Rank, chunks: Sequence[Chunk], members: Sequence[tuple[int, Placed]]) -> dict[Any, Any]:
        """distrib_optimizer.py, `get_parameter_state_dp_zero`."""
        buffers: dict[tuple[int, Any], list[Placed]] = {}
        for vp, placed in members:
            buffers.setdefault((vp, self.model.chosen[placed.fqn].dtype), []).append(placed)
        content: dict[Any, Any] = {"buckets_coalesced": True}
        for index, ((vp, dtype), ones) in enumerate(sorted(buffers.items(), key=lambda item: item[0][0])):
            numel = sum(placed.numel for placed in chunks[vp].tensors)
            size = next(bucket_sizes(self.args, rank.pp, vp, numel))
            buffer = stored_buffer([one.numel for one in ones], [one.shared for one in ones], size)
            reduced = FLOAT32 if self.args.get("accumulate_allreduce_grads_in_fp32", True) else dtype
            tensors: dict[str, Any] = {}
            for name in ("param", *_ADAM):
                fill = _fill((start, one, self._key(one, name)) for start, one in zip(buffer.starts, ones, strict=True))
                tensors[name] = NewTensor(FLOAT32, (buffer.numel,), tuple(_with_gaps(fill, buffer.numel)))
            content[index] = {(dtype, reduced): tensors | {"numel_unpadded": buffer.numel}}
        return content

    def _key(self, placed: Placed, name: str) -> Key:
        if name == "param":
            master = self.masters[placed.fqn]
            return master.fqn, master.role
        return placed.fqn, name


def _fill(places: Iterable[tuple[int, Placed, Key]]) -> list[FromSource]:
    return [
        FromSource(key, piece.box, start + piece.offset) for start, placed, key in places for piece in placed.pieces
    ]


def _with_gaps(parts: Iterable[FromSource], numel: int) -> Iterator[Part]:
    """The parts in their order, with zeros between and behind them."""
    reached = 0
    for part in sorted(parts, key=lambda part: part.start):
        if part.start > reached:
            yield Zeros(part.start - reached, reached)
        if part.numel:
            yield part
        reached = part.start + part.numel
    if reached < numel:
        yield Zeros(numel - reached, reached)


# -- notes ---------------------------------------------------------------------------------------------------


def _notes(model: Model, layout: Layout, optimizer: Optimizer | None) -> Iterator[str]:
    grid = model.grid
    sizes = f"TP {grid.tp}, PP {grid.pp}, EP {grid.ep}, VPP {grid.vpp}"
    yield f"Megatron for {sizes}" + (f", expert TP {grid.etp}" if grid.etp != grid.tp else "")
    if optimizer is None:
        yield from describe(model.chosen, model.checkpoint, layout.dtype)
    elif optimizer.distributed and next(bucket_sizes(model.args, 0, 0, 1)) is not None:
        yield "the distributed optimizer's buckets are those of the recorded --ddp-bucket-size and data parallel size"
    yield from model.notes
    wide = [c for c in model.chosen.values() if c.dtype not in CAST_SOURCES]
    if wide:
        yield f"{len(wide)} tensors have a dtype that Megatron does not train: {wide[0].dtype}"
