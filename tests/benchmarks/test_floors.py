"""`benchmarks/floors.py`, `bare_items.py`, `bare_lora.py`, `bare_small.py`, `copying.py`, `zero_spans.py`: floors."""

from __future__ import annotations

import contextlib
import json
import pickle
import re
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from xxhash import xxh3_128

from benchmarks import (
    bare_items,
    bare_lora,
    bare_small,
    copying,
    equal,
    floors,
    megatron_fsdp_source,
    readme,
    stores,
    zero_spans,
)
from benchmarks.measure import Case, Measured, Run
from benchmarks.models import STEP
from benchmarks.runner import Bench
from tests.support.places import REPOSITORY

PAGE = (REPOSITORY / readme.FIGURES).read_text()
REACHED, MISSED = "the bare program reaches it", "even the bare program misses it"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make parts small, so tensors cross them."""
    for module in (copying, bare_small, bare_lora):
        monkeypatch.setattr(module, "PART", 256)


def _write_ranks(step: Path, num_ranks: int) -> None:
    """Write what DeepSpeed's rule reads of ZeRO-3's files, without DeepSpeed's classes."""
    shapes = OrderedDict((name, torch.Size(shape)) for name, shape in {"a": (7, 33), "b": (1,), "c": (64, 5)}.items())
    length = sum(-(-shape.numel() // num_ranks) for shape in shapes.values())
    step.mkdir(parents=True)
    for rank in range(num_ranks):
        state = {"step": torch.tensor(1.0), "exp_avg": torch.rand(length), "exp_avg_sq": torch.rand(length)}
        optimizer = {"optimizer_state_dict": {"state": {0: state}}, "fp32_flat_groups": [torch.randn(length)]}
        file = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"optimizer_state_dict": optimizer}, step / f"{file}_optim_states.pt")
        torch.save({"module": {}, "buffer_names": [], "param_shapes": [shapes]}, step / f"{file}_model_states.pt")


@pytest.mark.parametrize("sync", ["after", "meanwhile", "never"])
def test_copied_spans_are_the_masters(sync: str, parts: None, tmp_path: Path) -> None:
    step = tmp_path / f"global_step{STEP}"
    _write_ranks(step, 3)
    zero_spans.write(step, tmp_path / "spans")
    copying.main(str(tmp_path / "spans" / "spans.json"), str(tmp_path / "copy"), sync)
    assert equal.main("zero3-hf", tmp_path / "copy", step) == 3
    with (tmp_path / "copy" / zero_spans.NAME).open("rb+") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    with pytest.raises(SystemExit, match="c differs"):
        equal.main("zero3-hf", tmp_path / "copy", step)


def test_a_copy_of_a_short_file_is_an_error(tmp_path: Path) -> None:
    source = copying.os.open(tmp_path / "source", copying.os.O_RDWR | copying.os.O_CREAT)
    copying.write(source, memoryview(b"four"), 0)
    copying.read(source, memoryview(bytearray(4)), 0)
    with pytest.raises(AssertionError, match="too short"):
        copying.read(source, memoryview(bytearray(5)), 0)
    copying.os.close(source)


def test_a_bare_copy_has_every_tensor_and_digest(parts: None, tmp_path: Path) -> None:
    source, output = tmp_path / "source", tmp_path / "output"
    source.mkdir()
    tensors = {f"layers.{i}.weight": torch.rand(size, 3) for i, size in enumerate((1, 2, 300, 20, 5, 9))}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_text("{}")
    bare_small.main(str(source), str(output))
    assert equal.main("safetensors", source, output) == len(tensors)
    assert json.loads((output / "digests.json").read_text()) == {
        name: xxh3_128(tensor.numpy()).hexdigest() for name, tensor in sorted(tensors.items())
    }


@pytest.mark.parametrize("alpha", [32, 8])
def test_a_bare_merge_is_the_merge_of_peft(alpha: int, tmp_path: Path) -> None:
    """Use the shapes of the benchmark's largest layers: a product of some rows has other bits."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    layers = {"up": torch.nn.Linear(1024, 3584, bias=False), "down": torch.nn.Linear(3584, 1024, bias=False)}
    model = torch.nn.ModuleDict({**layers, "norm": torch.nn.LayerNorm(9, bias=False)}).to(torch.bfloat16)
    base, adapter, output = (tmp_path / name for name in ("base", "adapter", "output"))
    base.mkdir()
    save_file(model.state_dict(), base / "model.safetensors")
    wrapped = get_peft_model(model, LoraConfig(r=16, lora_alpha=alpha, target_modules=list(layers)))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.02)
    wrapped.save_pretrained(adapter)
    bare_lora.main(str(base), str(adapter), str(output))
    ours, truth = load_file(output / "model.safetensors"), wrapped.merge_and_unload().state_dict()
    before = load_file(base / "model.safetensors")
    assert ours.keys() == truth.keys()
    assert all(torch.equal(ours[name].view(torch.int16), truth[name].view(torch.int16)) for name in truth)
    assert {name for name in truth if not torch.equal(before[name], truth[name])} == {"up.weight", "down.weight"}


def test_a_bare_merge_needs_a_scaling_that_rounds_nothing(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_alpha": 24, "r": 16}))
    with pytest.raises(AssertionError, match="must not round"):
        bare_lora.main(str(tmp_path), str(tmp_path), str(tmp_path / "output"))


def test_bare_items_are_those_that_torch_reads(tmp_path: Path) -> None:
    folder = tmp_path / "iter_0000002"
    megatron_fsdp_source.write(folder, 1)
    stored = FileSystemReader(folder).read_metadata().storage_data.items()
    truth = sorted((index.fqn, info.relative_path, info.offset, info.length) for index, info in stored)
    for kind in ("torch", "plain"):
        found = bare_items.items(str(folder), kind)
        assert [one.name for one in found] == [name for name, *_ in truth]
        assert sorted((one.name, one.file, one.start, one.length) for one in found) == truth
    (folder / ".metadata").write_bytes(pickle.dumps(Path("other")).replace(b"Path", b"Pith"))
    with pytest.raises(KeyError):
        bare_items.items(str(folder), "plain")


class _Section:
    """Replaces all that `floors` runs. References take 1 s, bare programs `seconds`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds
        self.num_rounds: dict[str, int] = {}
        self.written = b"content"
        (folder / "source").mkdir()
        (folder / "source" / "model").write_bytes(b"content")
        (folder / "stored").mkdir()
        monkeypatch.setattr(Bench, "source", lambda *_: folder / "source")
        monkeypatch.setattr(Bench, "rounds", lambda bench, cases: self.rounds(bench, cases))
        monkeypatch.setattr(stores, "OUTPUT", folder / "stored")
        monkeypatch.setattr(stores, "serving", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(stores, "timed_transfers", self.transfers)
        monkeypatch.setattr(floors.small, "sources", lambda bench: (folder, folder))
        monkeypatch.setattr(floors.plans, "source_of", lambda bench, kind: folder)
        monkeypatch.setattr(floors.processes, "FOLDER", folder / "shm")
        monkeypatch.setattr(floors, "run", self.run)
        monkeypatch.setattr(floors, "call", lambda *_: "3")

    def rounds(self, bench: Bench, cases: Sequence[Case]) -> dict[str, Measured]:
        self.num_rounds |= dict.fromkeys((case.name for case in cases), bench.num_rounds)
        return {case.name: Measured(case, (self._run(case.name),) * bench.num_rounds) for case in cases}

    def _run(self, name: str) -> Run:
        is_bare = name.partition(":")[0] in floors.PARTS and name != "small: few, copied and hashed"
        return Run(self.seconds, 20 * self.seconds, 10.0) if is_bare else Run(1.0, 1.0, 10.0)

    def run(self, case: Case) -> None:
        if case.name == "first":
            case.writes[0].mkdir(parents=True, exist_ok=True)
            (case.writes[0] / "model").write_bytes(bytes(1000))

    def transfers(self, bench: Bench, prefix: str, names: Sequence[str]) -> dict[str, list[float]]:
        (self.folder / "stored").mkdir(exist_ok=True)
        (self.folder / "stored" / "0").write_bytes(self.written)
        return {name: [self.seconds if name == floors.UNLOCKED else 1.0] for name in names}


@pytest.fixture(params=[(0.02, REACHED), (9.0, MISSED)], ids=["fast", "slow"])
def ran(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str, _Section]:
    """Return the table of fast or slow bare programs, their verdict, and what was replaced."""
    seconds, verdict = request.param
    section = _Section(monkeypatch, tmp_path, seconds)
    return str(floors.measure(Bench(tmp_path / "bench", 1, 5))), verdict, section


_JUDGED = re.compile(r"^(\w+): .*?\(goal ([<>]= [\d.]+)(?: s)?: ([^)]+)\)$", re.MULTILINE)


def test_each_floor_has_its_goal_and_verdict(ran: tuple[str, str, _Section]) -> None:
    text, verdict, _ = ran
    found = _JUDGED.findall(text)
    assert {name for name, *_ in found} == floors.PARTS.keys()
    assert {said for *_, said in found} == {verdict}
    assert text.count("(goal ") == len(found) == 12
    recorded = readme.sections(readme.RESULTS.read_text())
    for name, goal, _ in found:
        lines = "\n".join(recorded[name].lines)
        assert re.search(rf"\((?:MISSED )?{re.escape(goal)}(?: s)?\)", lines), f"{name} has no goal {goal}"


def test_the_page_shows_each_floor_and_reference(ran: tuple[str, str, _Section]) -> None:
    text, *_ = ran
    _, *lines = text.splitlines()
    table = readme.figures(f"== floors ==\ntoday\n{text}")
    rows = [line.split("  ")[0] for line in lines if re.search(r"\d\.\d\d +\d+\.\d\d +\d+(  |$)", line)]
    assert len(rows) == 17 and all(f"| floors | {name} | " in table for name in rows)
    assert table.count("(goal ") == text.count("(goal ") and "MISSED" not in table


def test_the_title_names_parts_with_fewer_rounds(ran: tuple[str, str, _Section], tmp_path: Path) -> None:
    text, _, section = ran
    title = text.splitlines()[0]
    assert title.endswith(" (3 for cold, 3 for small, 3 for lora, 2 for universal, 2 for processes, 1 for plans)")
    fewer = {name: int(number) for number, name in re.findall(r"(\d) for (\w+)", title)}
    for name, number in section.num_rounds.items():
        part = name.partition(":")[0]
        if part in floors.PARTS:
            assert number == fewer.get(part, 5), name
    assert "rounds" not in str(floors.measure(Bench(tmp_path / "bench", 1, 1))).splitlines()[0]


def test_half_the_time_and_the_start_of_torchrun() -> None:
    """19 s on one core, and 2 s for torchrun: 19 / (9.5 + 2) is 1.65 times the speed."""
    assert floors.speed_on_two(Run(19.0, 19.0, 1.0), Run(2.0, 2.0, 1.0)) == pytest.approx(1.652, abs=0.001)


def test_obstore_must_write_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = _Section(monkeypatch, tmp_path, 1.0)
    section.written = b"another"
    with pytest.raises(AssertionError, match="other bytes"):
        floors.measure(Bench(tmp_path / "bench", 1, 1))


def test_a_floor_is_judged_by_its_goal() -> None:
    faster, slower = floors.Floor("bare", "peer", at_least=5), floors.Floor("bare", "cp", at_most=1.0)
    assert faster.said([5.0]) == f"5.0 (5.0 to 5.0) x faster than peer (goal >= 5: {REACHED})"
    assert faster.said([4.96]) == f"4.96 (5.0 to 5.0) x faster than peer (goal >= 5: {MISSED})"
    assert slower.said([1.0]) == f"1.00 (1.00 to 1.00) x cp (goal <= 1.0: {REACHED})"
    assert slower.said([1.01]) == f"1.01 (1.01 to 1.01) x cp (goal <= 1.0: {MISSED})"


def test_a_recorded_floor_has_its_verdict() -> None:
    """A section's figures may be recorded later than this test is written."""
    factor = re.compile(
        r"([\d.]+)(?: \([\d.]+ to [\d.]+\) x| x| s of cpu) [^;()]*\(goal ([<>])= ([\d.]+)(?: s)?: ([^)]+)\)"
    )
    sample = f"plans: x: 9.9 s of cpu (goal <= 10 s: {REACHED})\nstores: at 0.75 x the y (goal >= 0.8: {MISSED})\n"
    found = factor.findall(sample + readme.RESULTS.read_text())
    assert len(found) == 2 + readme.RESULTS.read_text().count("(goal ")
    for value, sign, limit, said in found:
        is_reached = float(value) <= float(limit) if sign == "<" else float(value) >= float(limit)
        assert said == (REACHED if is_reached else MISSED), (value, sign, limit)


def test_every_missed_goal_is_explained() -> None:
    """The page lists each part of `floors`, and nothing else. Only `many` has a bound of its own."""
    missed = {
        name for name, section in readme.sections(readme.RESULTS.read_text()).items() if "MISSED" in str(section.lines)
    }
    assert missed <= floors.PARTS.keys() | {"many"}
    text = PAGE.partition("### Missed goals")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == sorted(floors.PARTS)
    assert REACHED in text and MISSED in text
    assert not re.search(r"\d (?:s|x|MB|GB)\b", text), "figures are in the record only"
