"""API of `ckpt merge-lora`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt import api
from ckpt.base.errors import UsageError
from ckpt.base.flags import others, takes
from ckpt.base.text import parse_size
from ckpt.base.words import Message
from ckpt.commands.merge_lora.effect import Merge, MergedModel
from ckpt.commands.merge_lora.find import check_one_base, open_adapter, open_base
from ckpt.commands.merge_lora.merge import plan
from ckpt.commands.merge_lora.options import Combining, Merged, MergeSource, Threads
from ckpt.commands.merge_lora.unmerged_files import without_ignored
from ckpt.move.listing import listed_once
from ckpt.move.workers import Resources
from ckpt.plan.checkpoint import Layout
from ckpt.plan.dtypes import CASTABLE
from ckpt.plan.groups import Watching, WriteOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckpt.plan.keywords import MergeLoraKeywords

_GROUPS = (MergeSource, Combining, Merged, Threads, WriteOptions, Watching)


@listed_once()
def planned(adapters: Sequence[str | PathLike[str]], options: Mapping[str, Any]) -> Merge:
    source, combining, merged = MergeSource.of(options), Combining.of(options), Merged.of(options)
    workers = Threads.of(options).workers
    api.WORKERS.check(workers)
    if not adapters:
        raise UsageError("there is no adapter to merge", expected="a path, or several", found=repr(adapters))
    config, base = (None if one is None else fspath(one) for one in (source.config, source.base))
    opened = [
        open_adapter(
            fspath(one),
            config=config,
            base=base,
            tag=source.tag,
            expert_layout=source.expert_layout,
            peft_version=source.peft_version,
            options=others(options, *_GROUPS),
            accept_settings=source.accept_settings,
        )
        for one in adapters
    ]
    if combining != Combining() and combining.adapter_weights is None:
        raise UsageError(
            Message("{combination}, {density} and {seed} say how adapters become one, and go with {adapter_weights}"),
            hint="without them, one adapter is merged after the other",
        )
    if not source.accept_base:
        check_one_base(opened)
    cast = CASTABLE.get(merged.dtype)
    model = open_base(opened[0], base, accept=source.accept_base, config=config)
    if merged.dequantize:
        model = api.dequantized(model, cast)
    found = without_ignored(opened, model, source.ignore_files or ())
    if (weights := combining.adapter_weights) is not None:
        from ckpt.commands.merge_lora.combine import combine

        found = [combine(found, weights, model, combining.combination or "svd", combining.density, combining.seed)]
    layout = Layout(cast, parse_size(merged.max_shard_size), names=merged.names)
    made = plan(found, model, layout, Resources(workers=workers), as_peft=merged.as_peft)
    made = replace(made, opened=tuple(opened), combined=tuple(found))
    made.to_json()  # also lists the base's folders
    return made


@takes(*_GROUPS, others=api.ReadOption)
def merge_lora(
    adapters: str | PathLike[str] | Sequence[str | PathLike[str]],
    output: str | PathLike[str],
    *,
    describe: Callable[[Path], Mapping[str, bytes]] | None = None,
    **options: Unpack[MergeLoraKeywords],
) -> MergedModel:
    """Merge a LoRA adapter into its base model without loading the model, and write it to `output`.

    Several adapters are merged one after the other. With `adapter_weights`, PEFT's `combination` makes them one first.

    The bits are PEFT's, except if only one of two tied weights changes. By default, the result is the trained model,
    with both weights. `as_peft` adds the change to both, like PEFT's `merge_and_unload`.

    Raises LossError if the merge would leave out trained weights in an adapter's folder, such as a value head.

    Args:
        adapters: PEFT folders, run folders (the newest adapter), sharded checkpoints, cached Hub ids.
        output: The folder or URL to write to.
        describe: Returns more files for the written folder: their content by name.
        base: The model to merge into, in any format; None for the recorded one.
        config: The folder with the adapter's config, or the config of a base without one.
        tag: The step's folder or number; None for the latest.
        accept_base: Merge into a base that the adapter does not name.
        expert_layout: Who packed stacked experts, if it is not recorded: `peft`, or `unsloth` before 2026.9.6.
        peft_version: PEFT release that trained the adapter, if none is recorded.
        accept_settings: Unknown settings to ignore.
        ignore_files: Files next to the adapter to leave out.
        adapter_weights: Weights for combining the adapters into one.
        combination: PEFT's `combination_type`.
        density: Fraction of weights kept by ties, dare and magnitude_prune.
        seed: Random seed for dare.
        dtype: Dtype of the weights: `keep`, `fp32`, `bf16` or `fp16`.
        dequantize: Merge into the plain values of quantized weights.
        max_shard_size: Largest weight file, in bytes or as `5GB`.
        names: `hub`, or `own` to write other names as they are.
        as_peft: Add a change of tied weights to both.
        workers: Number of copying threads; 0 chooses.
        manifest: Write digests to ckpt-manifest.json.
        overwrite: Replace a model at `output`.
        restart: Delete an interrupted run's files, and start again.
        verify: Read back and compare every bit.
        progress: Called with the number of new bytes.
        phase: Called with each phase's name and bytes.
        say: Called with each note.
        planned: Called with the checked `Merge`, before writing.
        **options: Options for reading, such as `adapter_slot="1:8:16"`.
    """
    several = [adapters] if isinstance(adapters, str | PathLike) else adapters
    conversion = planned(several, options)
    how = {} if describe is None else {"describe": describe}
    callbacks = Watching.of(options).callbacks(conversion)
    return conversion.write(output, **vars(WriteOptions.of(options)), **callbacks, **how)
