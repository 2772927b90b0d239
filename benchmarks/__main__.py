"""`python -m benchmarks`: a table of times, ratios and peak memory.

The yardstick of a conversion is `cp` of its output followed by `sync` of it, because what ckpt writes is on disk when
it returns.  Caches are warm.  Every figure is of a whole process.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.measure import Case, Run, medians, remove, run, warm
from benchmarks.synthetic import write

CKPT = [sys.executable, "-m", "ckpt"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/ckpt-benchmarks"), help="where checkpoints are kept")
    parser.add_argument("--layers", type=int, default=28, help="28 layers are 0.43 billion parameters")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--large", action="store_true", help="also peak memory for a checkpoint three times as large")
    options = parser.parse_args()
    if not sys.flags.safe_path and not Path("ckpt").is_dir():
        parser.error("run it from the checkout")
    zero3(options.folder, options.layers, options.rounds, options.large)


def zero3(folder: Path, num_layers: int, rounds: int, large: bool) -> None:
    source = folder / f"zero3-{num_layers}"
    params = write(source, num_layers)
    warm(source)
    fp32, bf16, peer = folder / "ckpt-fp32", folder / "ckpt-bf16", folder / "zero_to_fp32"
    copy, other = folder / "copy", folder / "other"
    output = fp32 / "model.safetensors"
    convert = [*CKPT, "convert", "zero3", "hf", str(source), "-q", "-o"]
    run(Case("first", [*convert, str(fp32)], fp32))  # so that there is something to copy
    run(Case("copy", ["cp", str(output), str(other)], other))
    cases = [
        Case("cp; sync of the output", ["sh", "-c", f"cp {output} {copy} && sync {copy}"], copy),
        Case("ckpt convert zero3 hf", [*convert, str(fp32)], fp32),
        Case("ckpt convert zero3 hf --dtype bf16", [*convert, str(bf16), "--dtype", "bf16"], bf16),
        Case(
            "zero_to_fp32.py --safe_serialization",
            [sys.executable, "-m", "deepspeed.utils.zero_to_fp32", str(source), str(peer), "--safe_serialization"],
            peer,
        ),
        Case("cmp of two files of that size", ["cmp", str(output), str(other)]),
        Case("ckpt verify zero3 against hf", [*CKPT, "verify", str(source), str(fp32), "-q"]),
    ]
    found = medians(cases, rounds)
    help_run = medians([Case("ckpt --help", [*CKPT, "--help"])], 5)["ckpt --help"]
    compared = equal_tensors(fp32, peer)
    copied, theirs, compare = (found[c.name].seconds for c in (cases[0], cases[3], cases[4]))

    print(f"ZeRO-3, 8 ranks, {params / 1e6:.0f} M parameters, median of {rounds}, whole processes")
    print(f"{'':<40} {'seconds':>8} {'peak MB':>8}  ratio")
    for case in cases:
        one = found[case.name]
        print(f"{case.name:<40} {one.seconds:>8.2f} {one.peak_mb:>8.0f}  {ratio(case, one, copied, theirs, compare)}")
    print(f"{compared} tensors bit for bit equal to those that zero_to_fp32.py wrote")
    print(f"{'ckpt --help':<40} {help_run.seconds:>8.2f} {help_run.peak_mb:>8.0f}")
    if large:
        remove(peer)
        remove(other)
        big = folder / f"zero3-{num_layers * 3 + 14}"
        params = write(big, num_layers * 3 + 14)
        for name, extra, target in (("fp32", [], fp32), ("bf16", ["--dtype", "bf16"], bf16)):
            one = run(Case(name, [*CKPT, "convert", "zero3", "hf", str(big), "-q", "-o", str(target), *extra], target))
            print(f"{f'{params / 1e6:.0f} M parameters, {name}':<40} {one.seconds:>8.2f} {one.peak_mb:>8.0f}")
    for path in (fp32, bf16, peer, copy, other):
        remove(path)


def ratio(case: Case, one: Run, copied: float, theirs: float, compare: float) -> str:
    if case.name.startswith("ckpt convert"):
        return f"{one.seconds / copied:.2f} x cp; {theirs / one.seconds:.1f} x faster than zero_to_fp32.py"
    if case.name.startswith("ckpt verify"):
        return f"{one.seconds / compare:.2f} x cmp"
    if case.name.startswith("zero_to_fp32"):
        return f"{one.seconds / copied:.2f} x cp"
    return ""


def equal_tensors(ours: Path, theirs: Path) -> int:
    """Compare every tensor of two folders of safetensors byte for byte; returns how many there are."""
    import torch
    from safetensors import safe_open

    def tensors(folder: Path) -> dict[str, Path]:
        found = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                found |= dict.fromkeys(file.keys(), path)
        return found

    a, b = tensors(ours), tensors(theirs)
    if a.keys() != b.keys():
        raise SystemExit(f"different tensors: {sorted(a.keys() ^ b.keys())[:5]}")
    for name in a:
        with safe_open(a[name], "pt") as one, safe_open(b[name], "pt") as other:
            x, y = one.get_tensor(name), other.get_tensor(name)
            if x.dtype != y.dtype or not torch.equal(x.view(torch.int32), y.view(torch.int32)):
                raise SystemExit(f"{name} differs")
    return len(a)


if __name__ == "__main__":
    main()
