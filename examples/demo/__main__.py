"""`make demo`: train a tiny model with ZeRO-3, convert it, verify it, load it and generate.

Every step is a command that users type, and its output goes to the terminal.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

OUTPUTS = Path("demo-outputs")
CONVERTED = Path("demo-outputs-hf")
STEPS = 20


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=4, help="one GPU each, if there are enough (%(default)s)")
    processes = parser.parse_args(words).processes
    for folder in (OUTPUTS, CONVERTED):
        shutil.rmtree(folder, ignore_errors=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    ckpt = [str(Path(sys.executable).with_name("ckpt"))]
    step(f"train a tiny llama with DeepSpeed ZeRO-3 on {processes} processes")
    run([*torchrun, "-m", "train", "--strategy", "zero3", "--model", "llama", "--steps", str(STEPS), "--truth"])
    step("look at what it wrote")
    run([*ckpt, "inspect", str(OUTPUTS)])
    step("convert it to a Hugging Face folder")
    run([*ckpt, "convert", "zero3", "hf", str(OUTPUTS)])
    step(f"verify: the fp32 masters of {processes} ranks, rounded, against the bf16 weights written")
    run([*ckpt, "verify", str(OUTPUTS), str(CONVERTED), "--only", "weights"])
    step("compare with what the live engine held")
    print(f"{equal_to_engine()} tensors bit for bit those of the live engine")
    step("load it with transformers and generate")
    generate()


def step(title: str) -> None:
    print(f"\n== {title}", flush=True)


def run(command: list[str]) -> None:
    if "train" in command:
        command = [*command, "--output", str(OUTPUTS)]
    print("$ " + " ".join([Path(command[0]).name, *command[1:]]), flush=True)
    subprocess.run(command, check=True)


def equal_to_engine() -> int:
    """Compare the converted weights with weights gathered through DeepSpeed's own API during the run."""
    truth = OUTPUTS / "truth" / f"global_step{STEPS}.safetensors"
    with safe_open(truth, "pt") as engine, safe_open(CONVERTED / "model.safetensors", "pt") as converted:
        names = list(converted.keys())
        assert {f"weight/{name}" for name in names} == {key for key in list(engine.keys()) if key.startswith("weight/")}
        for name in names:
            one, other = converted.get_tensor(name), engine.get_tensor(f"weight/{name}")
            assert one.dtype == other.dtype and torch.equal(one.view(torch.int16), other.view(torch.int16)), name
    return len(names)


def generate() -> None:
    model, report = AutoModelForCausalLM.from_pretrained(CONVERTED, dtype="auto", output_loading_info=True)
    assert not any(report.values()), report
    print("no key is missing, unexpected or mismatched")
    tokenizer = AutoTokenizer.from_pretrained(CONVERTED)
    inputs = tokenizer("The ", return_tensors="pt", return_token_type_ids=False)
    tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    print(f"generated tokens {tokens[0].tolist()}: {tokenizer.decode(tokens[0])!r}")
    print("all right: the words make no sense after 20 steps, but every weight is the one that was trained")


if __name__ == "__main__":
    main()
