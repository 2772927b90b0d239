"""Megatron-Bridge runs in Megatron's `torch_dist` format.

    <run>/iter_0000100/.metadata, __0_0.distcp, common.pt, metadata.json    like Megatron-LM's, without `args`
    <run>/iter_0000100/run_config.yaml    `model`, `optimizer`, `ddp`, `checkpoint`: class fields replacing args
    <run>/iter_0000100/train_state.pt     steps, sequences and a few flags: one-element tensors
    <run>/iter_0000100/tokenizer/         the tokenizer, saved by transformers
    <run>/latest_train_state.pt           a copy of the last one, used to find a run
    <run>/latest_checkpointed_iteration.txt

The fields are translated to Megatron-LM's arguments. The output has these files, too, with the target's axis sizes.

Format facts: megatron-bridge 0.3.1 and 0.6.2, training/checkpointing.py (`save_checkpoint`,
`_load_checkpoint_from_path`), training/config.py, training/utils/config_utils.py (`to_yaml`), models/gpt_provider.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError, LossError, NotFoundError
from ckpt.base.words import Note
from ckpt.containers.torchfile import read as torchfile
from ckpt.containers.torchfile.scalars import read_scalar
from ckpt.containers.torchfile.values import StoredTensor
from ckpt.move.files import confined
from ckpt.move.listing import names_in
from ckpt.plan.checkpoint import AXES, TargetFile
from ckpt.plan.tensors import Shape
from ckpt.runs.trainer_files import content_of
from ckpt.runs.yaml_files import read_run_config
from converters.megatron.chunks import MegatronModel
from converters.megatron.dist.folder import LAST, RUN_CONFIG, RUN_TOKENIZER, TRAIN_STATE
from converters.names.megatron.facts import BridgeRun
from converters.names.megatron.model.axes import Grid
from converters.names.megatron.model.spelling import EMBEDDING, OUTPUT, expert_of

#: Layers of different sizes.
_UNEQUAL = ("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json")
#: Renamed model fields by Megatron-LM argument, and sizes of axes.
_MODEL_FIELDS: Mapping[str, str] = {
    **{name: name for name in AXES.values()},
    "num_moe_experts": "num_experts",
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "rope_scaling": "use_rope_scaling",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
    "yarn_rotary_scaling_factor": "rotary_scaling_factor",
    "yarn_mscale": "mscale",
    "yarn_mscale_all_dim": "mscale_all_dim",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}
#: Other sections' fields by Megatron-LM argument.
_FIELDS: Mapping[str, Mapping[str, str]] = {
    "optimizer": {
        name: name
        for name in (
            *("optimizer", "use_distributed_optimizer", "use_precision_aware_optimizer", "store_param_remainders"),
            *("main_params_dtype", "decoupled_lr", "apply_wd_to_qk_layernorm", "lr", "min_lr", "weight_decay"),
            *("overlap_param_gather_with_optimizer_step", "use_layer_wise_distributed_optimizer"),
        )
    },
    "ddp": {
        "overlap_grad_reduce": "overlap_grad_reduce",
        "overlap_param_gather": "overlap_param_gather",
        "bucket_size": "ddp_bucket_size",
        "grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32",
    },
    "checkpoint": {"ckpt_format": "ckpt_format"},
    "train": {"global_batch_size": "global_batch_size", "micro_batch_size": "micro_batch_size"},
}
#: Activations with a Megatron-LM argument.
_ACTIVATIONS = ("silu", "gelu", "quick_gelu", "squared_relu")
#: Field for layer code, and packages whose layers other settings determine.
_LAYERS = "transformer_layer_spec"
_LIBRARIES = ("functools.", "megatron.", "nemo.")
_READ_APART = (
    *(_LAYERS, "activation_func", "share_embeddings_and_output_weights", "should_pad_vocab"),
    "pipeline_model_parallel_layout",
)
#: Pipeline layout elements.
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
#: Required by Megatron-Bridge to load a run.
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
#: Layers from megatron-core alone, and functions with layers determined by arguments.
_LOCAL = "local_layer_spec"
_USUAL = (_LOCAL, "default_layer_spec", "transformer_engine_layer_spec", "get_gpt_decoder_block_spec")
_COUNTERS = {"step": "iteration", "consumed_train_samples": "consumed_train_samples"}
_COUNTERS |= {"consumed_valid_samples": "consumed_valid_samples", "skipped_train_samples": "skipped_train_samples"}


def read_bridge_run(folder: Path) -> BridgeRun | None:
    """Read Megatron-Bridge's files. Raise NotFoundError if one of the two is missing."""
    has_config, has_state = ((folder / name).is_file() for name in (RUN_CONFIG, TRAIN_STATE))
    if not has_config and not has_state:
        return None
    if not has_config or not has_state:
        raise NotFoundError(
            "a Megatron-Bridge file is missing, and without it Megatron-Bridge resumes differently",
            path=folder,
            expected=f"{RUN_CONFIG} and {TRAIN_STATE}",
            found=f"{TRAIN_STATE if has_state else RUN_CONFIG} alone",
        )
    path = confined(folder, RUN_CONFIG)
    config = read_run_config(path)
    model = config.get("model")
    if not isinstance(model, Mapping) or any(name not in model for name in _SIZES):
        raise CorruptError(
            "this is not a Megatron-Bridge run config",
            path=path,
            expected=f"`model` with {', '.join(_SIZES)}",
        )
    return BridgeRun(str(folder), config, _counters(confined(folder, TRAIN_STATE)))


def _counters(path: Path) -> dict[str, int]:
    content = torchfile.read(path).root
    found = {}
    for name in _COUNTERS:
        if isinstance(content, Mapping) and name not in content and name != "step":
            continue  # earlier versions lack it
        value = content.get(name) if isinstance(content, Mapping) else None
        count = read_scalar(value.extent) if isinstance(value, StoredTensor) else None
        if type(count) is not int or count < 0:
            raise CorruptError(
                "this is not a Megatron-Bridge training state", path=path, expected=f"{name}: a number",
                found=type(value).__name__ if count is None else repr(count),
            )  # fmt: skip
        found[name] = count
    return found


def args_of(run: BridgeRun, ranks: int, *, by_stages: bool) -> dict[str, Any]:
    """Return Megatron-LM arguments for `ranks` processes; the number is not recorded.

    If the files depend on stages (`by_stages`), raise CorruptError for unknown stages, LossError if layers may order
    their modules differently.
    """
    path = Path(run.folder) / RUN_CONFIG
    model: Mapping[str, Any] = run.config["model"]
    args = model_settings(model)
    for section, fields in _FIELDS.items():
        stated = run.config.get(section)
        if not isinstance(stated, Mapping):
            continue
        args |= {ours: _plain(value) for name, ours in fields.items() if (value := stated.get(name)) is not None}
    layers = _layers(model)
    args["transformer_impl"] = "local" if layers == _LOCAL else "transformer_engine"
    if layers not in _USUAL:
        if by_stages:
            raise LossError(
                "the optimizer's buffers follow the module order, but these layers' module order is unknown",
                path=path,
                expected=f"transformer_layer_spec: one of {', '.join(_USUAL)}",
                found=layers,
                hint="load and save it with Megatron-Bridge, checkpoint.dist_ckpt_optim_fully_reshardable=True",
            )
        args[_LAYERS] = _target(model[_LAYERS])
    if args.get("position_embedding_type") == "learned_absolute":
        args["max_position_embeddings"] = model.get("seq_length")
    args["untie_embeddings_and_output_weights"] = not model.get("share_embeddings_and_output_weights", True)
    if model.get("should_pad_vocab") is False:  # keep the exact row count
        args["make_vocab_size_divisible_by"] = 1
    if stages := _stages(path, model.get("pipeline_model_parallel_layout"), needed=by_stages):
        args["pipeline_model_parallel_layout"] = stages
    args |= {ours: run.counters[name] for name, ours in _COUNTERS.items() if name in run.counters}
    grid = Grid.recorded(args, path)
    context = args.get("context_parallel_size", 1)
    of_model = grid.tp * grid.pp * context if type(context) is int and context > 0 else 0
    if not of_model:
        raise CorruptError("context_parallel_size is not a valid size", path=path, found=repr(context))
    if ranks % of_model == 0:
        args |= {"world_size": ranks, "data_parallel_size": ranks // of_model}
    return args


def model_settings(model: Mapping[str, Any]) -> dict[str, Any]:
    stated = {name: value for name, value in model.items() if value is not None and name not in _READ_APART}
    args = {name: _plain(value) for name, value in stated.items()}
    for (
        field,
        arg,
    ) in _MODEL_FIELDS.items():  # two values keep their names; the comparison refuses them
        if field in args and args[field] == args.get(arg, args[field]):
            args[arg] = args.pop(field)
    layers = _target(model.get(_LAYERS))
    if layers is not None and not str(layers).startswith(_LIBRARIES):
        args[_LAYERS] = layers
    groups, heads = args.get("num_query_groups"), args.get("num_attention_heads")
    args["group_query_attention"] = groups is not None and groups != heads
    kind = _target(model.get("activation_func"))
    if kind and isinstance(gated := model.get("gated_linear_unit"), bool):
        args |= _activation(str(kind), gated=gated)
    if "scale_factor" in args:  # NeMo's Llama31Config
        args["use_rope_scaling"] = True
        if args["scale_factor"] == args.get("rope_scaling_factor", args["scale_factor"]):
            args["rope_scaling_factor"] = args.pop("scale_factor")
    return args


def with_sizes(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Add sizes that megatron-core computes from others (transformer_config.py, `__post_init__`)."""
    found, hidden, heads = dict(settings), settings.get("hidden_size"), settings.get("num_attention_heads")
    if type(hidden) is int and type(heads) is int and heads > 0:
        found.setdefault("kv_channels", hidden // heads)
        found.setdefault("ffn_hidden_size", 4 * hidden)
    return found


def _activation(kind: str, *, gated: bool) -> dict[str, Any]:
    name = kind.rpartition(".")[2]
    if name not in _ACTIVATIONS or (gated and name == "gelu"):
        return {"activation_func": kind}
    return {
        "swiglu": gated and name == "silu",
        "quick_geglu": gated and name == "quick_gelu",
        "squared_relu": name == "squared_relu",
    }


def _layers(model: Mapping[str, Any]) -> str:
    target = _target(model.get(_LAYERS))
    return _USUAL[1] if target is None else str(target).rpartition(".")[2]


def _target(stated: Any) -> Any:
    return stated.get("_target_") if isinstance(stated, Mapping) else stated


def _stages(path: Path, stated: Any, *, needed: bool) -> str | None:
    """Accept a text, or recipes' lists of names per stage."""
    if stated is None or isinstance(stated, str):
        return stated
    if isinstance(stated, list) and all(isinstance(stage, list) for stage in stated):
        letters = [[_LETTERS.get(str(name), "?") for name in stage] for stage in stated]
        if "?" not in (found := "|".join(map("".join, letters))):
            return found
    if needed:
        raise CorruptError(
            "the pipeline layout is not recorded in text form, but the optimizer's buffers follow it",
            path=path,
            expected="pipeline_model_parallel_layout like 'Et*3|t*4|t*3L'",
            found=repr(stated),
            hint="write the recipe's layout into the file",
        )
    return None


def _plain(value: Any) -> Any:
    """Return a dtype by its constructor's name, as stored."""
    if isinstance(value, Mapping):
        return str(value.get("_target_"))
    return value


def check_bridge_run(run: BridgeRun, iteration: object, shapes: Mapping[str, Shape]) -> None:
    """Raise CorruptError for another step or model."""
    if run.counters["step"] != iteration:
        raise CorruptError(
            "the training state is from a different step than the checkpoint",
            path=Path(run.folder) / TRAIN_STATE,
            expected=f"step {iteration}, from the common state",
            found=f"step {run.counters['step']}",
        )
    model: Mapping[str, Any] = run.config["model"]
    for name, found in _implied_fields(shapes, model):
        if (stated := model.get(name)) is not None and stated != found:
            raise CorruptError(
                "the run's config describes another model than the tensors",
                path=Path(run.folder) / RUN_CONFIG,
                expected=f"{name} {found}, from the tensors",
                found=f"{name} {stated}",
            )


def _implied_fields(shapes: Mapping[str, Shape], model: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    experts = {number for name in shapes if (number := expert_of(name)) is not None}
    if experts:
        yield "num_moe_experts", len(experts)
    yield "share_embeddings_and_output_weights", OUTPUT not in shapes
    if EMBEDDING in shapes:
        yield "hidden_size", shapes[EMBEDDING][1]
    if _layers(model) not in _USUAL or any(model.get(name) for name in _UNEQUAL):
        return  # layers may differ, or have no tensors
    layers = {int(name.split(".")[2]) for name in shapes if name.startswith("decoder.layers.")}
    yield "num_layers", len(layers)
    proj = shapes.get("decoder.layers.0.self_attention.linear_proj.weight")
    heads, width = model.get("num_attention_heads"), model.get("kv_channels")
    if proj and not model.get("multi_latent_attention") and type(heads) is int and type(width) is int and heads > 0:
        yield "kv_channels", proj[1] / heads
        rows = shapes.get("decoder.layers.0.self_attention.linear_qkv.weight")
        if rows and width > 0 and not model.get("attention_output_gate"):
            yield "num_query_groups", (rows[0] / width - heads) / 2
    dense = shapes.get("decoder.layers.0.mlp.linear_fc2.weight")
    if dense:
        yield "ffn_hidden_size", dense[1]


def note_on_class(model: Mapping[str, Any]) -> str | None:
    target = _target(model) if "_target_" in model else None
    if target is None or str(target).startswith(_LIBRARIES):
        return None
    return f"the model's class is {target}: its settings are read like those of a library's class"


def note_on_config(run: BridgeRun) -> str | None:
    hub = run.config["model"].get("hf_model_id")
    if not isinstance(hub, str):
        return None
    what = f"the run started from {hub} ({RUN_CONFIG}, hf_model_id)"
    return Note("{}; for the Hub's names, give this id or a folder to {config}", what)


def bridge_files(
    run: BridgeRun, model: MegatronModel, folder: str, beside: Sequence[TargetFile], *, random: bool
) -> Iterator[TargetFile]:
    """Yield all files. Without `random`, the config does not ask for random states."""
    import yaml

    source = Path(run.folder)
    config = dict(run.config)
    sizes = {**model.grid.args, "pipeline_model_parallel_layout": model.args.get("pipeline_model_parallel_layout")}
    sizes |= {
        theirs: model.args.get(ours)
        for theirs, ours in _MODEL_FIELDS.items()
        if ours.startswith(("decoder_first_", "decoder_last_", "account_for_"))
    }
    if model.grid.tp == 1:
        sizes["sequence_parallel"] = False  # needs tensor-parallel ranks
    stated: Mapping[str, Any] = config["model"]
    config["model"] = {**stated, **{name: value for name, value in sizes.items() if name in stated}}
    requested = {"save_rng": random, "save_optim": model.has_optimizer}
    if isinstance(saved := config.get("checkpoint"), Mapping):
        config["checkpoint"] = {**saved, **{name: False for name, kept in requested.items() if not kept}}
    text = yaml.safe_dump(config, default_flow_style=False)
    state = content_of(source, TRAIN_STATE)
    yield TargetFile.of_bytes(f"{folder}/{RUN_CONFIG}", text.encode())
    yield TargetFile.of_bytes(f"{folder}/{TRAIN_STATE}", state)
    yield TargetFile.of_bytes(LAST, state)
    tokenizer = source / RUN_TOKENIZER
    own = [name for name in names_in(tokenizer) if (tokenizer / name).is_file()] if tokenizer.is_dir() else []
    for name in own:
        yield TargetFile.of_bytes(f"{folder}/{RUN_TOKENIZER}/{name}", content_of(source, f"{RUN_TOKENIZER}/{name}"))
    yield from (file for file in beside if file.name not in own)


def notes_on(run: BridgeRun, model: MegatronModel) -> Iterator[str]:
    stated: Mapping[str, Any] = run.config["model"]
    before, now = Grid.of_args(model.checkpoint.state.args or {}), model.grid
    changed = [f"{name}={size}" for name, size in now.args.items() if before.args[name] != size]
    layout = "pipeline_model_parallel_layout"
    if stated.get(layout) is not None and model.args.get(layout) is None:
        changed.append(f"{layout}=None")
    if stated.get("sequence_parallel") and now.tp == 1:
        changed.append("sequence_parallel=False")
    if stated.get("pipeline_dtype") is None and now.pp > 1:
        changed.append("pipeline_dtype (unset in this run)")
    if changed:
        said = ", ".join(f"model.{one}" for one in changed)
        yield f"resume with {said}: Megatron-Bridge uses its own config, and {RUN_CONFIG} only records it"
