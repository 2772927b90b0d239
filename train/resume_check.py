"""Whether a resumed run is what its checkpoint's record says: the settings, each rank's live state, the first losses.

What may differ is what a conversion changes: strategy, ranks, layout, file formats. Where the ranks differ, random
states and the ranks' own states cannot be held against each other, and the settings, positions and dropout still are.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from train import memory, randomness
from train.config import Config, read_ds_config
from train.records import Record

#: Options that say what is computed. All others say where, by whom and how long, or how the files are laid out.
SETTINGS = (
    *("model", "dtype", "precision", "dropout", "batch", "length", "seed", "optimizer", "scheduler", "schedule_steps"),
    *("lr", "weight_decay", "freeze", "lora", "vocab", "layers", "mtp_layers"),
)
#: The entries of a DeepSpeed config that change the computation; the rest is about places.
_DS_CONFIG = ("gradient_clipping", "optimizer", "scheduler", "fp16", "bf16", "data_types", "train_batch_size")
#: Losses that are held against those recorded.
FIRST = 3
#: How far they may be from those, of their value: on other ranks, and on GPUs, sums are made in another order.
TOLERANCE = {"fp32": 3e-6, "bf16": 1e-3, "fp16": 1e-3}


def settings(config: Config) -> dict[str, Any]:
    """What a run computes, by option; the same on every rank."""
    found = {name: getattr(config, name) for name in SETTINGS}
    asked = read_ds_config(config.ds_config)
    return _plain(found | {"ds_config": {key: asked[key] for key in _DS_CONFIG if key in asked}})


def live(engine: Any) -> dict[str, Any]:
    """What this rank's engine is set to, read from its own objects and not from the options."""
    inner = getattr(engine, "engine", None)  # DeepSpeed's
    modules = getattr(engine, "chunks", None) or [engine.model if inner is None else inner.module]
    optimizers = getattr(engine, "optimizers", [engine.optimizer])
    plain = [inner.basic_optimizer] if inner is not None else [getattr(one, "optimizer", one) for one in optimizers]
    scheduler = engine.scheduler if inner is None else inner.lr_scheduler
    scalers = [getattr(one, "loss_scaler", None) or getattr(one, "grad_scaler", None) for one in optimizers]
    return _plain(
        {
            "param_groups": [
                {k: v for k, v in group.items() if k not in ("params", "step")}
                for group in engine.optimizer.param_groups
            ],
            "scheduler": scheduler.state_dict() if scheduler is not None else None,
            "scaler": [_state(scaler) for scaler in scalers if scaler is not None],
            "dropout": dropout(modules),
            "dtype": {
                "parameters": sorted({str(p.dtype) for module in modules for p in module.parameters()}),
                "optimizer": sorted({str(state.dtype) for one in plain for state in memory.states_of(one)}),
            },
            # Python's and numpy's, from which no step draws, are not in every engine's checkpoints.
            "rng": {name: digest(state) for name, state in randomness.of_torch().items()},
        }
    )


def dropout(modules: list[Any]) -> dict[str, list[float]]:
    """The probabilities in use, by the name of the attribute that holds them: modules' `p`, `attention_dropout`, ..."""
    found: dict[str, set[float]] = {}
    for module in (inner for outer in modules for inner in outer.modules()):
        for name, value in vars(module).items():
            named = "dropout" in name or "pdrop" in name or (name == "p" and "Dropout" in type(module).__name__)
            if named and isinstance(value, (int, float)):
                found.setdefault("Dropout" if name == "p" else name, set()).add(float(value))
    return {name: sorted(values) for name, values in sorted(found.items())}


def digest(tensor: torch.Tensor) -> str:
    """16 hex digits of a tensor's bytes."""
    return hashlib.blake2b(tensor.contiguous().cpu().numpy().tobytes(), digest_size=8).hexdigest()


def same_ranks(record: Record, config: Config, world_size: int) -> bool:
    """Whether every rank is what it was, so that the ranks' own states can be compared."""
    layout = ("strategy", "tp", "pp", "vpp", "ep", "etp")
    now = {name: getattr(config, name) for name in layout}
    return record.facts["world_size"] == world_size and record.facts["layout"] == now


def state_problems(record: Record, config: Config, engine: Any, ranks: list[dict[str, Any]]) -> list[str]:
    """What differs from the record and should not, a line each; `ranks` is `live` of every rank."""
    facts = record.facts
    found = [f"{name}: {a} recorded, {b} now" for name, a, b in differences(facts["settings"], settings(config))]
    for name, now in (("step", engine.step), ("sequences (the position in the data)", engine.sequences)):
        recorded = facts[name.partition(" ")[0]]
        if recorded != now:
            found.append(f"{name}: {recorded} recorded, {now} now")
    if same_ranks(record, config, len(ranks)):
        for rank, (a, b) in enumerate(zip(facts["ranks"], ranks, strict=True)):
            found += [f"{name} of rank {rank}: {x} recorded, {y} now" for name, x, y in differences(a, b)]
    else:
        a, b = (_united([rank["dropout"] for rank in side]) for side in (facts["ranks"], ranks))
        # Engines that build a model of their own have other modules.
        both = a.keys() & b.keys()
        found += [f"dropout.{name}: {a[name]} recorded, {b[name]} now" for name in sorted(both) if a[name] != b[name]]
    return found


def differences(a: Any, b: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two values of JSON differ, by dotted name."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys((*a, *b)):
            yield from differences(a.get(key), b.get(key), f"{name}.{key}" if name else key)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b) and any(isinstance(x, dict) for x in a):
        for number, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from differences(x, y, f"{name}[{number}]")
    elif a != b and not (a in (None, {}) and b in (None, {})):
        yield name, a, b


def recorded_losses(log: Path, after: int) -> dict[int, dict[str, Any]]:
    """The log's lines of the steps after `after`, as last written."""
    found: dict[int, dict[str, Any]] = {}
    if log.is_file():
        for text in log.read_text().splitlines():
            try:
                line = json.loads(text)
            except ValueError:  # cut off when the run was killed
                continue
            if line["step"] > after:
                found[line["step"]] = line
    return found


def loss_problem(line: dict[str, Any], recorded: dict[str, Any], dtype: str) -> str | None:
    """What is wrong with a step's line, held against that of the same step before the stop."""
    if line["sequences"] != recorded["sequences"]:  # batches are left out now, or are of another size
        return None
    step = f"step {line['step']}"
    if line["data"] != recorded["data"]:
        first, stop = line["sequences"]
        return f"data: sequences {first} to {stop} of {step} are others than those recorded"
    if not math.isclose(line["loss"], recorded["loss"], rel_tol=TOLERANCE[dtype]):
        return f"loss of {step}: {recorded['loss']:.6f} recorded, {line['loss']:.6f} now, for the same batch"
    return None


def _state(scaler: Any) -> dict[str, Any]:
    return dict(scaler.state_dict()) if hasattr(scaler, "state_dict") else dict(vars(scaler))


def _united(parts: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    names = sorted({name for part in parts for name in part})
    return {name: sorted({value for part in parts for value in part.get(name, ())}) for name in names}


def _plain(value: Any) -> Any:
    """The part of a value that JSON can hold, as it comes back from there."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items() if _is_plain(entry)}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value if _is_plain(entry)]
    return value.item() if torch.is_tensor(value) else value


def _is_plain(value: Any) -> bool:
    if torch.is_tensor(value):
        return value.numel() == 1
    return value is None or isinstance(value, (bool, int, float, str, dict, list, tuple))
