"""`ckpt/stores/objects.py`, `ranges.py`, `placeholder_files.py`: stored checkpoints read like local ones."""

from __future__ import annotations

import _thread
import filecmp
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from botocore.credentials import RefreshableCredentials
from safetensors.numpy import save_file

import ckpt
from ckpt import api
from ckpt.commands.inspect import overview
from ckpt.errors import CorruptError, NotFoundError, StorageError, UsageError
from ckpt.move.source import read_file
from ckpt.move.workers import Resources
from ckpt.stores import objects, placeholder_files, ranges
from tests.support.commands import ckpt as command
from tests.support.commands import process
from tests.support.mounting import no_fuse, unmount
from tests.support.object_store import BUCKET, Faults, ObjectStore
from tests.support.places import FIXTURES
from tests.support.sampling import sample

SAMPLES = (
    *("toy-zero0", "toy-zero1", "toy-zero2", "toy-zero3", "toy-zero0-fp32", "moe-zero3", "lora-zero3", "trainer-zero2"),
    *("dcp-fsdp2", "dcp-torch21-fsdp1", "dcp-torch23-fsdp1", "trl-fsdp2", "axolotl-fsdp2", "trainer-plain"),
    *("torchtitan-llama3", "torchtitan-qwen3-moe", "megatron-dist-flattened", "megatron-fsdp"),
    *("quantized-gathered", "quantized-ranks/ao8", "quantized-zero3/bnb8", "quantized-dcp/ao4"),
)
#: Sizes as MiB and bytes. The sample has the neighbours of limits, and sizes between limits.
SIZES = sample(
    ((mib, odd) for mib in (0.5, 1, 1.5, 2, 3, 8, 9.5) for odd in (0, -1, 1)),
    lambda size: [size if size[0] in (1, 2, 8) else size[0]],
)


def same_files(one: Path, other: Path) -> bool:
    names = sorted(str(p.relative_to(one)) for p in one.rglob("*") if p.is_file())
    there = sorted(str(p.relative_to(other)) for p in other.rglob("*") if p.is_file())
    return names == there and filecmp.cmpfiles(one, other, names, shallow=False)[0] == names


@pytest.mark.parametrize("name", SAMPLES)
def test_what_is_in_a_store_is_what_is_local(store: ObjectStore, tmp_path: Path, name: str) -> None:
    local = Path(shutil.copytree(FIXTURES / name, tmp_path / "run", ignore=shutil.ignore_patterns("truth")))
    url = store.upload(local, f"sources/{name}/run")
    there, here = ckpt.open(url), ckpt.open(local)
    assert there.tensors.keys() == here.tensors.keys()
    assert there.state.scalars == here.state.scalars
    assert (there.config, there.passed_over) == (here.config, here.passed_over)
    assert api.digests(there) == api.digests(here)
    names = [{**overview.describe(one), "path": None, "notes": None} for one in (there, here)]
    assert names[0] == names[1]


def test_the_command_line(store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    url = store.upload(FIXTURES / "moe-zero3", "cli/outputs")
    assert command("convert", "auto", "hf", FIXTURES / "moe-zero3", "-o", "expected", "-q").code == 0
    done = command("convert", "zero3", "hf", url)
    assert (done.code, done.out.strip()) == (0, "outputs-hf")
    assert done.err.startswith(f"{url}/global_step2: zero3")
    assert same_files(tmp_path / "outputs-hf", tmp_path / "expected")
    store.upload(tmp_path / "expected", "cli/hf")
    for words in (
        ("inspect", url),
        ("inspect", url, "--json"),
        ("hash", url),
        ("verify", url, "expected"),
        ("verify", f"s3://{BUCKET}/cli/hf"),
        ("verify", f"s3://{BUCKET}/cli/hf", "--json"),
        ("convert", "auto", "hf", url, "--dry-run", "--json", "-o", "other"),
    ):
        done = command(*words)
        assert done.code == 0, done
        assert "ckpt-stores-" not in done.out + done.err, words
    store.put("cli/hf/model.safetensors", store.objects("cli/hf")["model.safetensors"][:-1] + b"\1")
    assert command("verify", f"s3://{BUCKET}/cli/hf").code == 1


def test_adapters_bases_and_configs(store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = FIXTURES / "trl-lora-zero3"
    url = store.upload(here, "adapters")
    run, base = "outputs/qwen3-lora", "Qwen/Qwen3-30B-A3B"
    done = command("merge-lora", f"{url}/{run}", "--base", f"{url}/{base}")
    assert (done.code, done.out) == (0, "qwen3-lora-merged\n"), done
    assert "ckpt-stores-" not in done.err
    done = command("merge-lora", here / run, "--base", here / base, "-o", "expected", "-q")
    assert done.code == 0 and same_files(tmp_path / "qwen3-lora-merged", tmp_path / "expected"), done
    here, name = FIXTURES / "trl-fsdp2", "meta-llama/Llama-3.1-8B"
    for config, out in ((store.upload(here / name, "configs/llama"), "there"), (here / name, "here")):
        done = command("convert", "dcp", "hf", here / "outputs", "--config", config, "-o", out, "-q")
        assert done.code == 0, done
    assert same_files(tmp_path / "there", tmp_path / "here")


def test_whether_it_is_whole(store: ObjectStore) -> None:
    url = store.upload(FIXTURES / "trainer-zero2", "whole")
    for words in (("check", url), ("check", url, "--bytes")):
        done = command(*words)
        assert done.code == 0 and "ckpt-stores-" not in done.out + done.err, done
    assert "of records are as their checksums say" in done.out
    (key,) = (key for key in store.objects("whole/checkpoint-2") if key.endswith("mp_rank_00_model_states.pt"))
    content = store.objects("whole/checkpoint-2")[key]
    store.put(f"whole/checkpoint-2/{key}", content[:1000] + bytes([content[1000] ^ 1]) + content[1001:])
    done = command("check", url, "--bytes")
    assert done.code == CorruptError.exit_code and "checkpoint-2: damaged" in done.out, done
    store.put(f"whole/checkpoint-2/{key}", content[:-1])
    assert command("check", url).code == CorruptError.exit_code


def test_a_mount(store: ObjectStore, tmp_path: Path) -> None:
    if no_fuse():
        pytest.skip(no_fuse())
    url, view = store.upload(FIXTURES / "moe-zero3", "mounted"), tmp_path / "view"
    done = command("mount", "hf", url, view)
    assert done.code == UsageError.exit_code and "--foreground" in done.err and not view.exists()
    ckpt.plan(ckpt.open(FIXTURES / "moe-zero3"), "hf").run(tmp_path / "out", manifest=False)
    words = [sys.executable, "-m", "ckpt", "mount", "hf", url, str(view), "--foreground"]
    with subprocess.Popen(words, env=os.environ | {"PYTHONPATH": str(FIXTURES.parent)}) as serving:
        try:
            while not os.path.ismount(view):
                assert serving.poll() is None
                time.sleep(0.05)
            assert same_files(view, tmp_path / "out")
            unmount(view)
            assert serving.wait(60) == 0
        finally:
            serving.kill()


def test_the_commands_of_the_page(store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store.upload(FIXTURES / "moe-zero3", "page/run")
    page = (FIXTURES.parent / "docs" / "stores.md").read_text()
    lines = re.findall(r"^(?:\$ |    )ckpt (.*)$", page, re.MULTILINE)
    assert len(lines) == 6
    for line in lines:
        if "hf://" not in line:  # tests/stores/test_hub.py reads these
            done = command(*line.replace("s3://bucket/", f"s3://{BUCKET}/page/").split())
            assert done.code == 0, done
    assert store.objects("page/model") == {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}


def test_a_url_is_never_a_local_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (
        ("convert", "auto", "hf", ".", "--tag", "s3://runs/x"),
        ("resume", "s3://runs/x"),
        ("mount", "hf", ".", "s3://runs/x"),
        ("estimate", "hf://org/name"),
        ("inspect", ".", "--picture", "s3://runs/x.svg"),
    ):
        done = command(*words)
        assert (done.code, "takes no URL here" in done.err) == (UsageError.exit_code, True), done
    for url in ("foo://bar/x", "file:///x", "hf://datasets/a/b", "s3://runs/../x"):
        done = command("inspect", url)
        assert (done.code, url.partition("/")[0] in done.err) == (UsageError.exit_code, True), done
    with pytest.raises(UsageError, match="local folder"):
        ckpt.resume("s3://runs/x")
    assert list(tmp_path.iterdir()) == []


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    objects.store.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    done = command("inspect", "s3://runs/x")
    assert (done.code, "pip install 'ckpt-toolkit[remote]'" in done.err) == (NotFoundError.exit_code, True)


def test_without_credentials(store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = store.upload(FIXTURES / "toy-zero3", "profile")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    with pytest.raises(StorageError, match="no credentials for S3"):
        ckpt.open(url)
    (tmp_path / "credentials").write_text("[other]\naws_access_key_id = key\naws_secret_access_key = secret\n")
    monkeypatch.setenv("AWS_PROFILE", "other")
    assert ckpt.open(url).format == "zero3"


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ("", "profile (mine) could not be found"),
        ("[profile mine]\naws_access_key_id = key\n", "missing: aws_secret_access_key"),
        ("[profile mine]\ncredential_process = false\n", "Error when retrieving credentials"),
        ("[profile mine]\ncredential_process = echo\n", "Expecting value"),
        ("[profile mine", "Unable to parse"),
    ],
)
def test_credentials_that_cannot_be_read(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str, found: str
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    (tmp_path / "config").write_text(config)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    done = command("inspect", f"s3://{BUCKET}/anything")
    assert (done.code, "credentials for S3 could not be read" in done.err, found in done.err) == (7, True, True), done


def test_a_clock_that_is_wrong() -> None:
    error = objects._failed(OSError("403 Forbidden: <Code>RequestTimeTooSkewed</Code>"), "s3://runs/x")
    assert "clock" in str(error.hint)


def test_credentials_are_not_kept_longer_than_they_are_good_for(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From botocore, credentials never expire within ten minutes, but often within half an hour."""
    options: dict[str, Any] = {}
    monkeypatch.setattr("obstore.store.from_url", lambda _, **given: options.update(given))
    objects._client("s3", BUCKET)
    kept = options["credential_provider"]()["expires_at"] - datetime.now(timezone.utc)
    assert kept.total_seconds() <= RefreshableCredentials._mandatory_refresh_timeout


def test_what_is_not_there(store: ObjectStore) -> None:
    with pytest.raises(NotFoundError, match=r"no such file or folder\n.*s3://runs/nothing"):
        ckpt.open(f"s3://{BUCKET}/nothing")
    with pytest.raises(NotFoundError, match=r"no such store\n.*s3://elsewhere"):
        ckpt.open("s3://elsewhere/nothing")


def test_several_runs(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suggested commands name the stores' URLs, not the local placeholders."""
    for name in ("one", "other run"):
        store.upload(FIXTURES / "toy-zero3", f"several/{name}")
    url = f"s3://{BUCKET}/several"
    monkeypatch.setattr("sys.argv", ["ckpt", "inspect", url])
    done = command("inspect", url)
    assert done.code == 2 and "ckpt-stores-" not in done.err
    assert f"  ckpt inspect {url}/one\n" in done.err and f"  ckpt inspect '{url}/other run'\n" in done.err


def test_keys_that_are_folders_and_odd_names(store: ObjectStore, tmp_path: Path) -> None:
    """Consoles make empty objects for folders. Here they fill more than one page, with names that URLs escape."""
    url = store.upload(FIXTURES / "moe-zero3", "odd/a b+c%20#d?e/löuf/run")
    key = url.split("/", 3)[3]
    for number in range(1100):
        store.put(f"{key}/logs/{number}", b"")
    for folder in ("", "/", "/global_step2/", "/logs"):
        store.put(f"{key}{folder}", b"")
    there, here = ckpt.open(url), ckpt.open(FIXTURES / "moe-zero3")
    assert api.digests(there) == api.digests(here)
    assert len([*(placeholder_files.local(url) / "logs").iterdir()]) == 1100
    store.put(f"{key}/logs", b"and a file")
    with pytest.raises(StorageError, match=r"an object and a folder have the same name\n.*run/logs"):
        ckpt.open(url)


def test_a_file_that_stands_for_an_object_is_no_hole(store: ObjectStore) -> None:
    path = placeholder_files.local(store.upload(FIXTURES / "toy-zero3", "hole")) / "latest"
    assert path.stat().st_size == (FIXTURES / "toy-zero3" / "latest").stat().st_size
    for look in (path.read_bytes, lambda: os.open(path, os.O_RDONLY), lambda: shutil.copyfile(path, "/dev/null")):
        with pytest.raises(RuntimeError, match="s3://runs/hole/latest was to be opened as if it were a local file"):
            look()
    if not hasattr(os, "O_PATH"):
        return
    descriptor = os.open(path, os.O_PATH)
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pread(descriptor, 1, 0)
    finally:
        os.close(descriptor)


def test_only_what_is_needed_is_fetched(store: ObjectStore, tmp_path: Path) -> None:
    """One tensor of a large file is read alone; a whole file is read once, in large requests."""
    content = np.arange(6 << 20, dtype=np.float32)
    header = '{"a":{"dtype":"F32","shape":[6291456],"data_offsets":[0,25165824]}}'.ljust(120).encode()
    store.put("large/model.safetensors", len(header).to_bytes(8, "little") + header + content.tobytes())
    checkpoint = ckpt.open(f"s3://{BUCKET}/large")
    assert np.array_equal(checkpoint["a"].numpy()[-3:], content[-3:])
    store.requests.clear()
    checkpoint = ckpt.open(f"s3://{BUCKET}/large")
    assert checkpoint["a"].numpy(slice(5 << 20, (5 << 20) + 10)).tolist() == content[5 << 20 :][:10].tolist()
    assert sum(one.num_bytes for one in store.requests if one.range) <= 1 << 20
    store.requests.clear()
    conversion = ckpt.plan(checkpoint, "hf")
    conversion.run(tmp_path / "out", manifest=False)
    fetched = [one.num_bytes for one in store.requests if one.range]
    assert (tmp_path / "out" / "model.safetensors").read_bytes()[-content.nbytes :] == content.tobytes()
    assert sum(fetched) <= 1.1 * content.nbytes
    assert len(fetched) <= 8
    objects_of_s3 = [one for one in store.requests if one.method == "GET" and one.key and not one.range]
    assert objects_of_s3 == []
    store.requests.clear()
    ranges.forget()
    assert api.digests(checkpoint) == api.digests(ckpt.open(tmp_path / "out"))
    fetched = [one.num_bytes for one in store.requests if one.range]
    assert (sum(fetched), len(fetched)) == (content.nbytes, 3), "as large as it is, each byte once"


def test_neighbours_are_fetched_together(store: ObjectStore, tmp_path: Path) -> None:
    """Ten tensors of 3 MiB, each followed by a small one: each byte once, in requests up to 8 MiB."""
    random, local = np.random.default_rng(0), tmp_path / "model"
    names = [(f"{letter}.{kind}", size) for letter in "abcdefghij" for kind, size in (("a", 3 << 20), ("b", 20))]
    tensors = {name: random.integers(0, 255, size, np.uint8) for name, size in names}
    local.mkdir()
    save_file(tensors, local / "model.safetensors")
    (local / "config.json").write_text("{}")
    checkpoint = ckpt.open(store.upload(local, "neighbours"))
    store.requests.clear()
    ranges.forget()
    assert api.digests(checkpoint) == api.digests(ckpt.open(local))
    fetched = [one.num_bytes for one in store.requests if one.range]
    assert (sum(fetched), len(fetched)) == (sum(size for _, size in names), 5)
    conversion = ckpt.plan(checkpoint, "hf")
    store.requests.clear()
    ranges.forget()
    conversion.run(tmp_path / "out", manifest=False)
    fetched = [one.num_bytes for one in store.requests if one.range]
    assert api.verify(ckpt.open(tmp_path / "out"), ckpt.open(local)).equal
    assert sum(fetched) <= 1.1 * sum(size for _, size in names) and max(fetched) <= 8 << 20 and len(fetched) <= 7


def test_digests_of_every_size(store: ObjectStore, tmp_path: Path) -> None:
    """Sizes around the limits of reads, cache and requests; each in its own folder, and all in a row."""
    random = np.random.default_rng(0)
    sizes = [int(mib * (1 << 20)) + odd for mib, odd in SIZES]
    tensors = {f"a{number:02}": random.integers(0, 255, size, np.uint8) for number, size in enumerate(sizes)}
    for kind in ("apart", "together"):
        local = tmp_path / kind
        local.mkdir()
        if kind == "apart":  # one folder each
            for name, tensor in tensors.items():
                (local / name).mkdir()
                save_file({name: tensor}, local / name / "model.safetensors")
            folders = [local / name for name in tensors]
        else:
            save_file(tensors, local / "model.safetensors")
            folders = [local]
        for folder in folders:
            url = store.upload(folder, f"sizes/{folder.relative_to(tmp_path)}")
            assert api.digests(ckpt.open(url)) == api.digests(ckpt.open(folder)), folder


# -- faults -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "faults",
    [
        Faults(status=500, num_status=3),
        Faults(status=503, num_status=3),
        Faults(num_cut=3),
        Faults(slow=0.5, num_slow=2),
    ],
    ids=["500", "503", "cut", "slow"],
)
def test_faults_that_pass(store: ObjectStore, tmp_path: Path, faults: Faults) -> None:
    url = store.upload(FIXTURES / "moe-zero3", "faults/outputs")
    ckpt.plan(ckpt.open(FIXTURES / "moe-zero3"), "hf").run(tmp_path / "expected")
    conversion = ckpt.plan(ckpt.open(url), "hf")
    ranges.forget()
    store.faults = faults
    conversion.run(tmp_path / "out")
    assert (faults.num_status, faults.num_cut, faults.num_slow) == (0, 0, 0), "the faults did not strike"
    assert same_files(tmp_path / "out", tmp_path / "expected")


@pytest.mark.parametrize(
    "faults",
    [Faults(status=500, num_status=10**6), Faults(num_cut=10**6), Faults(expired=True)],
    ids=["500", "cut", "old"],
)
def test_faults_that_stay(store: ObjectStore, tmp_path: Path, faults: Faults) -> None:
    """Nothing is written, and the error names the object."""
    url = store.upload(FIXTURES / "moe-zero3", "faults/outputs")
    conversion = ckpt.plan(ckpt.open(url), "hf")
    ranges.forget()
    store.faults = faults
    with pytest.raises(StorageError) as error:
        conversion.run(tmp_path / "out")
    assert f"{url}/global_step2/" in str(error.value)
    assert ("expired?" in str(error.value)) == faults.expired
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("faults", [Faults(slow=5, num_slow=10**6), Faults(before=lambda *_: time.sleep(5))])
def test_a_store_that_stalls_is_given_up(store: ObjectStore, monkeypatch: pytest.MonkeyPatch, faults: Faults) -> None:
    """The store stalls in mid-answer, and before it."""
    url = store.upload(FIXTURES / "toy-zero3", "stalls")
    monkeypatch.setitem(objects._TIMEOUT, "read_timeout", timedelta(milliseconds=50))
    monkeypatch.setitem(objects.RETRIES, "retry_timeout", timedelta(milliseconds=200))
    store.faults = faults
    with pytest.raises(StorageError, match="the store could not be used"):  # the waiting request gets the answer
        ckpt.open(url)


@pytest.mark.parametrize("what", ["", "latest"], ids=["listing", "reading"])
def test_ctrl_c_is_heard_while_a_store_says_nothing(store: ObjectStore, what: str) -> None:
    url, ended = store.upload(FIXTURES / "toy-zero3", "silent"), threading.Event()
    was_heard: queue.Queue[bool] = queue.Queue()

    def say_nothing(_: str, key: str) -> None:
        if key.endswith(what):
            store.faults.before = None
            os.kill(os.getpid(), signal.SIGINT)
            was_heard.put(ended.wait(60))

    store.faults = Faults(before=say_nothing)
    with pytest.raises(KeyboardInterrupt):
        ckpt.open(url)
    ended.set()
    assert was_heard.get(), "before the store has said anything"


def test_ctrl_c_just_before_the_wait_for_a_store_is_heard() -> None:
    """The signal has come before the wait's system call, and ends none."""
    ended, was_heard = threading.Event(), queue.Queue[bool]()

    def say_nothing() -> None:
        time.sleep(0.1)  # until the main thread waits
        _thread.interrupt_main()  # as a signal, but no system call ends
        was_heard.put(ended.wait(10))

    with pytest.raises(KeyboardInterrupt):
        objects._interruptible(say_nothing)
    ended.set()
    assert was_heard.get(), "before the store has said anything"


def test_an_object_that_is_replaced(store: ObjectStore, tmp_path: Path) -> None:
    url = store.upload(FIXTURES / "moe-zero3", "replaced/outputs")
    conversion = ckpt.plan(ckpt.open(url), "hf")
    name = "global_step2/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = store.objects("replaced/outputs")[name]
    store.put(f"replaced/outputs/{name}", content[:-100] + bytes(100))
    ranges.forget()  # it is small, and was read when it was described
    with pytest.raises(CorruptError, match="replaced while it was being read") as error:
        conversion.run(tmp_path / "out")
    assert f"{url}/{name}" in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_an_object_that_goes(store: ObjectStore, tmp_path: Path) -> None:
    url = store.upload(FIXTURES / "moe-zero3", "gone/outputs")
    conversion = ckpt.plan(ckpt.open(url), "hf")
    name = "global_step2/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    store.client.delete_object(Bucket=BUCKET, Key=f"gone/outputs/{name}")
    ranges.forget()
    with pytest.raises(CorruptError, match="was removed during the read"):
        conversion.run(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CorruptError):
        ckpt.open(url)


def test_what_was_killed_goes_on(store: ObjectStore, tmp_path: Path) -> None:
    """In a new process, other placeholder files stand for the objects."""
    url, out = store.upload(FIXTURES / "moe-zero3", "resumed/outputs"), tmp_path / "out"
    ckpt.plan(ckpt.open(url), "zero2").run(tmp_path / "expected")

    def disk_is_full(_: Path) -> dict[str, bytes]:
        raise StorageError("no space on the disk")

    with pytest.raises(StorageError):
        ckpt.plan(ckpt.open(url), "zero2", resources=Resources(workers=1)).run(out, describe=disk_is_full)
    done = process("convert", "zero3", "zero2", url, "-o", out)
    assert done.code == 0, done
    assert "were there already" in done.err
    assert same_files(out, tmp_path / "expected")


def test_torchs_own_loading(store: ObjectStore) -> None:
    url, here = store.upload(FIXTURES / "dcp-fsdp2", "loading/run"), ckpt.open(FIXTURES / "dcp-fsdp2" / "step-2")
    state = {fqn: torch.zeros_like(tensor[...]) for fqn, tensor in here.items()}
    with pytest.warns(UserWarning, match=re.escape(f"{url}/step-2 (dcp): there and not asked for")):
        dcp.load(state, storage_reader=ckpt.StorageReader(url), no_dist=True)
    assert state
    assert all(torch.equal(state[fqn], tensor[...]) for fqn, tensor in here.items())


def test_what_fsspec_knows() -> None:
    """It has no conditional reads, so the object is checked again."""
    files, root = fsspec.filesystem("memory"), FIXTURES / "moe-zero3"
    for path in root.rglob("*"):
        if path.is_file():
            files.pipe_file(f"/place/run/{path.relative_to(root)}", path.read_bytes())
    checkpoint = ckpt.open("memory://place/run")
    assert api.digests(checkpoint) == api.digests(ckpt.open(root))
    name = "/place/run/global_step2/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    files.pipe_file(name, files.cat_file(name)[:-1] + b"x")
    ranges.forget()
    with pytest.raises(CorruptError, match="replaced while it was being read"):
        api.digests(checkpoint)


def test_opened_again_it_is_looked_at_again(store: ObjectStore) -> None:
    url = store.upload(FIXTURES / "toy-zero3", "again")
    path = placeholder_files.local(url)
    store.put("again/latest", b"global_step3")
    store.put("again/another", b"file")
    store.client.delete_object(Bucket=BUCKET, Key="again/global_step2/zero_pp_rank_0_mp_rank_00_model_states.pt")
    assert placeholder_files.local(url) == path == placeholder_files.place(url)
    assert read_file(path / "latest") == b"global_step3"
    assert (path / "another").is_file()
    assert not (path / "global_step2" / "zero_pp_rank_0_mp_rank_00_model_states.pt").exists()


def test_what_a_store_does_not_give_is_no_difference(store: ObjectStore, tmp_path: Path) -> None:
    """`verify` ends with the error's code: 7 if the store refuses, 4 if the object has changed."""
    save_file({f"t{n}": np.full(1 << 20, n, np.float32) for n in range(4)}, tmp_path / "model.safetensors")
    here = ckpt.open(tmp_path)
    there = ckpt.open(store.upload(tmp_path, "unread"))
    assert api.verify(there, here).exit_code == 0
    ranges.forget()
    store.faults = Faults(status=403, num_status=1000)
    for one, other in ((there, here), (here, there)):
        report = api.verify(one, other)
        assert report.exit_code == StorageError.exit_code and report.counts["!"] > 0, report.outcome
    store.faults = Faults()
    ranges.forget()
    store.put("unread/model.safetensors", (tmp_path / "model.safetensors").read_bytes()[:-1] + b"\1")
    assert api.verify(there, here).exit_code == CorruptError.exit_code
