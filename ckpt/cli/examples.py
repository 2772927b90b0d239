"""Two commands for the end of each help text, with what they do.  Every one of them is run by a test."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "ckpt": (
        ("ckpt convert auto hf outputs", "the newest checkpoint of a run, for transformers and vLLM"),
        ("ckpt inspect outputs --picture who-holds-what.svg", "what it holds, and which rank has which part"),
    ),
    "convert": (
        ("ckpt convert auto hf outputs --dtype bf16", "the newest checkpoint of a run, for transformers and vLLM"),
        ("ckpt convert zero3 dcp outputs --world-size 4 --dry-run", "what FSDP would need to go on with it"),
    ),
    "resume": (
        ("ckpt resume outputs", "the folder to go on from on the ranks that there are"),
        ("ckpt resume outputs --format dcp --world-size 4", "to go on under FSDP on 4 ranks"),
    ),
    "mount": (
        ("ckpt mount hf outputs view", "a run as a folder that from_pretrained reads"),
        ("ckpt mount dcp outputs view --tag global_step2", "one step of it as torch's own format"),
    ),
    "merge-lora": (
        ("ckpt merge-lora adapter --base model", "a model with the adapter in it, in adapter-merged"),
        ("ckpt merge-lora adapter --base model -o merged --dtype bf16 --dry-run", "what it would write"),
    ),
    "push": (
        ("ckpt push outputs-hf --repo-id org/name --private", "to a repository of its own, made where it is missing"),
        ("ckpt push outputs-hf --repo-id org/name --create-pr", "as a pull request"),
    ),
    "clean": (
        ("ckpt clean outputs", "list folders that are not needed any more, and ask before they are removed"),
        ("ckpt clean outputs --yes --json", "the same in a script, without the question"),
    ),
    "verify": (
        ("ckpt verify outputs outputs-hf --only weights --cast", "two checkpoints of any formats, bit by bit"),
        ("ckpt verify outputs-hf", "a folder that ckpt wrote, with its manifest"),
    ),
    "diff": (
        ("ckpt diff outputs outputs-hf --only weights", "how far apart two checkpoints are, by layer and tensor"),
        ("ckpt diff outputs outputs-hf --only weights --rtol 0.01", "exit code 1 where anything is further apart"),
    ),
    "check": (
        ("ckpt check outputs", "each checkpoint of a run: is it whole, and if not, what is missing"),
        ("ckpt check outputs-hf --bytes", "with every byte read, and checksums compared where there are any"),
    ),
    "hash": (
        ("ckpt hash outputs", "a digest of weights, masters and optimizer each, whatever the format"),
        ("ckpt hash outputs-hf --tensors", "and of every tensor"),
    ),
    "inspect": (
        ("ckpt inspect outputs --tensor '*.q_proj.weight'", "where the files hold every part of these tensors"),
        ("ckpt inspect outputs --html outputs.html", "a page of all tensors, ranks and steps, to search and zoom"),
    ),
    "estimate": (
        ("ckpt estimate outputs-hf --gpus 8 --gpu-memory 80GB", "what fits on 8 GPUs of 80 GB"),
        ("ckpt estimate outputs-hf --strategy zero3 --offload-optimizer cpu", "one strategy alone"),
    ),
    "formats": (
        ("ckpt formats", "a table"),
        ("ckpt formats --json", "the same for programs"),
    ),
    "doctor": (
        ("ckpt doctor", "versions, extras, FUSE, free space, and a block for a bug report"),
        ("ckpt doctor outputs", "which commands work on this run, and what stands in the way of the others"),
    ),
}
