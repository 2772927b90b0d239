"""`python -m tests.gpu_check [FOLDER]`: train, stop, resume and convert every strategy that fits this machine's GPUs.

It has never run on a GPU. `--double 2` runs it on a double of two GPUs.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import pickletools
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader

#: Options of every run. The batch shrinks until it divides by the number of ranks.
COMMON: dict[str, Any] = {"model": "toy", "batch": 48, "truth": True}
#: Folder for PYTHONPATH: the trainer's processes import the double of torch.cuda from it.
DOUBLE = Path(__file__).parent / "support" / "double"
#: DeepSpeed's own Adam. Its compiler builds it first.
FUSED_ADAM = {"optimizer": {"params": {"torch_adam": False}}}
_PLACE = re.compile(r"cpu|cuda(:\d+)?")
_PACKAGES = {"deepspeed": "deepspeed", "transformers": "transformers", "megatron": "megatron-core", "safetensors": ""}


@dataclass(frozen=True)
class Case:
    """One kind of run: the format's name, the trainer's options, and the required packages."""

    format: str
    options: dict[str, Any]
    needs: tuple[str, ...] = ()
    even: bool = False
    to: tuple[str, ...] = ("full",)


_TRANSFORMER = {"model": "llama_even"}
_ZERO = ("deepspeed",)
CASES = {
    **{f"zero{n}": Case(f"zero{n}", {"strategy": f"zero{n}"}, _ZERO, to=("full", f"zero{n}")) for n in (1, 2, 3)},
    "zero2, torch's fused AdamW": Case("zero2", {"strategy": "zero2", "fused": True}, _ZERO),
    "zero2, FusedAdam": Case("zero2", {"strategy": "zero2", "ds_config": "FUSED_ADAM"}, _ZERO),
    "ddp": Case("full", {"strategy": "ddp"}, to=("full", "dcp")),
    "ddp, fused": Case("full", {"strategy": "ddp", "fused": True}),
    "fsdp1": Case("dcp", {"strategy": "fsdp1"}),
    "fsdp2": Case("dcp", {"strategy": "fsdp2"}, to=("full", "dcp")),
    "fsdp2, fused": Case("dcp", {"strategy": "fsdp2", "fused": True, **_TRANSFORMER}, ("transformers",)),
    "fsdp2, a file a rank": Case("fsdp-ranks", {"strategy": "fsdp2", "save": "ranks"}, to=("dcp",)),
    "hsdp": Case("dcp", {"strategy": "hsdp"}, even=True),
    "tp-fsdp": Case("dcp", {"strategy": "tp-fsdp", **_TRANSFORMER}, ("transformers",), even=True),
    "megatron": Case(
        "megatron-dist", {"strategy": "megatron", "tp": 1, **_TRANSFORMER}, ("megatron", "transformers"), to=("dcp",)
    ),
    "megatron-deepspeed": Case(
        "megatron-deepspeed",
        {"strategy": "megatron-deepspeed", "tp": 1, **_TRANSFORMER},
        ("deepspeed", "transformers"),
        to=("megatron-deepspeed",),
    ),
}
#: Strategies to measure the peak memory of. A large vocabulary makes the model large enough.
MEASURED = ("zero1", "zero2", "zero3", "ddp", "fsdp2")
VOCABULARY = 100_003
#: The trainer's sizes of ZeRO's buckets. Without them, the estimate takes DeepSpeed's defaults.
BUCKETS = {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000, "stage3_prefetch_bucket_size": 10_000}


@dataclass
class Outcome:
    """Row of the table. `failed` has the reason and the end of the output."""

    cells: dict[str, str] = field(default_factory=dict)
    failed: str = ""


class CheckError(Exception):
    """Failed command, or a wrong number."""


def train(jobs: list[dict[str, Any]], ranks: int, folder: Path) -> None:
    """Run the trainer's jobs in order in one launch, with a GPU for each rank."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "jobs.jsonl"
    file.write_text("".join(json.dumps(job) + "\n" for job in jobs))
    torchrun = ["torch.distributed.run", "--nproc-per-node", str(ranks)]
    run("-m", *torchrun, "-m", "train", "--device", "cuda", "--jobs", file)


def run(*words: str | Path) -> str:
    """Return the stdout of a command of this Python. Raise CheckError with the output if it fails."""
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise CheckError(
            f"{' '.join(map(str, words))}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}"
        )
    return done.stdout


def runs(case: Case, ranks: int, folder: Path, missing: set[str]) -> list[dict[str, Any]]:
    """Return two jobs: one of four steps, and one that resumes from its second step."""
    batch = COMMON["batch"] - COMMON["batch"] % ranks
    options = COMMON | {"batch": batch, "truth": "safetensors" not in missing} | case.options
    if options.get("ds_config"):
        folder.mkdir(parents=True, exist_ok=True)
        options["ds_config"] = str(folder / "ds_config.json")
        (folder / "ds_config.json").write_text(json.dumps(FUSED_ADAM))
    first = options | {"output": str(folder / "run"), "until": 4, "save_every": 2}
    step = {"megatron": "iter_0000002", "native": "step-2"}.get(_kind(case), "global_step2")
    again = {"output": str(folder / "resumed"), "resume": str(folder / "run" / step), "truth": False}
    return [first, options | {"until": 4} | again]


def check(case: Case, ranks: int, folder: Path, missing: set[str]) -> dict[str, str]:
    """Train, resume, inspect the files and convert. Return the row's cells, or raise CheckError."""
    whole = folder / "run"
    train(runs(case, ranks, folder, missing), ranks, folder)
    losses = [_losses(one) for one in (whole, folder / "resumed")]
    apart = max(abs(losses[0][number] - loss) for number, loss in losses[1].items())
    cells = {"ranks": str(ranks), "resumed": f"{apart:.1e}" if apart else "equal"}
    if sorted(losses[1]) != [3, 4] or apart > 1e-3:
        raise CheckError(f"losses of the unbroken run {losses[0]}, after resuming {losses[1]}")
    cells["tags"] = " ".join(sorted(set(_tags(whole)))) or "none"
    cells["random states"] = " ".join(sorted(_random_states(case, whole)))
    for target in case.to:
        output = folder / f"to-{target}"
        words = ("--world-size", str(ranks + 1)) if target in (case.format, "dcp") and ranks < 8 else ()
        words = () if target == "megatron-deepspeed" else words
        run("-m", "ckpt", "convert", case.format, target, whole, "-o", output, *words)
        run("-m", "ckpt", "verify", whole, output)
        if target == "full" and "safetensors" not in missing:
            cells["truth"] = f"{_compare(whole, output)} tensors"
    cells["converted"] = " ".join(case.to)
    return cells


def _kind(case: Case) -> str:
    strategy = case.options["strategy"]
    return strategy if strategy == "megatron" else "zero" if strategy.startswith(("zero", "megatron")) else "native"


def _losses(output: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


def _tags(output: Path) -> Iterator[str]:
    """Yield the devices of saved tensors, from the pickles of torch files."""
    for file in (*output.rglob("*.pt"), *output.rglob("*.distcp")):
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as opened:
                pickles = [opened.read(name) for name in opened.namelist() if name.endswith("data.pkl")]
            words = (word for pickled in pickles for _, word, _ in pickletools.genops(pickled))
            yield from (word for word in words if isinstance(word, str) and _PLACE.fullmatch(word))


def _random_states(case: Case, output: Path) -> set[str]:
    """Return the devices with random states in the last step. Raise CheckError if a GPU's are missing."""
    found: set[str] = set()
    if _kind(case) == "zero":
        for file in sorted((output / "random_states").rglob("*4/rng_state*.pth")):
            found |= torch.load(file, map_location="cpu", weights_only=False).keys() & {"cpu", "cuda"}
    elif (output / "step-4" / ".metadata").is_file():
        keys = FileSystemReader(output / "step-4").read_metadata().state_dict_metadata
        names = {"rng_state": "cpu", "cuda_rng_state": "cuda"}
        found |= {names[key.partition(".")[0]] for key in keys if key.partition(".")[0] in names}
    elif (output / "step-4" / "model.pt").is_file():
        state = torch.load(output / "step-4" / "model.pt", map_location="cpu", weights_only=False)
        found |= {kind for key, kind in (("rng_state", "cpu"), ("cuda_rng_state", "cuda")) if key in state}
    elif case.format == "megatron-dist":
        keys = FileSystemReader(output / "iter_0000004").read_metadata().state_dict_metadata
        # megatron-core stores both in one object
        found |= {"cpu", "cuda"} if any(key.startswith("rng_state") for key in keys) else set()
    else:
        for file in output.rglob("extra_state*.pt"):
            found |= torch.load(file, map_location="cpu", weights_only=False)["rng"].keys()
    if "cuda" not in found:
        raise CheckError(f"random states of {', '.join(found) or 'nothing'} are in the checkpoint, and none of a GPU")
    return found


def _compare(whole: Path, converted: Path) -> int:
    """Return how many tensors of the truth are equal in a full state dict. Raise CheckError if one differs."""
    from safetensors.torch import load_file

    truth = load_file(next(path for path in sorted((whole / "truth").glob("*4.safetensors"))))
    model, optimizer = (
        torch.load(converted / file, map_location="cpu", weights_only=False)
        for file in ("pytorch_model_fsdp.bin", "optimizer.bin")
    )
    number = 0
    for key, expected in truth.items():
        role, _, fqn = key.partition("/")
        if role == "weight" and f"master/{fqn}" in truth:
            continue  # a full state dict stores the masters
        found = model[fqn] if role in ("weight", "master", "buffer") else optimizer["state"][fqn][role]
        if found.dtype != expected.dtype or not torch.equal(_bits(found), _bits(expected)):
            raise CheckError(f"{key} is not that of the live engine")
        number += 1
    return number


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def large_run(strategy: str, ranks: int, folder: Path) -> dict[str, Any]:
    """Return the job for a model large enough to measure."""
    sizes = {"model": "llama", "vocab": VOCABULARY, "batch": 8 * ranks}
    return {"strategy": strategy, "steps": 3, "output": str(folder / "run")} | sizes


def measure(strategy: str, ranks: int, folder: Path) -> str:
    """Return the peak memory of a rank's GPU for a larger model, next to the estimate."""
    output = folder / "run"
    train([large_run(strategy, ranks, folder)], ranks, folder)
    last = json.loads((output / "metrics.jsonl").read_text().splitlines()[-1])
    held = max(last["ranks"]["memory_bytes"])
    words = ("--gpus", str(ranks), "--strategy", strategy, "--batch-size", "8", "--seq-len", "16", "--json")
    if strategy.startswith("zero"):
        (folder / "ds_config.json").write_text(
            json.dumps({"zero_optimization": {"stage": int(strategy[-1])} | BUCKETS})
        )
        words = (*words, "--ds-config", str(folder / "ds_config.json"))
    row = json.loads(run("-m", "ckpt", "estimate", output, *words))["rows"][0]
    return f"{held / 1e6:,.1f} MB, estimated {row['total'] / 1e6:,.1f} MB ({row['buffers'] / 1e6:,.1f} MB of buffers)"


def demo(ranks: int) -> dict[str, str]:
    """Run `make demo` on the GPUs. Raise CheckError if it used the CPU."""
    printed = run("-m", "examples.demo", "--processes", str(min(ranks, 4))).splitlines()
    tags = set(_tags(Path("demo-outputs")))
    if not tags - {"cpu"}:
        raise CheckError("what the demo wrote was not on a GPU")
    return {"ranks": str(min(ranks, 4)), "tags": " ".join(sorted(tags)), "printed": printed[-1]}


def attempt(name: str, action: Callable[[], dict[str, str]]) -> Outcome:
    """Run one action, print its outcome, and return it."""
    try:
        outcome = Outcome(action())
    except Exception as error:  # continue with the rest
        outcome = Outcome(failed=f"{type(error).__name__}: {error}")
    shown = outcome.failed or ", ".join(f"{title}: {cell}" for title, cell in outcome.cells.items())
    print(f"{name:28} {'FAILED ' if outcome.failed else ''}{shown}", flush=True)
    return outcome


def main(words: list[str] | None = None) -> int:
    """Run everything. Return 1 if something failed, and 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_check", description=__doc__.partition(":")[2])
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path("gpu-check"), help="for all it writes (%(default)s)"
    )
    parser.add_argument("--only", metavar="CASE", nargs="*", help=f"of {'; '.join([*CASES, 'demo', 'memory'])}")
    parser.add_argument("--double", metavar="GPUS", type=int, help="a double of so many GPUs, which are the CPU")
    options = parser.parse_args(words)
    if options.double:
        _take_double(options.double)
    ranks = min(torch.cuda.device_count(), 8)
    if not ranks:
        print(
            f"no GPU that torch {torch.__version__} sees, and this has never run on one\n"
            "hint: make gpu-check DOUBLE=2 runs all of it on a double of two GPUs, which is the CPU",
            file=sys.stderr,
        )
        return 2
    shutil.rmtree(options.folder, ignore_errors=True)
    missing = {name for name in _PACKAGES if importlib.util.find_spec(name) is None}
    print(f"torch {torch.__version__}, {ranks} x {torch.cuda.get_device_name(0)}")
    for name in sorted(missing):
        print(f"left out, {_PACKAGES[name] or name} is not installed: {', '.join(_needing(name))}")
    if ranks % 2:
        odd = [name for name, case in CASES.items() if case.even]
        print(f"left out, {ranks} GPUs are no even number: {', '.join(odd)}")
    outcomes = {}
    for name, case in CASES.items():
        asked = options.only is None or name in options.only
        if asked and not missing & set(case.needs) and not (case.even and ranks % 2):
            folder = folder_of(options.folder, name)
            outcomes[name] = attempt(name, lambda c=case, f=folder: check(c, ranks, f, missing))
    if (options.only is None or "memory" in options.only) and "transformers" not in missing:
        for name in MEASURED:
            if not missing & set(CASES[name].needs):
                folder = options.folder / f"memory-{name}"
                action = lambda n=name, f=folder: {"peak": measure(n, ranks, f)}  # noqa: E731
                outcomes[f"memory, {name}"] = attempt(f"memory, {name}", action)
    if (options.only is None or "demo" in options.only) and not missing:
        outcomes["demo"] = attempt("demo", lambda: demo(ranks))
    keep_fixtures(options.folder, outcomes)
    failed = [name for name, outcome in outcomes.items() if outcome.failed]
    print(f"{len(outcomes)} tried, {len(failed)} failed; fixtures are in {options.folder / 'fixtures'}")
    return 1 if failed or not outcomes else 0


def _take_double(num_gpus: int) -> None:
    """Use the double of torch.cuda in this process and in the trainer's processes."""
    os.environ["GPU_DOUBLES"] = str(num_gpus)
    # Compiling megatron-core's small functions would take longer than running them.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    inherited = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(DOUBLE), str(DOUBLE.parents[2]), inherited]))
    importlib.import_module("tests.support.fake_cuda")
    print("a double of torch.cuda, which is the CPU: nothing below has run on a GPU")


def folder_of(folder: Path, name: str) -> Path:
    """Return the output folder of a case."""
    return folder / name.replace(", ", "-").replace(" ", "-").replace("'", "")


def _needing(package: str) -> list[str]:
    cases = [name for name, case in CASES.items() if package in case.needs]
    others = {"transformers": ["memory"], "safetensors": ["truth"]}
    return [*cases, *others.get(package, []), "demo"]


def keep_fixtures(folder: Path, outcomes: dict[str, Outcome]) -> None:
    """Copy the last step of every successful small run, its truth, and the versions used."""
    kept = folder / "fixtures"
    for run_folder in sorted(folder.glob("*/run")):
        if (run_folder / "truth").is_dir():
            ignored = shutil.ignore_patterns(
                "*step2*", "*step-2*", "iter_0000002", "metrics.jsonl", "zero_to_*", "heartbeats"
            )
            shutil.copytree(run_folder, kept / f"{run_folder.parent.name}-cuda", ignore=ignored)
    kept.mkdir(parents=True, exist_ok=True)
    about = {"torch": torch.__version__, "GPU": torch.cuda.get_device_name(0), "outcomes": {}}
    about["outcomes"] = {name: outcome.failed or outcome.cells for name, outcome in outcomes.items()}
    (kept / "about.json").write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
