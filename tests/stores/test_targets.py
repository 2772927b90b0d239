"""`ckpt/stores/upload.py`: targets in a store: they equal a local output, or nothing of them appears."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ckpt
from ckpt.errors import CkptError, CorruptError, StorageError, UsageError
from ckpt.plan.checkpoint import TargetFile
from ckpt.stores import upload
from ckpt.views.files import Views
from tests.support.commands import ckpt as command
from tests.support.engines import forked
from tests.support.object_store import BUCKET, Faults, ObjectStore
from tests.support.places import FIXTURES, REPOSITORY

_LARGE = 24 << 20  # bytes per tensor


def large_conversion(folder: Path) -> ckpt.Conversion:
    """Plan a conversion to `hf` with a file large enough for a multipart upload."""
    header = f'{{"a":{{"dtype":"U8","shape":[{_LARGE}],"data_offsets":[0,{_LARGE}]}}}}'
    folder.mkdir()
    content = len(header).to_bytes(8, "little") + header.encode() + bytes(range(256)) * (_LARGE >> 8)
    (folder / "model.safetensors").write_bytes(content)
    return ckpt.plan(ckpt.open(folder), "hf")


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("target", ["hf", "zero2", "zero3", "dcp", "full"])
def test_what_arrives_is_what_is_written_locally(store: ObjectStore, tmp_path: Path, target: str) -> None:
    conversion = ckpt.plan(ckpt.open(FIXTURES / "moe-zero3"), target)
    conversion.run(tmp_path / "out")
    conversion.run(f"s3://{BUCKET}/targets/{target}")
    assert store.objects(f"targets/{target}") == files_in(tmp_path / "out")


def test_the_command_line(store: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    source, url = store.upload(FIXTURES / "moe-zero3", "from/outputs"), f"s3://{BUCKET}/to/model"
    done = command("convert", "zero3", "hf", source, "-o", url)
    assert (done.code, done.out.strip()) == (0, url)
    assert "ckpt-stores-" not in done.out + done.err
    assert command("verify", url).code == 0
    assert command("convert", "zero3", "hf", source, "-o", "here", "-q").code == 0
    assert store.objects("to/model") == files_in(tmp_path / "here")
    for words, what in (
        (("-o", url), "the destination exists"),
        (("-o", url, "--overwrite"), "--overwrite works on local folders only"),
        (("-o", url, "--restart"), "--restart works on local folders only"),
        (("-o", url, "--verify"), "--verify works on local folders only"),
        (("-o", source), "overlap"),
        (("-o", f"{source}/global_step2/hf"), "overlap"),
        (("-o", "hf://org/name"), "ckpt push"),
        (("-o", "memory://to/model"), "can be read, but not written"),
    ):
        done = command("convert", "zero3", "hf", source, *words)
        assert (done.code, what in done.err) == (UsageError.exit_code, True), done
    assert store.objects("to/model") == files_in(tmp_path / "here")


def test_several_processes(store: ObjectStore, tmp_path: Path) -> None:
    """All processes read from a store; only one writes there. `ckpt resume` also reports to all of them."""
    run = shutil.copytree(FIXTURES / "toy-zero3", tmp_path / "outputs", ignore=shutil.ignore_patterns("truth"))
    url, out = store.upload(run, "several/outputs"), tmp_path / "out"
    words = [["resume", str(run)], *(["convert", "zero3", "hf", url, "-o", str(to)] for to in (out, f"{url}-hf"))]
    command = forked([(2, "ckpt.__main__", one) for one in words], ["ckpt.api"])
    env = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=240)
    resumed, same, written = done.stdout.splitlines()
    assert resumed == same and ckpt.open(resumed).world_size == 2 and written == str(out), done
    assert done.stderr.count("resuming with 2 processes of torchrun") == 1
    ckpt.plan(ckpt.open(run), "hf").run(tmp_path / "alone")
    assert files_in(out) == files_in(tmp_path / "alone")
    assert "only one process can write to a store, and there are 2" in done.stderr and "exit code 2" in done.stderr
    assert store.objects("several/outputs-hf") == {}


def test_a_folder_of_a_console_is_free(store: ObjectStore) -> None:
    """It is an empty object with a slash after its name."""
    store.put("console/model/", b"")
    ckpt.plan(ckpt.open(FIXTURES / "moe-zero3"), "hf").run(f"s3://{BUCKET}/console/model")
    assert "model.safetensors" in store.objects("console/model")
    store.put("console/full/", b"content")
    with pytest.raises(UsageError, match="the destination exists"):
        ckpt.plan(ckpt.open(FIXTURES / "moe-zero3"), "hf").run(f"s3://{BUCKET}/console/full")


def test_the_index_comes_last(store: ObjectStore) -> None:
    """At no moment does an incomplete upload look like a checkpoint."""
    conversion = ckpt.plan(ckpt.open(FIXTURES / "moe-zero3"), "zero3")
    url, seen = f"s3://{BUCKET}/last/run", []

    def look(method: str, key: str) -> None:
        if method == "PUT":
            seen.append((key.removeprefix("last/run/"), set(store.objects("last/run"))))

    store.faults = Faults(before=look)
    conversion.run(url)
    others = {*conversion.files, "ckpt-manifest.json"} - {"latest", "config.json"}
    there = dict(seen)
    assert others <= there["latest"]
    assert [name for name, _ in seen][-2:] == ["config.json", "latest"] or others <= there["config.json"]


@pytest.mark.parametrize(
    "faults", [Faults(status=500, num_status=3, writes=True), Faults(num_cut=2, writes=True)], ids=["500", "cut"]
)
def test_faults_that_pass(store: ObjectStore, tmp_path: Path, faults: Faults) -> None:
    conversion = ckpt.plan(ckpt.open(FIXTURES / "moe-zero3"), "hf")
    conversion.run(tmp_path / "out")
    store.faults = faults
    url = f"s3://{BUCKET}/passing/{faults.num_status}"
    conversion.run(url)
    assert (faults.num_status, faults.num_cut) == (0, 0), "the faults did not strike"
    assert store.objects(url.split("/", 3)[3]) == files_in(tmp_path / "out")


@pytest.mark.parametrize(
    ("at", "what"), [(upload._CLAIM, "exists"), ("model.safetensors", "another process is writing")]
)
def test_two_at_one_place(store: ObjectStore, tmp_path: Path, at: str, what: str) -> None:
    """With equal sizes only the bytes would show that each wrote a part and one removed the other's."""
    one, other = (ckpt.plan(ckpt.open(FIXTURES / "moe-zero3"), "hf") for _ in range(2))
    one.run(tmp_path / "out")
    url, refused = f"s3://{BUCKET}/two/{what}", list[str]()

    def run(conversion: ckpt.Conversion) -> None:
        try:
            conversion.run(url)
        except (StorageError, UsageError) as error:
            refused.append(error.what)

    def begin_other(method: str, key: str) -> None:
        if method == "PUT" and key.endswith(at):
            store.faults.before = None
            run(other)

    store.faults = Faults(before=begin_other)
    run(one)
    assert len(refused) == 1 and what in refused[0]
    assert store.objects(f"two/{what}") == files_in(tmp_path / "out")


def test_what_was_killed_is_not_taken_for_free(store: ObjectStore) -> None:
    store.put(f"killed/run 1/{upload._CLAIM}", b"")
    store.put("killed/run 1/model.safetensors", b"")
    with pytest.raises(StorageError, match="another process is writing this destination, or was killed") as caught:
        ckpt.plan(ckpt.open(FIXTURES / "moe-zero3"), "hf").run(f"s3://{BUCKET}/killed/run 1")
    assert str(caught.value.path).endswith(f"/killed/run 1/{upload._CLAIM}")
    assert re.fullmatch(r"this object, made 20\S+ [0-9:]+\+00:00, and 1 more object", str(caught.value.found))
    assert f"`aws s3 rm --recursive 's3://{BUCKET}/killed/run 1/'`" in str(caught.value.hint)
    assert len(store.objects("killed/run 1")) == 2


@pytest.mark.parametrize("after", [1, 2, 5, 7])
def test_credentials_that_expire_in_between(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Also between parts: the store's error is raised, and leftovers that can't be removed are listed."""
    monkeypatch.setattr(upload, "_PART", 5 << 20)
    conversion, count = large_conversion(tmp_path / "in"), 0

    def expire(method: str, key: str) -> None:
        nonlocal count
        count += method in ("PUT", "POST")
        store.faults.expired = store.faults.expired or count > after

    url, store.faults = f"s3://{BUCKET}/expired/{after}", Faults(before=expire)
    with pytest.raises(StorageError, match="the store could not be used") as caught:
        conversion.run(url)
    assert "are they expired?" in str(caught.value.hint)
    assert f"first remove the sent files: `aws s3 rm --recursive {url}/`" in str(caught.value.hint)
    store.faults = Faults()
    assert [*store.objects(f"expired/{after}")] == [upload._CLAIM]
    store.client.delete_object(Bucket=BUCKET, Key=f"expired/{after}/{upload._CLAIM}")
    conversion.run(url)
    assert "model.safetensors" in store.objects(f"expired/{after}")
    for key in store.unfinished():  # nobody could abort these
        (one,) = store.client.list_multipart_uploads(Bucket=BUCKET, Prefix=key)["Uploads"]
        store.client.abort_multipart_upload(Bucket=BUCKET, Key=key, UploadId=one["UploadId"])


@pytest.mark.parametrize("method", ["PUT", "POST"])
def test_interrupted_while_the_claim_is_made_or_removed(store: ObjectStore, method: str) -> None:
    """The request still completes a moment later."""

    def interrupt(asked: str, key: str) -> None:
        if asked == method and (asked == "POST" or key.endswith(upload._CLAIM)):
            store.faults.before = None
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)

    store.faults = Faults(before=interrupt)
    with pytest.raises(KeyboardInterrupt):
        ckpt.plan(ckpt.open(FIXTURES / "moe-zero3"), "hf").run(f"s3://{BUCKET}/interrupted/{method}")
    time.sleep(0.5)
    assert store.objects(f"interrupted/{method}") == {}


def test_a_claim_that_stays_is_told(store: ObjectStore) -> None:
    def expire(method: str, key: str) -> None:
        store.faults.expired = store.faults.expired or (method, key) == ("POST", "")  # the first removal

    store.faults = Faults(before=expire)
    with pytest.raises(StorageError, match="the output is complete, but its in-progress marker") as caught:
        ckpt.plan(ckpt.open(FIXTURES / "moe-zero3"), "hf").run(f"s3://{BUCKET}/claimed")
    assert str(caught.value.path).endswith(f"/claimed/{upload._CLAIM}")
    store.faults = Faults()
    assert {upload._CLAIM, "config.json"} <= store.objects("claimed").keys()


@pytest.mark.parametrize("after", [0, 2, 5])
def test_faults_that_stay(store: ObjectStore, after: int) -> None:
    """Nothing is left there, not even unfinished uploads."""
    conversion = ckpt.plan(ckpt.open(FIXTURES / "moe-zero3"), "zero3")
    count = 0

    def strike(method: str, key: str) -> None:
        nonlocal count
        count += method in ("PUT", "POST")
        if count > after:
            store.faults.status, store.faults.num_status, store.faults.writes = 500, 10**6, method in ("PUT", "POST")

    store.faults = Faults(before=strike)
    with pytest.raises(StorageError):
        conversion.run(f"s3://{BUCKET}/staying/{after}")
    store.faults = Faults()
    assert store.objects(f"staying/{after}") == {}
    assert store.unfinished() == []


def test_a_large_file_goes_in_parts(store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "_PART", 5 << 20)  # S3's minimum
    conversion = large_conversion(tmp_path / "in")
    conversion.run(f"s3://{BUCKET}/parts/good")
    assert store.objects("parts/good")["model.safetensors"][-_LARGE:] == bytes(range(256)) * (_LARGE >> 8)
    assert len([one for one in store.requests if "partNumber" in one.query]) == 5

    real = Views.read_into

    def fails(self: object, name: str, offset: int, buffer: memoryview) -> int:
        if offset >= 12 << 20:
            raise CorruptError("the file ends inside a tensor", path="in/model.safetensors")
        return real(self, name, offset, buffer)  # type: ignore[arg-type]

    monkeypatch.setattr(Views, "read_into", fails)
    with pytest.raises(CkptError, match="ends inside a tensor"):
        conversion.run(f"s3://{BUCKET}/parts/bad")
    assert store.objects("parts/bad") == {}
    assert store.unfinished() == []


def test_files_on_their_way_are_stopped_when_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "_PART", 1)
    begun, stopped, parts = threading.Event(), [], []

    def put(key: str, chunks: Iterator[memoryview], *_: int) -> None:
        if key == "bad":
            assert begun.wait(60)
            raise StorageError("access denied", path=key)
        try:
            for chunk in chunks:
                parts.append(chunk)
                begun.set()
                end = time.monotonic() + 60
                while not sending._stopping and time.monotonic() < end:
                    time.sleep(0.001)
        except StorageError as error:
            stopped.append((error.path, error.args[0]))
            raise

    views: Any = SimpleNamespace(read_into=lambda *_: None)
    sending = upload._Sending(SimpleNamespace(put=put), "", views, lambda _: None)
    with pytest.raises(StorageError, match="access denied"):
        sending.send([TargetFile("bad", 9), TargetFile("good", 9)], hashing=False)
    sending.close()
    assert stopped == [("good", "another file could not be sent")] and len(parts) == 1
