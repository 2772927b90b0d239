"""`ckpt/processes/launch.py`: one conversion on several processes, started like common launchers do."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore

from ckpt.errors import UsageError
from ckpt.processes import launch as launching
from ckpt.processes.launch import Launch, joined, launch
from tests.support.commands import contents, process
from tests.support.places import REPOSITORY

ZERO3 = REPOSITORY / "fixtures" / "toy-zero3"
PAGE = (REPOSITORY / "docs" / "many-nodes.md").read_text()
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]

SRUN = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2"}
AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
STARTS: dict[str, tuple[dict[str, str], tuple[str, int, int, str | None, int] | None]] = {
    "nothing": ({}, None),
    "torchrun": (
        {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1234"},
        ("torchrun", 1, 4, "a", 1234),
    ),
    "torchrun, one node": (
        {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a", **AGENT},
        ("torchrun", 1, 4, "@ckpt-29500-2", 29500),
    ),
    "torchrun, one process": ({"RANK": "0", "WORLD_SIZE": "1", **SRUN}, None),
    "torchrun in srun": (
        {"RANK": "5", "WORLD_SIZE": "16", "MASTER_ADDR": "a", **SRUN},
        ("torchrun", 5, 16, "a", 29500),
    ),
    "srun": (SRUN | {"SLURM_STEP_NODELIST": "n[1-2]"}, ("srun", 3, 8, "n1", 20219)),
    "srun, one node": (SRUN | {"SLURM_STEP_NUM_NODES": "1"}, ("srun", 3, 8, "@ckpt-7.2", 20219)),
    "srun, racks": (SRUN | {"SLURM_STEP_NODELIST": "r[03-05,7]n[1-2],b"}, ("srun", 3, 8, "r03n1", 20219)),
    "srun, single nodes": (SRUN | {"SLURM_STEP_NODELIST": "login,n[1-2]"}, ("srun", 3, 8, "login", 20219)),
    "srun, and told where": (SRUN | {"MASTER_ADDR": "a", "MASTER_PORT": "99"}, ("srun", 3, 8, "a", 99)),
    "the shell of salloc": ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NNODES": "2"}, None),
    "its interactive step": ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"}, None),
    "a batch script": ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),
    "mpirun": (
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        ("mpirun", 1, 2, "@ckpt-29500", 29500),
    ),
    "Open MPI 5": (
        dict.fromkeys(("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"), "2")
        | {"OMPI_COMM_WORLD_RANK": "1", "PMIX_NAMESPACE": "prterun-n1-99@1"},
        ("mpirun", 1, 2, "@ckpt-prterun-n1-99@1", 29500),
    ),
    "mpirun on two nodes": (
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
        ("mpirun", 1, 2, None, 29500),
    ),
    "Open MPI's daemon, started by srun": (
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "MASTER_ADDR": "a"}
        | {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        ("mpirun", 3, 4, "a", 29500),
    ),
    "MPICH's daemon, started by srun": (
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "MASTER_ADDR": "a"}
        | {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"},
        ("mpirun", 3, 4, "a", 29500),
    ),
    "srun with PMI": (
        SRUN | {"SLURM_STEP_NODELIST": "n[1-2]", "PMI_RANK": "3", "PMI_SIZE": "8"},
        ("srun", 3, 8, "n1", 20219),
    ),
    "MPICH": ({"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "a"}, ("mpirun", 1, 2, "a", 29500)),
}


@pytest.mark.parametrize("name", STARTS)
def test_who_started_it(name: str) -> None:
    environment, expected = STARTS[name]
    found = launch(environment)
    assert (found and (found.by, found.rank, found.size, found.address, found.port)) == expected
    assert not (found and found.has_agent)


def test_where_they_meet_has_to_be_told() -> None:
    start = Launch("mpirun", 0, 2, ("PMI_RANK", "PMI_SIZE"))
    with pytest.raises(UsageError, match="the address of rank 0 is not set") as caught, joined(start):
        pass
    assert "MASTER_ADDR" in str(caught.value.hint) and "without PMI_RANK and PMI_SIZE" in str(caught.value.hint)


@pytest.mark.parametrize(("rank", "port", "what"), [(2, 29500, "rank"), (1, 65536, "port")])
def test_what_another_job_left_in_the_environment(rank: int, port: int, what: str) -> None:
    start = Launch("torchrun", rank, 2, ("RANK", "WORLD_SIZE"), "127.0.0.1", port)
    with pytest.raises(UsageError, match=f"this {what} is out of range") as caught, joined(start):
        pass
    assert "without RANK and WORLD_SIZE" in str(caught.value.hint)


@pytest.mark.parametrize("agent", ["False", "True"])
def test_who_waits_for_the_first_process_can_be_ended(agent: str) -> None:
    """While it waits, torch notices a signal only after five minutes."""
    with closing(socket.socket()) as taken:  # and nobody listens
        taken.bind(("127.0.0.1", 0))
        where = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        where["TORCHELASTIC_USE_AGENT_STORE"] = agent
        script = (
            "import signal, threading, time, ckpt.processes.sockets as sockets\n"
            "wait = sockets.connect\n"
            "def waits(*where): threading.Timer(0.3, signal.raise_signal, [signal.SIGTERM]).start(); wait(*where)\n"
            "sockets.connect = waits\n"
            "from ckpt.__main__ import main; main()"
        )
        words = [sys.executable, "-c", script, "convert", "zero3", "hf", str(ZERO3), "-o", "out"]
        done = subprocess.run(words, env=os.environ | where, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 143


def test_processes_meet_that_come_late_or_were_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first look of rank 0, rank 1 takes the place of a dead process, and rank 2 comes."""
    store, names, sleep = HashStore(), dict[int, str](), time.sleep
    store.set_timeout(timedelta(seconds=20))
    monkeypatch.setattr(launching, "_JOINING", timedelta(seconds=20))
    store.set("ckpt/joins/1", "dead")

    def meet(rank: int) -> None:
        names[rank] = launching._attempt(store, rank, 3)

    late = [threading.Thread(target=meet, args=[rank]) for rank in (1, 2)]

    def come(seconds: float) -> None:
        if late[0].ident is None:
            for thread in late:
                thread.start()
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", come)
    meet(0)
    for thread in late:
        thread.join(60)
    assert names == dict.fromkeys(range(3), names[0])
    assert store.get("ckpt/answer/dead").decode() == names[0] and not store.check([f"{names[0]}/0"])


WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from ckpt.__main__ import main; main()"
#: Killed after it has written its share.
KILLED = "import ckpt.move.workers as w, os; w.Workers.join = lambda *_: os.kill(os.getpid(), 9); " + WITHOUT_TORCH


def test_torchrun_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", **agent}.items():
        monkeypatch.setenv(name, value)
    done = process("convert", "zero3", "hf", ZERO3, "-o", tmp_path / "out", script=WITHOUT_TORCH)
    assert done.code == 2 and "torch to work together under torchrun" in done.err and "pip install torch" in done.err


CONVERT = ("convert", "zero3", "zero3", ZERO3, "--world-size", "4", "-o")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what one process writes."""
    out = tmp_path_factory.mktemp("alone") / "out"
    assert process(*CONVERT, out).code == 0
    return contents(out)


class TestSrunWithoutTorch:
    """Processes with Slurm's variables, and no torch."""

    def started(
        self, *commands: Sequence[str | Path], port: int, scripts: Mapping[int, str] = {}
    ) -> list[subprocess.Popen[str]]:
        """Start one rank for each command."""
        step = {"SLURM_STEP_NUM_TASKS": str(len(commands)), "SLURM_STEP_NODELIST": "localhost"}
        return [
            subprocess.Popen(
                [sys.executable, "-c", scripts.get(rank, WITHOUT_TORCH), *map(str, command)],
                env=os.environ | step | {"SLURM_PROCID": str(rank), "MASTER_PORT": str(port)},
                cwd=REPOSITORY,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, command in enumerate(commands)
        ]

    def test_a_conversion(self, tmp_path: Path, alone: dict[str, str]) -> None:
        ranks = self.started(*[(*CONVERT, tmp_path / "together")] * 3, port=free_port())
        printed = [rank.communicate(timeout=60) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * 3, printed
        assert [out for out, _ in printed] == [f"{tmp_path / 'together'}\n", "", ""]
        assert contents(tmp_path / "together") == alone

    def test_resume(self, tmp_path: Path) -> None:
        shutil.copytree(ZERO3, tmp_path / "run", ignore=shutil.ignore_patterns("truth"))
        resume = ("resume", tmp_path / "run", "--format", "zero3")
        ranks = self.started(resume, resume, port=free_port())
        (first, told), (second, _) = (rank.communicate(timeout=60) for rank in ranks)
        assert [rank.returncode for rank in ranks] == [0, 0], told
        assert first == second and "converted from" in told
        assert (Path(first.strip()) / "latest").is_file() or Path(first.strip()).is_dir()

    def test_one_is_killed_and_the_rest_is_done_by_others(self, tmp_path: Path, alone: dict[str, str]) -> None:
        ranks = self.started(*[(*CONVERT, tmp_path / "out")] * 3, port=free_port(), scripts={1: KILLED})
        first, _, last = (rank.communicate(timeout=60)[1] for rank in ranks)
        assert [rank.returncode for rank in ranks] == [7, -signal.SIGKILL, 7], first
        assert "has ended, or cannot be reached any more: rank 1 of 3" in first and not last
        assert "kept: " in first and not (tmp_path / "out").exists()
        ranks = self.started(*[(*CONVERT, tmp_path / "out")] * 2, port=free_port())
        assert "left by a stopped conversion" in ranks[0].communicate(timeout=60)[1]
        assert [rank.wait(60) for rank in ranks] == [0, 0]
        assert contents(tmp_path / "out") == alone

    def test_one_of_them_fails(self, tmp_path: Path) -> None:
        """All end with the first one's exit code."""
        convert = ("convert", "zero3", "hf", ZERO3, "-o", tmp_path / "out")
        ranks = self.started(convert, (*convert, "--dtype", "fp32"), port=free_port())
        told = [rank.communicate(timeout=60)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [2, 2], told
        assert "different options: dtype (in rank 1 of 2" in told[0] and not told[1]

    def test_nobody_else_comes(self, tmp_path: Path) -> None:
        """Another program holds the port, then the first process is ended."""
        convert = ("convert", "zero3", "hf", ZERO3, "-o", tmp_path / "out")
        with closing(socket.create_server(("127.0.0.1", 0))) as taken:
            first, second = self.started(convert, convert, port=taken.getsockname()[1])
            assert "Address already in use" in first.communicate(timeout=60)[1] and first.returncode == 7
        second.send_signal(signal.SIGTERM)
        second.communicate(timeout=60)
        assert second.returncode in (143, -signal.SIGTERM)


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port: int = free.getsockname()[1]
    return port


def test_two_agents_of_torchrun_and_a_process_that_is_killed(tmp_path: Path, alone: dict[str, str]) -> None:
    """The agents restart all processes, and they continue from the journals."""
    port = free_port()
    agent = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "2", "--rdzv-backend", "c10d"]
    agent += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "two", "--monitor-interval", "0.1"]
    command = [
        *TORCHRUN,
        *agent,
        "-m",
        "tests.support.dying",
        "KILL",
        "1",
        str(tmp_path / "died"),
        *map(str, CONVERT),
        str(tmp_path / "together"),
    ]
    agents = [
        subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        printed = [agent.communicate(timeout=120) for agent in agents]
    finally:
        for one in agents:
            one.terminate()
    assert [agent.returncode for agent in agents] == [0, 0], printed
    assert contents(tmp_path / "together") == alone
    out, err = ("".join(parts) for parts in zip(*printed, strict=True))
    assert out == f"{tmp_path / 'together'}\n", "one process prints"
    assert err.count("wrote ") == 1 and "exitcode: -9" in err, err
    there = re.search(r"(\S+ \S?B) were there already", err)
    assert there and not there[1].startswith("0"), err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["died", "together"]


def test_the_page_on_many_nodes(tmp_path: Path) -> None:
    """Run its terminal lines in order."""
    shutil.copytree(ZERO3, tmp_path / "outputs", ignore=shutil.ignore_patterns("truth"))
    lines = re.findall(r"^\$ (.+)$", PAGE, re.MULTILINE)
    assert len(lines) == 2
    run(["bash", "-c", "set -e\n" + "\n".join(lines).replace("torchrun", " ".join(TORCHRUN))], tmp_path)
    assert {"ckpt-manifest.json", "model.safetensors"} <= set(contents(tmp_path / "model"))
    assert (tmp_path / "resharded" / "latest").is_file()


def run(command: Sequence[str], folder: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


MPIRUN = """#!/usr/bin/env python3
import os, subprocess, sys
words = sys.argv[1:]
number = int(words[words.index("-n") + 1])
command = words[words.index("python") :]
known = {"OMPI_COMM_WORLD_SIZE": str(number), "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
ranks = [
    subprocess.Popen(command, env=os.environ | known | {"OMPI_COMM_WORLD_RANK": str(rank)}) for rank in range(number)
]
sys.exit(max(rank.wait() for rank in ranks))
"""


def test_the_batch_script_for_pbs(tmp_path: Path) -> None:
    """PBS's variables are set, and the processes are started like Open MPI on two nodes."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "mpirun").write_text(MPIRUN)
    (programs / "mpirun").chmod(0o755)
    (tmp_path / "nodes").write_text("localhost\nlocalhost\n")
    shutil.copytree(ZERO3, tmp_path / "run", ignore=shutil.ignore_patterns("truth"))
    with closing(socket.create_server(("localhost", 0))) as free:
        number = (free.getsockname()[1] - 20000) % 20000
    environment = os.environ | {
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "PBS_O_WORKDIR": str(tmp_path),
        "PBS_NODEFILE": str(tmp_path / "nodes"),
        "PBS_JOBID": f"{number}.server",
        "WORDS": "zero3 hf run -o out",
    }
    script = REPOSITORY / "examples" / "pbs" / "convert.pbs"
    done = subprocess.run(
        ["bash", script], env=environment, cwd="/", capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "converting with 2 processes of mpirun" in done.stderr
    assert process("convert", "zero3", "hf", "run", "-o", "alone", "-q", cwd=tmp_path).code == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")
