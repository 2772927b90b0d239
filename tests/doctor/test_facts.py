"""`ckpt/commands/doctor/facts.py`, `text.py`, `ckpt/commands/doctor/command.py`: packages and working commands."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import ckpt as ckpt_in_python
from ckpt.commands.doctor import facts, text
from ckpt.errors import LossError, NotFoundError
from tests.support.commands import ckpt, process, snapshot
from tests.support.places import REPOSITORY

#: Extras for developers, and the extra with all others.
NOT_LISTED = {"all", "dev", "docs", "track"}


def test_every_extra_for_users_is_listed() -> None:
    written = (REPOSITORY / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    extras = set(re.findall(r"^(\w+) = \[", written.partition("\n[project.scripts]")[0], re.MULTILINE))
    assert facts.UNLOCKS.keys() == extras - NOT_LISTED


def test_packages_and_extras_are_those_of_the_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.4.0", "peft": "0.18.0", "numpy": "2.1.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    lines = [
        "numpy>=1.26",
        'torch>=2.6; extra == "lora"',
        'peft>=0.17; extra == "lora"',
        'boto3>=1.34; extra == "remote"',
        'wheel; extra == "dev"',
        'winonly>=1; sys_platform == "win32" and extra == "lora"',
    ]
    monkeypatch.setattr(metadata, "requires", lambda _: lines)
    monkeypatch.setattr(metadata, "version", version)
    found = facts.gather([], 4, facts.Trial("ckpt mount"))
    assert [(one.name, one.version) for one in found.packages] == [
        ("boto3", None),
        ("numpy", "2.1.0"),
        ("peft", "0.18.0"),
        ("torch", "2.4.0"),
    ]
    missing = {extra.name: [package.name for package in extra.missing] for extra in found.extras}
    assert missing["lora"] == ["torch"] and missing["remote"] == ["boto3"] and missing["mount"] == []
    shown = "\n".join(text.lines(found))
    assert re.search(r"^torch +2\.4\.0 +takes >=2\.6$", shown, re.MULTILINE)
    assert re.search(r"^lora .* missing torch>=2\.6$", shown, re.MULTILINE)
    assert "hint: pip install 'ckpt-toolkit[lora]' adds lora" in shown
    assert "extras missing: lora, remote" in shown


def test_without_metadata_nothing_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    found = facts.gather([], 1, facts.Trial("ckpt mount"))
    assert found.packages == () and found.extras == ()
    assert "extras missing: unknown, as ckpt-toolkit itself is not installed" in "\n".join(text.lines(found))


def test_a_file_system_is_that_of_the_deepest_mount(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spaced = tmp_path / "a b"
    spaced.mkdir()
    table = f"overlay / overlay rw 0 0\nnode:/x {tmp_path} nfs4 rw 0 0\ntmpfs {spaced}".replace("a b", "a\\040b")
    monkeypatch.setattr(facts, "_text", lambda _: f"{table} tmpfs rw 0 0\nlustre {tmp_path}x lustre rw 0 0\n")
    assert [facts.disk_of(path).file_system for path in (Path("/"), tmp_path, spaced)] == ["overlay", "nfs4", "tmpfs"]
    usage = shutil.disk_usage(tmp_path)
    assert facts.disk_of(tmp_path).total == usage.total


def test_memory_is_what_the_cgroup_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/proc/meminfo": "MemTotal:  2048 kB\nMemAvailable:  1024 kB\n", "/sys/fs/cgroup/memory.max": "max\n"}
    monkeypatch.setattr(facts, "_text", lambda path: files.get(path, ""))
    assert (facts.system_of(3).cores, facts.system_of(3).memory, facts.system_of(3).available) == (3, 2 << 20, 1 << 20)
    files["/sys/fs/cgroup/memory.max"] = "1000\n"
    assert facts.system_of(3).memory == 1000
    files.clear()
    assert facts.system_of(3).memory is None
    assert any("memory unknown" in line for line in text.lines(facts.gather([], 3, facts.Trial("ckpt mount"))))


def test_an_attempt_has_the_reason_and_the_hint_of_the_error() -> None:
    def loses() -> None:
        raise LossError("a tensor goes nowhere", fqn="a.weight", found="none", hint="--names own")

    def lacks() -> None:
        import nowhere_to_be_found  # noqa: F401

    assert facts.attempt("ckpt a", dict) == facts.Trial("ckpt a")
    assert facts.attempt("ckpt a", loses) == facts.Trial(
        "ckpt a", "a tensor goes nowhere: a.weight: none", "--names own"
    )
    assert "No module named 'nowhere_to_be_found'" in (facts.attempt("ckpt a", lacks).problem or "")
    with pytest.raises(KeyError):
        facts.attempt("ckpt a", lambda: {}["an error of ours"])


def test_the_block_for_a_report_names_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = ckpt("doctor").out
    assert f"{tmp_path}: " in shown
    block = shown.partition("```text\n")[2].partition("```\n")[0]
    assert str(tmp_path) not in block and str(Path.home()) not in block
    assert f"torch {metadata.version('torch')}" in block and "file systems: " in block


def test_no_package_that_is_listed_is_loaded() -> None:
    code = "import sys; from ckpt.cli import app\ntry: app(['doctor', '--json'])\nexcept SystemExit: pass\n"
    code += "heavy = {'torch', 'transformers', 'deepspeed', 'peft', 'megatron', 'accelerate', 'boto3'}\n"
    code += "print(sorted(heavy & sys.modules.keys()))"
    done = process(script=code)
    assert done.out.splitlines()[-1] == "[]", done.err
    found = json.loads(done.out.rpartition("[]")[0])["facts"]
    assert {one["name"] for one in found["packages"]} >= {"numpy", "torch", "deepspeed", "megatron-core", "safetensors"}


def test_it_works_without_torch(tmp_path: Path, fixtures: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; sys.argv = ['ckpt', *sys.argv[1:]]\n"
    code += "from ckpt.__main__ import main; main()"
    words = [sys.executable, "-c", code, "doctor", str(fixtures / "toy-zero3")]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"works: ckpt convert auto full {fixtures / 'toy-zero3'}\n" in done.stdout


def test_what_is_said_to_work_does_and_the_rest_does_not(tmp_path: Path, fixtures: Path) -> None:
    """Each printed conversion and local command is run."""
    run = Path(shutil.copytree(fixtures / "trainer-zero2", tmp_path / "run"))
    before = snapshot(run)
    trials = json.loads(ckpt("doctor", run, "--json").out)["commands"]
    assert snapshot(run) == before
    assert {one["problem"] is None for one in trials} == {True, False}
    for number, one in enumerate(trials):
        words = one["command"].split()[1:]
        if words[0] == "push":
            assert "training state" in one["problem"]
            continue
        output = ["-o", str(tmp_path / str(number))] if words[0] in ("convert", "merge-lora") else []
        done = ckpt(*words, *output)
        assert (done.code == 0) == (one["problem"] is None), (one, done.err)
        if one["hint"]:
            assert f"hint: {one['hint']}" in done.err


def test_diagnosis_in_python_is_what_the_command_prints(fixtures: Path) -> None:
    run = fixtures / "toy-zero3"
    found = ckpt_in_python.doctor(run)
    assert found.to_json()["commands"] == json.loads(ckpt("doctor", run, "--json").out)["commands"]
    assert str(found).splitlines()[-1] == ckpt("doctor", run).out.splitlines()[-1]
    assert ckpt_in_python.doctor().checkpoint is None


def test_another_project_of_this_name_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "another project" not in ckpt("doctor").out
    folder = tmp_path / "ckpt-0.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: ckpt\nVersion: 0.1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "warning: another project, ckpt 0.1, is installed, with the same" in ckpt("doctor").out


def test_tables_are_folded_to_the_terminal() -> None:
    lines = list(ckpt_in_python.doctor().lines(60))
    table = lines[lines.index("") + 1 : lines.index("to paste into a bug report")]
    assert max(map(len, table)) <= 60


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_what_cannot_be_opened_ends_with_its_error_behind_the_facts(
    tmp_path: Path, fixtures: Path, words: tuple[str, ...]
) -> None:
    done = ckpt("doctor", tmp_path / "nothing", *words)
    assert done.code == NotFoundError.exit_code and "error: no such file or folder" in done.err
    assert "packages" in done.out
    run = Path(shutil.copytree(fixtures / "toy-zero3", tmp_path / "run"))
    for path in run.rglob("*optim_states.pt"):
        path.write_bytes(path.read_bytes()[:100])
    assert ckpt("doctor", run, *words).code == 4
