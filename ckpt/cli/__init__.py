"""The command `ckpt`.  Data goes to stdout, everything else to stderr.

Exit codes: 0 done or equal; 1 verified and different; 2 usage; 3 not found or not recognised; 4 corrupt or incomplete;
5 refused as unsafe; 6 would lose information; 7 I/O or no space; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ckpt import __version__, registry
from ckpt.cli import quick
from ckpt.errors import CkptError, CorruptError, UsageError, printable
from ckpt.sizes import parse_size, show_size

if TYPE_CHECKING:
    from ckpt.api import Conversion
    from ckpt.hub.push import Push, Pushed
    from ckpt.move.run import Progress
    from ckpt.plan.checkpoint import Checkpoint

INTERRUPTED = 130
DIFFERENT = 1


class DTypeOption(str, Enum):
    """What `--dtype` takes."""

    keep = "keep"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class TrainDType(str, Enum):
    """What a model may compute in."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


class Optimizer(str, Enum):
    """What `estimate --optimizer` takes."""

    adam = "adam"
    adamw = "adamw"
    lion = "lion"
    momentum = "momentum"
    sgd = "sgd"


class TransformerImpl(str, Enum):
    """What `--transformer-impl` takes, as Megatron-LM's own option."""

    local = "local"
    transformer_engine = "transformer_engine"


class Only(str, Enum):
    """What `--only` takes."""

    weights = "weights"
    optimizer = "optimizer"
    all = "all"


def _dashes(name: str) -> str:
    """Options may be typed with underscores, as DeepSpeed's and Accelerate's users do."""
    return name.replace("_", "-")


app = typer.Typer(
    name="ckpt",
    help="Convert, verify and inspect checkpoints of large models, bit for bit, without a GPU.",
    context_settings={"token_normalize_func": _dashes, "help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Function = TypeVar("Function", bound=Callable[..., Any])


def _guarded(function: Function) -> Function:
    """Turn our errors into one message on stderr and their exit code; a user's mistake gets no traceback."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        from ckpt.move.files import translate_os_errors

        try:
            with translate_os_errors():
                function(*args, **kwargs)
                sys.stdout.flush()
        except CkptError as error:
            if isinstance(error.__cause__, BrokenPipeError):  # whoever read our output has seen enough
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            else:
                print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt as interrupt:
            print(*(interrupt.args or ["interrupted; the destination is as it was"]), file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None

    return run  # type: ignore[return-value]


PathArgument = Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint, or the run folder it lies in.")]
TagOption = Annotated[str | None, typer.Option(help="The step folder to take, instead of the one recorded as latest.")]
ConfigOption = Annotated[
    str | None, typer.Option(help="The model's config and tokenizer: a folder, a config.json or a Hub id.")
]
ReplicaOption = Annotated[
    int | None, typer.Option(metavar="RANK", help="Where ranks hold copies that disagree, take this rank's.")
]
ManifestOption = Annotated[
    bool,
    typer.Option(help="Write ckpt-manifest.json, the digests of what was written, for `ckpt verify`."),
]
DequantizeOption = Annotated[
    bool,
    typer.Option("--dequantize", help="Take the plain values of quantized weights (MXFP4, bitsandbytes, FP8)."),
]
RepoOption = Annotated[
    str | None,
    typer.Option("--repo-id", metavar="ORG/NAME", help="The repository on the Hub. [default: the run's hub_model_id]"),
]
PrivateOption = Annotated[bool, typer.Option("--private", help="Make a new repository private.")]
RevisionOption = Annotated[
    str | None, typer.Option(metavar="BRANCH", help="The branch to push to, made where it is missing.")
]
PullRequestOption = Annotated[bool, typer.Option("--create-pr", help="Push as a pull request against main.")]
MessageOption = Annotated[str | None, typer.Option("--commit-message", metavar="TEXT", help="Of the Hub's commit.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
QuietOption = Annotated[bool, typer.Option("-q", "--quiet", help="Print errors only.")]
VerboseOption = Annotated[bool, typer.Option("-v", "--verbose", help="Print every tensor or file.")]


@app.command()
@_guarded
def convert(
    source: Annotated[str, typer.Argument(metavar="FROM", help="The format to read, or auto; see `ckpt formats`.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="The format to write.")],
    path: PathArgument,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The folder to write. [default: PATH-TO, beside PATH]")
    ] = None,
    tag: TagOption = None,
    config: ConfigOption = None,
    dtype: Annotated[
        DTypeOption,
        typer.Option(help="Precision of weights: keep the model's own, or cast. fp32 takes the optimizer's masters."),
    ] = DTypeOption.keep,
    dequantize: DequantizeOption = False,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest size of one weight file.")] = "5GB",
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Ranks of a sharded target. [default: as many as the source has]")
    ] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor parallel size of a Megatron target.")] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="Pipeline parallel size of a Megatron target.")] = None,
    ep: Annotated[int | None, typer.Option(min=1, help="Expert parallel size of a Megatron target.")] = None,
    vpp: Annotated[
        int | None, typer.Option(min=1, help="Virtual pipeline size: model chunks on each pipeline rank.")
    ] = None,
    etp: Annotated[int | None, typer.Option(min=1, help="Expert tensor parallel size. [default: as --tp]")] = None,
    decoder_first_pipeline_num_layers: Annotated[
        int | None, typer.Option(min=1, help="Layers of the first pipeline stage, where stages differ.")
    ] = None,
    decoder_last_pipeline_num_layers: Annotated[
        int | None, typer.Option(min=1, help="Layers of the last pipeline stage, where stages differ.")
    ] = None,
    account_for_embedding_in_pipeline_split: Annotated[
        bool,
        typer.Option(
            "--account-for-embedding-in-pipeline-split", help="Count the embedding as a layer of the first stage."
        ),
    ] = False,
    account_for_loss_in_pipeline_split: Annotated[
        bool, typer.Option("--account-for-loss-in-pipeline-split", help="Count the loss as a layer of the last stage.")
    ] = False,
    transformer_impl: Annotated[
        TransformerImpl | None,
        typer.Option(help="Layers of a Megatron target's model. [default: the source's, or transformer_engine]"),
    ] = None,
    pipeline_model_parallel_layout: Annotated[
        str | None, typer.Option(metavar="LAYOUT", help="The stages as Megatron writes them, like 'Et*3|t*4|t*3L'.")
    ] = None,
    make_vocab_size_divisible_by: Annotated[
        int | None,
        typer.Option(
            min=1, help="A Megatron target's vocabulary is padded to a multiple of it times tp. [default: 128]"
        ),
    ] = None,
    replica: ReplicaOption = None,
    max_memory: Annotated[str, typer.Option(metavar="SIZE", help="Bound on all buffers together.")] = "512MB",
    workers: Annotated[int, typer.Option(min=0, help="Threads that move data. 0: by the processors.")] = 0,
    manifest: ManifestOption = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
    as_json: JsonOption = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint at the output.")] = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Convert a checkpoint from one format to another."""
    from ckpt import api
    from ckpt.move.files import check_destination
    from ckpt.move.run import Resources
    from ckpt.plan.checkpoint import Layout
    from ckpt.plan.dtypes import CASTABLE

    destination = output or default_output(path, target)
    check_destination(destination, path)
    layout = Layout(
        CASTABLE.get(dtype.value),
        parse_size(max_shard_size),
        world_size,
        tp=tp,
        pp=pp,
        ep=ep,
        vpp=vpp,
        etp=etp,
        decoder_first_pipeline_num_layers=decoder_first_pipeline_num_layers,
        decoder_last_pipeline_num_layers=decoder_last_pipeline_num_layers,
        account_for_embedding_in_pipeline_split=account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=account_for_loss_in_pipeline_split,
        pipeline_model_parallel_layout=pipeline_model_parallel_layout,
        transformer_impl=transformer_impl.value if transformer_impl else None,
        make_vocab_size_divisible_by=make_vocab_size_divisible_by,
    )
    checkpoint: Checkpoint = api.open(path, source, tag=tag, config=config, replica=replica)
    if dequantize:
        checkpoint = api.dequantized(checkpoint, layout.dtype)
    conversion = api.plan(checkpoint, target, layout, Resources(parse_size(max_memory), workers))
    if not quiet:
        _say_source(checkpoint)
    if dry_run:
        report = plan_report(conversion, destination)
        print(json.dumps(report, indent=2) if as_json else "\n".join(plan_lines(report, verbose)))
        return
    with progress_bar(conversion.plan.moved_bytes, quiet) as progress:
        conversion.run(destination, overwrite=overwrite, progress=progress, manifest=manifest)
    if not quiet:
        for line in _outcome(conversion, destination, manifest):
            print(line, file=sys.stderr)
    print(json.dumps(plan_report(conversion, destination), indent=2) if as_json else printable(str(destination)))


@app.command("merge-lora")
@_guarded
def merge_lora(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ADAPTER]...",
            help="A PEFT folder, a run folder (its newest adapter), a sharded checkpoint, or a Hub id in the cache. "
            "[default: this folder]",
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(help="The model to merge into: any format, or a Hub id. [default: the one trained on]"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The folder to write. [default: ADAPTER-merged, beside it]")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option("--adapter-weights", metavar="W,...", help="Weights by which several adapters become one."),
    ] = None,
    combination: Annotated[
        str, typer.Option(help="How they do: linear, cat, svd, ties, dare_linear, ... as PEFT calls it.")
    ] = "svd",
    density: Annotated[
        float | None, typer.Option(help="Of ties, dare and magnitude_prune: the part that is kept.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of dare, which drops at random.")] = None,
    config: Annotated[
        str | None, typer.Option(help="The folder with adapter_config.json, where it is not with the weights.")
    ] = None,
    tag: TagOption = None,
    dtype: Annotated[DTypeOption, typer.Option(help="Precision of the base that is merged into.")] = DTypeOption.keep,
    dequantize: DequantizeOption = False,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest size of one weight file.")] = "5GB",
    accept_base: Annotated[
        bool, typer.Option("--accept-base", help="Merge though the base is not the one that the adapter names.")
    ] = False,
    workers: Annotated[int, typer.Option(min=0, help="Threads that move data. 0: by the processors.")] = 0,
    manifest: ManifestOption = True,
    push: Annotated[bool, typer.Option("--push", help="Push the result to the Hub, and verify what arrived.")] = False,
    repo_id: RepoOption = None,
    private: PrivateOption = False,
    revision: RevisionOption = None,
    create_pr: PullRequestOption = False,
    commit_message: MessageOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
    as_json: JsonOption = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint at the output.")] = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Merge a LoRA adapter into its base model, as PEFT does, without loading the model."""
    from ckpt import api
    from ckpt.lora import find as adapters
    from ckpt.lora import merge as lora
    from ckpt.move.run import Resources
    from ckpt.plan.checkpoint import Layout
    from ckpt.plan.dtypes import CASTABLE

    wanted = sources or ["."]
    destination = output or default_output(Path(wanted[0]), "merged")
    found = [adapters.open_adapter(where, config=config, tag=tag) for where in wanted]
    if not push and (repo_id or private or revision or create_pr or commit_message):
        raise UsageError("--repo-id, --private, --revision, --create-pr and --commit-message go with --push")
    to = None
    if push:
        from ckpt.hub import push as hub

        repo_id = repo_id or hub.recorded_repo([found[0].folder, Path(wanted[0])])
        to = hub.Push(repo_id, private, revision, create_pr, commit_message)
    made_of = [one.path for one in found]
    model = adapters.open_base(found[0], base, accept=accept_base)
    if dequantize:
        model = api.dequantized(model, CASTABLE.get(dtype.value))
    if weights is not None:
        from ckpt.lora.combine import combine

        found = [combine(found, parse_weights(weights), model, combination, density, seed)]
    layout = Layout(CASTABLE.get(dtype.value), parse_size(max_shard_size))
    conversion = lora.plan(found, model, layout, Resources(workers=workers))
    if not quiet:
        for one in found:
            for note in one.notes:
                print(f"note: {printable(note)}", file=sys.stderr)
        _say_source(model, "merging into ")
    if dry_run:
        report = plan_report(conversion, destination)
        print(json.dumps(report, indent=2) if as_json else "\n".join(plan_lines(report, verbose)))
        return
    facts = {"base": base or found[0].config.base or model.path, "adapters": ", ".join(made_of)}
    describe = functools.partial(_merge_card, to, facts, found[0].config.base)
    with progress_bar(conversion.plan.moved_bytes, quiet) as progress:
        conversion.run(destination, overwrite=overwrite, progress=progress, manifest=manifest, describe=describe)
    if not quiet:
        for line in _outcome(conversion, destination, manifest):
            print(line, file=sys.stderr)
    report = plan_report(conversion, destination)
    if to is not None:
        report["pushed"] = _push(destination, to, None, quiet).to_json()
    print(json.dumps(report, indent=2) if as_json else printable(str(destination)))
    if to is not None and not as_json:
        print(printable(report["pushed"]["url"]))


def _merge_card(to: Push | None, facts: dict[str, str], base: str | None, folder: Path) -> dict[str, bytes]:
    """The model card of what was merged into `folder`, if it is going to be pushed."""
    from ckpt import api
    from ckpt.hub import push as hub

    if to is None:
        return {}
    digests = api.digests(api.open(folder, "hf")).whole
    card = hub.model_card(to.repo_id.rpartition("/")[2], facts, digests, ["ckpt", *sys.argv[1:]], base)
    return {hub.CARD: card.encode()}


def _push(folder: Path, to: Push, card: str | None, quiet: bool) -> Pushed:
    from ckpt.hub import push as hub

    def say(text: str) -> None:
        if not quiet:
            print(printable(text), file=sys.stderr)

    pushed = hub.push(folder, to, card=card, say=say, progress=not quiet and sys.stderr.isatty())
    say(f"verified: {_files(pushed.num_files)}, {show_size(pushed.num_bytes)}, on the Hub as they are here")
    return pushed


@app.command()
@_guarded
def push(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The folder to push, all of it.")],
    repo_id: RepoOption = None,
    private: PrivateOption = False,
    revision: RevisionOption = None,
    create_pr: PullRequestOption = False,
    commit_message: MessageOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Push a folder to the Hugging Face Hub, and verify the checksums of what arrived. Run it again to go on."""
    from ckpt import api
    from ckpt.hub import push as hub

    to = hub.Push(repo_id or hub.recorded_repo([path]), private, revision, create_pr, commit_message)
    card = None
    if path.is_dir() and not (path / hub.CARD).exists():
        checkpoint = api.open(path)
        facts = {"format": checkpoint.format}
        digests = api.digests(checkpoint).whole
        card = hub.model_card(to.repo_id.rpartition("/")[2], facts, digests, ["ckpt", *sys.argv[1:]])
    pushed = _push(path, to, card, quiet)
    print(json.dumps(pushed.to_json(), indent=2) if as_json else printable(pushed.url))


@app.command()
@_guarded
def verify(
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint or run folder.")],
    b: Annotated[Path | None, typer.Argument(metavar="B", help="Another, of any format.")] = None,
    from_a: Annotated[str, typer.Option(metavar="FORMAT", help="The format of A.")] = "auto",
    from_b: Annotated[str, typer.Option(metavar="FORMAT", help="The format of B.")] = "auto",
    tag_a: Annotated[str | None, typer.Option(metavar="TAG", help="The step folder of A.")] = None,
    tag_b: Annotated[str | None, typer.Option(metavar="TAG", help="The step folder of B.")] = None,
    config: ConfigOption = None,
    only: Annotated[Only, typer.Option(help="Compare only these tensors.")] = Only.all,
    cast: Annotated[
        bool, typer.Option("--cast", help="Where dtypes differ, round the wider to the narrower, then compare.")
    ] = False,
    loads: Annotated[
        bool, typer.Option("--loads", help="Have transformers load A without data, and report what is wrong with it.")
    ] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Compare two checkpoints bit by bit, or a folder with its manifest. Exit code 0: equal, 1: different."""
    from ckpt import api

    if loads:
        if b is not None:
            raise UsageError("--loads takes one folder", found=f"{a} and {b}")
        _verify_loads(a, as_json, quiet)
        return
    if b is None:
        _verify_manifest(a, as_json, quiet)
        return
    one = api.open(a, from_a, tag=tag_a, config=config)
    other = api.open(b, from_b, tag=tag_b, config=config)
    if not quiet:
        _say_source(one, "A: ")
        _say_source(other, "B: ")
    total = sum(tensor.nbytes for tensor in one.tensors.values())
    with progress_bar(total, quiet) as progress:
        report = api.verify(one, other, only=only.value, cast=cast, progress=progress)
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
    elif not quiet:
        print("\n".join(report.lines(verbose)))
    if not report.equal:
        raise typer.Exit(DIFFERENT)


def _verify_loads(path: Path, as_json: bool, quiet: bool) -> None:
    from ckpt.verify.transformers_loads import check_loads

    loading = check_loads(path)
    if as_json:
        print(json.dumps(loading.to_json(), indent=2))
    elif not quiet:
        print("\n".join(loading.lines()))
    if not loading.good:
        raise typer.Exit(DIFFERENT)


def _verify_manifest(path: Path, as_json: bool, quiet: bool) -> None:
    from ckpt.verify import manifest

    with progress_bar(manifest.expected_bytes(path), quiet) as progress:
        checked = manifest.check(path, registry.all_formats(), progress)
    if as_json:
        print(json.dumps(checked.to_json(), indent=2))
    elif not quiet:
        print("\n".join(checked.lines()))
    if not checked.good:
        raise typer.Exit(DIFFERENT)


@app.command("hash")
@_guarded
def hash_(
    path: PathArgument,
    format: Annotated[str, typer.Option(help="The format to read.")] = "auto",
    tag: TagOption = None,
    config: ConfigOption = None,
    dtype: Annotated[
        DTypeOption, typer.Option(help="Precision in which weights count: the model's own, or as `convert` casts them.")
    ] = DTypeOption.keep,
    tensors: Annotated[bool, typer.Option("--tensors", help="Print the digest of every tensor too.")] = False,
    workers: Annotated[int, typer.Option(min=0, help="Threads that read. 0: by the processors.")] = 0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Print digests of what a checkpoint holds: the same whatever its format, sharding and order of files."""
    from ckpt import api
    from ckpt.plan.dtypes import CASTABLE
    from ckpt.verify.digest import ALGORITHM

    checkpoint = api.open(path, format, tag=tag, config=config)
    if not quiet:
        _say_source(checkpoint)
    with progress_bar(sum(tensor.nbytes for tensor in checkpoint.tensors.values()), quiet) as progress:
        found = api.digests(checkpoint, dtype=CASTABLE.get(dtype.value), workers=workers, progress=progress)
    if as_json:
        content = {"algorithm": ALGORITHM, "digests": found.whole, "tensors": [t.to_json() for t in found.tensors]}
        print(json.dumps(content, indent=2))
        return
    for kind, digest in found.whole.items():
        print(f"{ALGORITHM}:{digest}  {kind}  ({len(found.of_kind(kind))} tensors)")
    if tensors:
        for tensor in found.tensors:
            print(printable(f"{tensor.digest}  {tensor.role}  {tensor.fqn}  {tensor.dtype} {list(tensor.shape)}"))


@app.command()
@_guarded
def inspect(
    path: PathArgument,
    format: Annotated[str, typer.Option(help="The format to read.")] = "auto",
    tag: TagOption = None,
    config: ConfigOption = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    picture: Annotated[
        Path | None, typer.Option(metavar="OUT.svg", help="Draw who holds what; exit code 4 if something is damaged.")
    ] = None,
    only: Annotated[Only, typer.Option(help="Draw only these tensors.")] = Only.all,
    as_json: JsonOption = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing picture.")] = False,
) -> None:
    """Show what a checkpoint holds, and with --picture which ranks hold which parts of it."""
    from ckpt import api
    from ckpt.show import overview as inspection

    if picture is None and (only is not Only.all or overwrite):
        raise UsageError("--only and --overwrite go with --picture")
    checkpoint = api.open(path, format, tag=tag, config=config)
    damaged = _draw(checkpoint, picture, only, overwrite) if picture is not None else None
    if as_json:
        print(json.dumps(inspection.describe(checkpoint, tensors=tensors), indent=2))
    else:
        print("\n".join(inspection.lines(checkpoint, tensors=tensors)))
    if damaged is not None:
        sys.stdout.flush()
        raise damaged


def _draw(checkpoint: Checkpoint, picture: Path, only: Only, overwrite: bool) -> CorruptError | None:
    """Write the picture; the error is about what is damaged."""
    from ckpt import api
    from ckpt.move import files
    from ckpt.show.svg import draw

    files.check_destination(picture, Path(checkpoint.path))
    drawn = api.picture(checkpoint, only.value)
    files.write_file(picture, draw(drawn, checkpoint).encode(), overwrite=overwrite)
    if not drawn.damaged:
        return None
    first, count = drawn.damaged[0], len(drawn.damaged)
    what = "what is stored of a tensor" if count == 1 else f"what is stored of each of {count} tensors"
    return CorruptError(
        f"{what} does not make it up exactly once",
        path=checkpoint.path,
        fqn=first.fqn,
        expected="fragments that tile every tensor",
        found=f"{first.role}: {'; '.join(first.faults[:4])}",
        hint=f"{picture} shows in red where",
    )


@app.command("estimate")
@_guarded
def estimate_(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A config.json or its folder, a Hub id, or a checkpoint.")
    ],
    strategy: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this; may be given again. [default: all in a table]")
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="How many there are.")] = 1,
    gpu_memory: Annotated[str, typer.Option(metavar="SIZE", help="Of each.")] = "80GB",
    dtype: Annotated[TrainDType, typer.Option(help="What the model computes in.")] = TrainDType.bf16,
    pure: Annotated[
        bool, typer.Option("--pure", help="ddp, fsdp: all in --dtype, instead of float32 parameters and autocast.")
    ] = False,
    optimizer: Annotated[Optimizer, typer.Option(help="Two states for each parameter, one, or none.")] = Optimizer.adam,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences of a micro batch of one GPU.")] = 1,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 4096,
    tp: Annotated[int | None, typer.Option(min=1, help="megatron: tensor parallel size.")] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="megatron: pipeline parallel size.")] = None,
    ep: Annotated[int | None, typer.Option(min=1, help="megatron: expert parallel size.")] = None,
    lora_r: Annotated[int, typer.Option("--lora-r", min=0, help="Train LoRA adapters of this rank. 0: the model.")] = 0,
    lora_target_modules: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Modules with adapters. [default: all linear layers]")
    ] = None,
    qlora: Annotated[bool, typer.Option("--qlora", help="The frozen model's linear layers in 4 bits.")] = False,
    ds_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="zero: sizes of buffers, from a DeepSpeed config.")
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Estimate what each GPU will hold in training, by strategy, and suggest one that fits."""
    from ckpt.estimate import table as sizing
    from ckpt.estimate.memory import STRATEGIES, Setup, Zero

    for name in strategy or ():
        if name not in STRATEGIES:
            raise UsageError(f"there is no strategy called {name!r}", expected="one of " + ", ".join(STRATEGIES))
    if (lora_target_modules or qlora) and not lora_r:
        raise UsageError("--lora-target-modules and --qlora go with --lora-r")
    if (tp or pp or ep) and strategy and "megatron" not in strategy:
        raise UsageError("--tp, --pp and --ep are of the strategy megatron", found=", ".join(strategy))
    setup = Setup(
        gpus,
        dtype.value,
        not pure,
        optimizer.value,
        batch_size,
        seq_len,
        lora_r,
        tuple(lora_target_modules.split(",")) if lora_target_modules else None,
        qlora,
        sizing.read_zero(ds_config) if ds_config else Zero(),
    )
    subject = sizing.find(model)
    if not quiet:
        for note in subject.notes:
            print(f"note: {printable(note)}", file=sys.stderr)
    found = sizing.size(subject, setup, parse_size(gpu_memory), strategy or (), tp=tp, pp=pp, ep=ep)
    if as_json:
        print(json.dumps(sizing.to_json(found), indent=2))
        return
    for line in sizing.lines(found):
        print(printable(line))


@app.command()
@_guarded
def formats(as_json: JsonOption = False) -> None:
    """List the formats: what can be read and written, and what carries optimizer state."""
    rows = [
        {"name": f.name, "reads": f.reads, "writes": f.writes, "optimizer": f.carries_optimizer, "title": f.title}
        for f in registry.all_formats()
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'name':<20} {'reads':<6} {'writes':<7} {'optimizer':<10} what it is")
    for row in rows:
        marks = ["yes" if row[key] else "-" for key in ("reads", "writes", "optimizer")]
        print(f"{row['name']:<20} {marks[0]:<6} {marks[1]:<7} {marks[2]:<10} {row['title']}")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"ckpt {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def parse_weights(text: str) -> list[float]:
    """`0.7,0.3` as numbers."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError("--adapter-weights takes numbers with commas between them", found=text) from None


def default_output(path: Path, target: str) -> Path:
    """`./outputs` becomes `./outputs-hf`, beside it."""
    absolute = path.absolute()
    if not absolute.name:
        raise UsageError("there is no name to derive an output folder from", path=path, hint="give one with -o")
    return absolute.with_name(f"{absolute.name}-{target}") if path.is_absolute() else _beside(path, target)


def _beside(path: Path, target: str) -> Path:
    """A relative sibling, so that what is printed is what the user would type; `.` and `..` need the real name."""
    if path.name in ("", ".."):
        path = Path(path.resolve())
    return path.with_name(f"{path.name}-{target}")


def plan_report(conversion: Conversion, destination: Path) -> dict[str, Any]:
    """What a conversion writes, moves, casts and leaves out, for printing and for JSON."""
    plan = conversion.plan
    return {
        "source": plan.checkpoint.path,
        "format": plan.checkpoint.format,
        "destination": str(destination),
        "files": [{"name": file.name, "bytes": file.size} for file in plan.target.files],
        "total_bytes": plan.total_bytes,
        "moved_bytes": plan.moved_bytes,
        "copied_by_the_kernel_bytes": plan.span_bytes,
        "copies": plan.num_copies,
        "peak_buffer_bytes": conversion.peak_buffers,
        "casts": [
            {"from": c.source.name, "to": c.target.name, "tensors": c.num_tensors, "bytes": c.nbytes}
            for c in plan.casts
        ],
        "notes": list(plan.target.notes),
        "left_out": list(plan.target.dropped),
    }


def plan_lines(report: dict[str, Any], verbose: bool) -> list[str]:
    """The report of a plan as text; without `verbose` a long list of files is cut."""
    files = report["files"]
    shown = files if verbose or len(files) <= 12 else files[:10]
    lines = [
        f"would write {_files(len(files))}, {show_size(report['total_bytes'])}, to {printable(report['destination'])}"
    ]
    lines += [f"  {show_size(file['bytes']):>9}  {printable(file['name'])}" for file in shown]
    if len(shown) < len(files):
        lines.append(f"  ... and {len(files) - len(shown)} more (-v lists them)")
    kernel = show_size(report["copied_by_the_kernel_bytes"])
    lines.append(
        f"bytes to move: {show_size(report['moved_bytes'])} in {report['copies']} copies, {kernel} as they are"
    )
    lines.append(f"peak buffer memory: {show_size(report['peak_buffer_bytes'])}")
    lines += [
        f"cast: {c['tensors']} tensors from {c['from']} to {c['to']}, {show_size(c['bytes'])}" for c in report["casts"]
    ]
    return lines + _notes(report["notes"], report["left_out"])


def _files(count: int) -> str:
    return f"{count} file" + ("s" if count != 1 else "")


def _notes(notes: list[str], left_out: list[str]) -> list[str]:
    return [f"note: {printable(note)}" for note in notes] + [f"not in the target: {printable(x)}" for x in left_out]


def _outcome(conversion: Conversion, destination: Path, manifest: bool) -> list[str]:
    from ckpt.run_folder.steps import TRAINER_STATE
    from ckpt.verify.manifest import MANIFEST

    plan = conversion.plan
    summary = f"wrote {_files(len(plan.target.files))}, {show_size(plan.total_bytes)}" + (
        f", and {MANIFEST}" if manifest else ""
    )
    lines = [*_notes(list(plan.target.notes), list(plan.target.dropped)), summary]
    if any(file.name == TRAINER_STATE for file in plan.target.files):  # whatever its name, Trainer takes the folder
        lines.append(f"to go on with HF Trainer: trainer.train(resume_from_checkpoint={printable(str(destination))!r})")
    return lines


def _say_source(checkpoint: Checkpoint, prefix: str = "") -> None:
    ranks = f", {checkpoint.world_size} ranks" if checkpoint.world_size else ""
    step = f", step {checkpoint.state.step}" if checkpoint.state.step is not None else ""
    framework = f" ({checkpoint.framework})" if checkpoint.framework else ""
    print(printable(f"{prefix}{checkpoint.path}: {checkpoint.format}{framework}{ranks}{step}"), file=sys.stderr)
    for note in checkpoint.notes:
        print(f"note: {printable(note)}", file=sys.stderr)


@contextlib.contextmanager
def progress_bar(total: int, quiet: bool) -> Iterator[Progress | None]:
    """A bar of bytes on stderr, where that is a terminal; otherwise nothing."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit="B", unit_scale=True, leave=False, file=sys.stderr) as bar:

        def advance(count: int) -> None:
            bar.update(count)

        yield advance


def main() -> None:
    """The entry point."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of any language on a terminal of any
    quick.command(app)()
