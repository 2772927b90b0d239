"""`ckpt/stores/objects.py`, `placeholder_files.py`: hostile stores and URLs."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckpt
from ckpt import api
from ckpt.errors import CorruptError, StorageError, UsageError
from ckpt.stores import ranges
from tests.support.commands import ckpt as command
from tests.support.commands import process
from tests.support.object_store import BUCKET, Faults, ObjectStore
from tests.support.places import FIXTURES

RUN = FIXTURES / "toy-zero3"


def test_a_store_without_etags_is_read_and_a_change_is_seen(store: ObjectStore) -> None:
    url = store.upload(RUN, "plain/run")
    store.faults = Faults(no_etags=True)
    there = ckpt.open(url)
    assert api.digests(there) == api.digests(ckpt.open(RUN))
    one = next(key for key in store.objects("plain/run") if key.endswith("optim_states.pt"))
    store.put(f"plain/run/{one}", store.objects("plain/run")[one] + b"more")
    ranges.forget()
    with pytest.raises(CorruptError):
        api.digests(there)


def test_a_listing_that_never_ends_is_an_error(store: ObjectStore) -> None:
    url = store.upload(RUN, "endless/run")
    store.faults = Faults(never_ends=True)
    with pytest.raises(StorageError, match="lists an object twice"):
        ckpt.open(url)
    done = command("inspect", url)
    assert done.code == 7 and "lists an object twice" in done.err


def test_a_destination_of_which_the_listing_never_ends_is_an_error(store: ObjectStore) -> None:
    url = store.upload(RUN, "endless/out")
    store.faults = Faults(never_ends=True)
    done = command("convert", "zero3", "zero3", RUN, "-o", url)
    assert done.code == 7 and "lists an object twice" in done.err


@pytest.mark.parametrize("url", ["s3://{}/a//run", "s3://{}/a/./run", "s3://{}//run", "s3://{}/a/run//"])
def test_a_key_that_would_be_folded_into_another_is_refused(store: ObjectStore, tmp_path: Path, url: str) -> None:
    """In a store they are different folders; a disk path has no such parts."""
    store.upload(RUN, "a/run")
    url = url.format(BUCKET)
    with pytest.raises(UsageError):
        ckpt.open(url)
    for words in (("inspect", url), ("convert", "zero3", "zero3", RUN, "-o", url), ("hash", url)):
        assert command(*words).code == 2, words
    assert [key for key in store.objects("a") if not key.startswith("run/")] == []


@pytest.mark.parametrize("scheme", ["s3", "gs", "hf"])
def test_a_password_in_a_url_is_refused_and_never_shown(scheme: str) -> None:
    for words in (("inspect",), ("hash",), ("convert", "hf", "hf", RUN, "-o"), ("push",)):
        done = command(*words, f"{scheme}://someone:topsecret@bucket/run")
        assert done.code == 2 and "topsecret" not in done.out + done.err, words
    with pytest.raises(UsageError) as caught:
        ckpt.open(f"{scheme}://someone:topsecret@bucket/run")
    assert "topsecret" not in str(caught.value)


def test_a_host_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = process("inspect", "ftp://no-such-host.invalid/run", cwd=tmp_path)
    assert done.code == 7 and "Traceback" not in done.err and "Exception ignored" not in done.err


def test_a_store_that_refuses_to_make_what_nobody_has_says_so(store: ObjectStore) -> None:
    store.faults = Faults(status=412, num_status=100, writes=True)
    done = command("convert", "zero3", "hf", RUN, "-o", f"s3://{BUCKET}/claimed/out")
    assert done.code == 7 and "does not list it" in done.err, done.err
