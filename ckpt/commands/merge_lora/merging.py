"""`ckpt merge-lora`: adapters and a base by their paths, and the merged model as a folder."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike, fspath
from typing import Any, Literal

from ckpt import api
from ckpt.base.errors import UsageError
from ckpt.base.sizes import parse_size
from ckpt.base.typed import typed
from ckpt.commands.merge_lora.effect import Merge, MergedModel
from ckpt.commands.merge_lora.find import Adapter, ExpertLayout, check_one_base, open_adapter, open_base
from ckpt.commands.merge_lora.merge import plan
from ckpt.commands.merge_lora.neighbours import without_ignored
from ckpt.move.listing import listed_once
from ckpt.move.workers import Resources
from ckpt.plan.checkpoint import Layout
from ckpt.plan.dtypes import CASTABLE


def planned(
    adapters: Sequence[Adapter],
    *,
    base: str | None,
    config: str | None,
    accept_base: bool,
    adapter_weights: Sequence[float] | None,
    combination: str | None,
    density: float | None,
    seed: int | None,
    dtype: api.Cast,
    dequantize: bool,
    max_shard_size: str | int,
    names: str,
    as_peft: bool,
    workers: int,
    ignored: Sequence[str] = (),
) -> tuple[Merge, Sequence[Adapter]]:
    """The merge of `adapters` into their base; with `adapter_weights` they become one first, which is returned too."""
    if adapter_weights is None and any(one is not None for one in (combination, density, seed)):
        raise UsageError(
            "--combination, --density and --seed say how adapters become one, and go with --adapter-weights",
            hint="without them, one adapter is merged after the other",
        )
    if not accept_base:
        check_one_base(adapters)
    model, cast = open_base(adapters[0], base, accept=accept_base, config=config), CASTABLE.get(dtype)
    if dequantize:
        model = api.dequantized(model, cast)
    adapters = without_ignored(adapters, model, ignored)
    if adapter_weights is not None:
        from ckpt.commands.merge_lora.combine import combine

        adapters = [combine(adapters, adapter_weights, model, combination or "svd", density, seed)]
    layout = Layout(cast, parse_size(max_shard_size), names=names)
    merge = plan(adapters, model, layout, Resources(workers=workers), as_peft=as_peft)
    merge.to_json()  # it lists the folders that were listed to open the base
    return merge, adapters


@typed
def merge_lora(
    adapters: str | PathLike[str] | Sequence[str | PathLike[str]],
    output: str | PathLike[str],
    *,
    base: str | PathLike[str] | None = None,
    config: str | PathLike[str] | None = None,
    tag: str | None = None,
    accept_base: bool = False,
    expert_layout: ExpertLayout | None = None,
    peft_version: str | None = None,
    accept_settings: Sequence[str] | None = None,
    ignore_files: Sequence[str] = (),
    adapter_weights: Sequence[float] | None = None,
    combination: str | None = None,
    density: float | None = None,
    seed: int | None = None,
    dtype: api.Cast = "keep",
    dequantize: bool = False,
    max_shard_size: str | int = "5GB",
    names: Literal["hub", "own"] = "hub",
    as_peft: bool = False,
    workers: int = 0,
    verify: bool = False,
    overwrite: bool = False,
    restart: bool = False,
    manifest: bool = True,
    progress: api.Progress | None = None,
    **options: api.ReadOption,
) -> MergedModel:
    """Merge a LoRA adapter into its base model without loading the model, and write it to `output`.

    An adapter is a PEFT folder, a run folder (its newest adapter), a sharded checkpoint, or a Hub id in the cache; of
    several one is merged after the other, or with `adapter_weights` they become one by PEFT's `combination`.  `base` is
    the model to merge into, in any format, failing that the one that was trained on; `accept_base` merges though it is
    not the one that the adapter names.  `expert_layout` says who packed an adapter of stacked experts, PEFT or
    Unsloth before 2026.9.6, where nothing records it.  `options` are for `ckpt.open`.  `peft_version` is the
    release of PEFT that trained an adapter, if its config records none; `accept_settings` names unknown entries of
    `adapter_config.json` that are ignored.

    Raises LossError if a file in an adapter's folder holds trained weights that are not merged, such as a value head;
    `ignore_files` names files to leave out.

    The bits are PEFT's.  A change of one of two tied weights is the exception: the default writes the model that was
    trained, with both weights, and `as_peft` adds the change to both, as PEFT's `merge_and_unload` does.

    Args:
        adapters: Adapters: folders, checkpoints or Hub ids in the cache.
        output: The folder or URL to write to.
        base: The model to merge into; None for the recorded one.
        config: The folder with the adapter's config, or the config of a base without one.
        tag: The step's folder or number; None for the latest.
        accept_base: Merge into a base that the adapter does not name.
        expert_layout: Who packed stacked experts: `peft` or `unsloth`.
        peft_version: PEFT release that trained the adapter, if none is recorded.
        accept_settings: Recorded settings to ignore, by name.
        ignore_files: Files next to the adapter to leave out.
        adapter_weights: Weights of adapters that are combined into one.
        combination: PEFT's `combination_type` for several adapters.
        density: Fraction of weights kept by ties, dare and magnitude_prune.
        seed: Random seed for dare.
        dtype: Precision of weights: `keep`, `fp32`, `bf16` or `fp16`.
        dequantize: Take the plain values of quantized weights.
        max_shard_size: Largest weight file, in bytes or as `5GB`.
        names: `hub`, or `own` to write other names as they are.
        as_peft: Add a change of tied weights to both, as PEFT does.
        workers: Threads that copy; 0 chooses.
        verify: Read back and compare every bit that was written.
        overwrite: Replace a model at `output`.
        restart: Clear what a stopped run has kept, and begin anew.
        manifest: Write digests of the output to ckpt-manifest.json.
        progress: Called with the number of bytes since the last call.
        **options: Options for reading, such as `adapter_slot="1:8:16"`.
    """
    api.WORKERS.check(workers)
    several = [adapters] if isinstance(adapters, str | PathLike) else adapters
    if not several:
        raise UsageError("there is no adapter to merge", expected="a path, or several", found=repr(adapters))
    place = None if config is None else fspath(config)
    model = None if base is None else fspath(base)
    asked: dict[str, Any] = {"tag": tag, "expert_layout": expert_layout, "options": options, "base": model}
    asked |= {"peft_version": peft_version, "accept_settings": accept_settings}
    with listed_once():
        conversion, _ = planned(
            [open_adapter(fspath(one), config=place, **asked) for one in several],
            base=model,
            config=place,
            accept_base=accept_base,
            adapter_weights=adapter_weights,
            combination=combination,
            density=density,
            seed=seed,
            dtype=dtype,
            dequantize=dequantize,
            max_shard_size=max_shard_size,
            names=names,
            as_peft=as_peft,
            workers=workers,
            ignored=ignore_files,
        )
    how = {"overwrite": overwrite, "restart": restart, "progress": progress}
    return conversion.write(output, manifest=manifest, verify=verify, **how)
