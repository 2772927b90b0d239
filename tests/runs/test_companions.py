"""`ckpt/runs/model_files.py`: pipes, devices, folders and impossible names in place of a file are refused at once."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpt.errors import CorruptError
from ckpt.move.json_files import MAX_JSON_DEPTH, read_json
from tests.support.commands import Result, ckpt
from tests.support.places import REPOSITORY
from tests.support.sampling import sample


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    """Fail a test that waits for a pipe's other end, so that the suite does not hang."""

    def over(*_: object) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, 30)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


KINDS: dict[str, Callable[[Path], None]] = {
    "a pipe": lambda path: os.mkfifo(path),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": lambda path: path.mkdir(),
    "a link to itself": lambda path: path.symlink_to(path.name),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a Hub folder with an index and companion files."""
    folder = tmp_path_factory.mktemp("model") / "model"
    options = ("--max-shard-size", "2KB", "--no-manifest")
    assert ckpt("convert", "zero2", "hf", REPOSITORY / "fixtures" / "toy-zero2", "-o", folder, *options).code == 0
    (folder / "config.json").write_text('{"hidden_size": 4}')
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_in_the_place_of_trainers_optimizer(fixtures: Path, tmp_path: Path, kind: str) -> None:
    """Without HF Trainer's optimizer file only the weights would be left."""
    run = Path(shutil.copytree(fixtures / "trainer-plain", tmp_path / "run"))
    file = run / "checkpoint-2" / "optimizer.pt"
    file.unlink()
    KINDS[kind](file)
    result = ckpt("convert", "auto", "full", run, "-o", tmp_path / "out")
    assert result.code in (4, 5) and not (tmp_path / "out").exists(), result


def commands(path: Path, out: Path) -> Iterator[Result]:
    yield ckpt("inspect", path)
    yield ckpt("convert", "auto", "hf", path, "-o", out / "hf")
    yield ckpt("convert", "auto", "full", path, "-o", out / "full")
    yield ckpt("hash", path)
    yield ckpt("verify", path)
    yield ckpt("verify", path, path)


def placed(*names: str) -> list[tuple[str, str]]:
    """Return names with kinds: a link to itself and another kind for each name, then all others."""
    kinds = list(KINDS)
    cases = [
        (name, kinds[(place + turn) % len(kinds)]) for turn in range(len(kinds)) for place, name in enumerate(names)
    ]
    return sample(cases, lambda case: (case[1], (case[0], case[1] == "a link to itself")))


@pytest.mark.parametrize(
    ("name", "kind"),
    placed(
        *("model.safetensors.index.json", "config.json", "generation_config.json", "tokenizer_config.json"),
        "ckpt-manifest.json",
    ),
)
def test_beside_weights(model: Path, tmp_path: Path, name: str, kind: str) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    path = folder / name
    path.unlink(missing_ok=True)
    KINDS[kind](path)
    codes = [result.code for result in commands(folder, tmp_path / "out")]
    assert set(codes) <= {0, 3, 4, 5}, codes
    if name.endswith("index.json") and kind in ("a pipe", "a device"):
        assert codes == [4 if kind == "a pipe" else 5] * 4 + [3] + [4 if kind == "a pipe" else 5]


@pytest.mark.parametrize(
    ("name", "kind"),
    placed("latest", "global_step2/mp_rank_00_model_states.pt", "config.json", "adapter_config.json", "model.pt"),
)
def test_in_a_run(fixtures: Path, tmp_path: Path, name: str, kind: str) -> None:
    run = Path(shutil.copytree(fixtures / "toy-zero2", tmp_path / "run"))
    path = run / name
    path.unlink(missing_ok=True)
    KINDS[kind](path)
    codes = [result.code for result in commands(run, tmp_path / "out")]
    assert set(codes) <= {0, 3, 4, 5}, codes
    assert ckpt("merge-lora", run).code in (3, 4, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_in_the_place_of_an_optimizer(fixtures: Path, tmp_path: Path, kind: str) -> None:
    """A damaged optimizer must not make it a model without optimizer."""
    full = tmp_path / "full"
    assert ckpt("convert", "zero2", "full", fixtures / "toy-zero2", "-o", full, "-q").code == 0
    (full / "optimizer.bin").unlink()
    KINDS[kind](full / "optimizer.bin")
    assert ckpt("inspect", full).code in (4, 5)


@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin", "model.safetensors", ".metadata", "common.pt"])
def test_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / name)
    codes = [result.code for result in commands(tmp_path / "run", tmp_path / "out")]
    assert set(codes) <= {3, 4}, codes


def test_a_name_that_is_too_long_is_damage(model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = "x" * 4000 + ".safetensors"
    index["weight_map"] = dict.fromkeys(index["weight_map"], name)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    result = ckpt("inspect", folder)
    assert result.code == 4, result.err
    assert "File name too long" in result.err and len(result.err) < 2000


@pytest.mark.parametrize("depth", [101, 480, 900, 200_000])
@pytest.mark.parametrize(
    ("name", "codes"),
    [("config.json", (4, 4, 4)), ("trainer_state.json", (4, 4, 4)), ("generation_config.json", (0, 4, 4))],
)
def test_json_that_is_nested_too_deeply(
    fixtures: Path, tmp_path: Path, name: str, codes: tuple[int, ...], depth: int
) -> None:
    """Deep nesting could exhaust the recursion limit, so both reading and copying refuse it."""
    run = Path(shutil.copytree(fixtures / "trainer-plain", tmp_path / "run"))
    content = json.loads((run / "checkpoint-2" / name).read_text())
    deep = '{"a":' * depth + "1" + "}" * depth
    (run / "checkpoint-2" / name).write_text(json.dumps(content)[:-1] + f', "deep": {deep}' + "}")
    commands = (("inspect", run), ("check", run), ("convert", "auto", "hf", run, "-o", tmp_path / "out"))
    assert tuple(ckpt(*command).code for command in commands) == codes


def test_json_that_is_nested_as_deep_as_may_be(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH)
    read_json(path)
    path.write_text("[" * (MAX_JSON_DEPTH + 1) + "]" * (MAX_JSON_DEPTH + 1))
    with pytest.raises(CorruptError, match="nested too deeply"):
        read_json(path)


def test_a_path_that_may_not_be_read(fixtures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a user other than root this is neither a usage error nor a missing path."""
    run = Path(shutil.copytree(fixtures / "toy-zero2", tmp_path / "run"))
    real = {name: getattr(os, name) for name in ("listdir", "scandir", "open", "stat", "lstat")}

    def refusing(name: str) -> Callable[..., object]:
        def call(path: object = ".", *args: object, **options: object) -> object:
            inside = isinstance(path, str | os.PathLike) and Path(path).is_relative_to(run)
            if inside and (Path(path) != run or name in ("listdir", "scandir", "open")):
                raise PermissionError(13, "Permission denied", os.fspath(path))
            return real[name](path, *args, **options)

        return call

    for name in real:
        monkeypatch.setattr(os, name, refusing(name))
    for command in (("inspect", run), ("convert", "auto", "hf", run, "-o", tmp_path / "out"), ("hash", run)):
        result = ckpt(*command)
        assert (result.code, "Permission denied" in result.err) == (7, True), result.err
