"""`ckpt/stores/objects.py`: Google's XML API, simulated by moto's S3 server; credentials are not tested."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckpt
from ckpt import api
from ckpt.errors import CorruptError, NotFoundError, StorageError
from ckpt.stores import objects
from tests.support.object_store import BUCKET, Faults, ObjectStore
from tests.support.places import FIXTURES

RUN = FIXTURES / "toy-zero3"


@pytest.fixture
def google(store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    account = tmp_path / "account.json"
    no_key = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    account.write_text(json.dumps({"gcs_base_url": store.endpoint, "disable_oauth": True, **no_key}))
    for name in store.environment():
        monkeypatch.delenv(name)
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(account))
    return store


def test_a_run_is_that_on_the_disk_and_converted_to_there(google: ObjectStore, tmp_path: Path) -> None:
    google.upload(RUN, "google/run")
    there = ckpt.open(f"gs://{BUCKET}/google/run")
    assert api.digests(there) == api.digests(ckpt.open(RUN))
    ckpt.plan(there, "hf").run(f"gs://{BUCKET}/google/out")
    ckpt.plan(ckpt.open(RUN), "hf").run(tmp_path / "out")
    written = google.objects("google/out")
    assert written.keys() == {path.name for path in (tmp_path / "out").iterdir()}
    assert written["model.safetensors"] == (tmp_path / "out" / "model.safetensors").read_bytes()


def test_a_large_file_is_sent_in_parts(google: ObjectStore, tmp_path: Path) -> None:
    tensor = np.arange(5 << 20, dtype=np.float32)
    save_file({"a": tensor}, tmp_path / "model.safetensors")
    google.requests.clear()
    ckpt.plan(ckpt.open(tmp_path / "model.safetensors"), "hf").run(f"gs://{BUCKET}/google/large", manifest=False)
    assert len([one for one in google.requests if one.method == "PUT" and "partNumber" in one.query]) == 3
    assert google.objects("google/large")["model.safetensors"].endswith(tensor.tobytes())
    assert google.unfinished() == []


@pytest.mark.parametrize("faults", [Faults(status=503, num_status=3), Faults(num_cut=3)], ids=["503", "cut"])
def test_faults_that_pass(google: ObjectStore, faults: Faults) -> None:
    google.upload(RUN, "google/faults")
    google.faults = faults
    assert api.digests(ckpt.open(f"gs://{BUCKET}/google/faults")) == api.digests(ckpt.open(RUN))


def test_an_object_that_is_replaced_meanwhile_is_refused(google: ObjectStore) -> None:
    google.put("google/replaced/latest", b"global_step2")
    store = objects.store("gs", BUCKET)
    (entry,) = store.below("google/replaced")
    assert bytes(store.read(entry, 0, 6)) == b"global"
    google.put("google/replaced/latest", b"GLOBAL_STEP2")
    with pytest.raises(CorruptError, match="was replaced while it was being read"):
        store.read(entry, 0, 6)


def test_a_bucket_that_is_not_there_is_named(google: ObjectStore) -> None:
    with pytest.raises(NotFoundError, match="no such store"):
        ckpt.open("gs://no-such-bucket/run")


def test_a_store_that_takes_nothing_is_said_without_a_guess(google: ObjectStore) -> None:
    google.faults = Faults(status=500, num_status=1000, writes=True)
    with pytest.raises(StorageError, match="the store could not be used") as caught:
        ckpt.plan(ckpt.open(RUN), "hf").run(f"gs://{BUCKET}/google/refused")
    assert caught.value.hint is None, "credentials are not the matter"
    assert google.objects("google/refused") == {}
