"""Conversions from and to an S3 store on the loopback with failing requests."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import ckpt
from ckpt.base.errors import CkptError
from ckpt.stores import objects
from ckpt.stores.upload import LAST_FILES
from ckpt.testing.conformance import digests
from tests.faults.running import Ending
from tests.faults.samples import TARGETS, How, Sample, some_target
from tests.support.object_store import BUCKET, Faults, serve

#: Faults and how many times each strikes.
_FAULTS: dict[str, Callable[[Random], dict[str, Any]]] = {
    "an error": lambda random: {"status": random.choice((500, 503, 403)), "num_status": random.choice((1, 3, 100))},
    "cut off": lambda random: {"num_cut": random.choice((1, 3, 100))},
    "no ETags": lambda _: {"no_etags": True},
    "expired": lambda _: {"expired": True},
    "a listing without end": lambda _: {"never_ends": True},
    "nothing": lambda _: {},
}


_NUMBERS = itertools.count()


def stores(sample: Sample, folder: Path, random: Random) -> Iterator[tuple[str, Ending]]:
    """Convert from or to a store with failing requests: all must arrive, or nothing may look complete."""
    with ExitStack() as stack:
        server = stack.enter_context(serve())
        moment = objects.timedelta(milliseconds=1)
        backoff = {"init_backoff": moment, "max_backoff": moment, "base": 2}
        stack.enter_context(mock.patch.dict(os.environ, server.environment()))
        stack.enter_context(mock.patch.object(objects, "FIRST_WAIT", 0.001))
        stack.enter_context(mock.patch.dict(objects.RETRIES, {"backoff": backoff}))
        stack.enter_context(mock.patch.object(objects, "LISTING", 5.0))
        while True:
            target, expected = some_target(sample, random, {How.WRITTEN})
            how, writes = random.choice(list(_FAULTS)), random.random() < 0.5
            prefix, out = f"{sample.name}/{next(_NUMBERS)}", folder / "out"  # moto keeps objects beyond a server's end
            url = f"s3://{BUCKET}/{prefix}" if writes else server.upload(sample.path, prefix)
            objects.store.cache_clear()
            server.faults = Faults(**_FAULTS[how](random), writes=writes)
            name, wrong = _ending(target, *((sample.path, url) if writes else (url, out)))
            server.faults = Faults()
            if writes:
                _save(server.objects(prefix), out)
            found = digests(out) if out.exists() else {}
            if wrong is None and name == "equal to the truth" and found != expected:
                wrong = "something else is written"
            elif (
                wrong is None
                and name != "equal to the truth"
                and any(map(LAST_FILES.fullmatch, map(os.path.basename, found)))
            ):
                wrong = f"what says that it is complete is there: {sorted(found)}"
            for path in folder.iterdir():
                shutil.rmtree(path)
            yield f"{sample.name} {'to' if writes else 'from'} a store as {target}: {how}", (name, wrong)


def _ending(target: str, source: Path | str, to: Path | str) -> Ending:
    way = TARGETS[target]
    try:
        ckpt.plan(ckpt.open(source), way.format, way.layout).run(to, manifest=False)
    except CkptError as error:
        code = error.exit_code
        return f"refused with {code}", None if code in (4, 7) else f"exit code {code}: {error.what}"
    except Exception as error:
        return "", f"{type(error).__name__}: {error}"
    return "equal to the truth", None


def _save(there: dict[str, bytes], out: Path) -> None:
    for name, content in there.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(content)
