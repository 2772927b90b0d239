"""A real Slurm cluster with two nodes on this machine, for root with slurm-wlm and munge.

`missing()` lists missing tools. `python -m tests.support.slurm FOLDER` stops the cluster in FOLDER when its input ends.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.places import REPOSITORY

NODES = ("n1", "n2")
_HOSTS, _LINE = Path("/etc/hosts"), "127.0.0.1 n1 n2 # a test cluster\n"
_NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")


def missing() -> str:
    """Return why this machine can't run a cluster, or "" if it can."""
    lacking = [name for name in _NEEDED if shutil.which(name, path=_path()) is None]
    if lacking:
        return f"not installed: {', '.join(lacking)} (apt-get install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "a Slurm cluster can only be started by root"


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


@dataclass(frozen=True)
class Cluster:
    """Slurm cluster; `folder` has its configuration and its daemons' logs."""

    folder: Path

    @property
    def env(self) -> dict[str, str]:
        """Return a user's environment: this Python and this checkout, without variables of the tests' launch."""
        ours = ("SLURM", "SBATCH", "MASTER_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return inherited | {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), _path()]),
            "PYTHONPATH": str(REPOSITORY),
        }

    def run(self, *words: str | Path, timeout: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a user's command in the checkout; the caller checks its exit code."""
        command = [str(word) for word in words]
        return subprocess.run(
            command, cwd=REPOSITORY, env=self.env | env, capture_output=True, text=True, timeout=timeout
        )

    def ask(self, *words: str | Path, **env: str) -> str:
        """Return a command's output. Raise AssertionError with its output if it fails."""
        done = self.run(*words, **env)
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout.strip()

    def submit(self, *words: str | Path, **env: str) -> str:
        """Submit these words with `sbatch` and return the job number."""
        return self.ask("sbatch", "--parsable", *words, **env)

    def job(self, number: str) -> dict[str, str]:
        """Return `scontrol show job` by field."""
        shown = self.ask("scontrol", "show", "job", "--oneliner", number)
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def wait(self, condition: Callable[[], bool], what: str, timeout: float = 120) -> None:
        """Wait until the condition holds. Raise AssertionError after the timeout."""
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, f"not within {timeout} s: {what}\n{self.ask('squeue', '--long')}"
            time.sleep(0.1)

    def wait_for_state(self, number: str, *states: str, timeout: float = 120) -> None:
        """Wait until the job is in one of these states."""
        self.wait(lambda: self.job(number)["JobState"] in states, f"job {number} in {', '.join(states)}", timeout)

    def wait_for_requeue(self, number: str, times: str) -> None:
        """Wait until the job has been requeued so many times and could start again.

        slurmd refuses a job's credential from the second in which the last one was revoked.
        """
        self.wait(lambda: self.job(number).get("Restarts") == times, f"job {number} requeued")
        requeued = time.monotonic()
        self.wait(lambda: time.monotonic() > requeued + 2, "another second")

    def start_again(self, number: str, times: str) -> None:
        """Wait for the requeue and restart the job now: Slurm would delay it for a credential's lifetime."""
        self.wait_for_requeue(number, times)
        self.wait(lambda: self.job(number)["JobState"] != "COMPLETING", f"job {number} ended everywhere")
        self.run("scontrol", "update", f"jobid={number}", "starttime=now")  # no effect if it has started meanwhile

    def wait_for_nodes(self) -> None:
        """Wait until both nodes answer and are idle, and no job is ending on one: sinfo still calls that idle."""
        self.wait(lambda: not self.ask("squeue", "-h"), "jobs gone", 60)
        self.wait(lambda: self.ask("sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D") == "2", "nodes idle", 60)

    @contextmanager
    def dead(self, node: str) -> Iterator[None]:
        """Kill a node's daemon and all its processes, like a power cut, while the context is open."""
        os.kill(int((self.folder / f"slurmd.{node}.pid").read_text()), signal.SIGKILL)
        while running := self._processes_of(node):
            for pid in running:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        try:
            yield
        finally:
            self.ask("slurmd", "-N", node, "-f", self.folder / "slurm.conf")

    def _processes_of(self, node: str) -> list[int]:
        """Return the pids of tasks, batch scripts, their children, and Slurm's own process in each session."""
        sessions, found = set[int](), list[tuple[int, int]]()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                pid = int(process.name)
                found.append((pid, os.getsid(pid)))
                variables = {f"SLURMD_NODENAME={node}".encode(), f"SLURM_CONF={self.folder}/slurm.conf".encode()}
                if variables <= set((process / "environ").read_bytes().split(b"\0")):
                    sessions.add(os.getsid(pid))
        return [pid for pid, session in found if session in sessions]

    @contextmanager
    def configured(self, **settings: str | int) -> Iterator[None]:
        """While open, change part of the configuration."""
        file = self.folder / "slurm.conf"
        before = file.read_text()
        changed = before
        for name, value in settings.items():
            changed = re.sub(rf"(?m)^{name}=.+$", f"{name}={value}", changed)
        file.write_text(changed)
        self.ask("scontrol", "reconfigure")
        try:
            yield
        finally:
            file.write_text(before)
            self.ask("scontrol", "reconfigure")

    @contextmanager
    def frozen(self, node: str) -> Iterator[None]:
        """Stop a node's daemon while the context is open, so that it does not answer."""
        self.wait_for_nodes()  # unfinished cleanup would delay the next job
        daemon = int((self.folder / f"slurmd.{node}.pid").read_text())
        os.kill(daemon, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(daemon, signal.SIGCONT)


@contextmanager
def started(folder: Path) -> Iterator[Cluster]:
    """Start a cluster with idle nodes. End all its jobs and daemons on exit, or when this process dies."""
    folder = folder.resolve()
    for name in ("state", *(f"spool.{node}" for node in NODES)):
        (folder / name).mkdir(parents=True)
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(128))
    ports = dict(zip(("port", "port_1", "port_2"), _free_ports(3), strict=True))
    template = Path(__file__).with_name("slurm.conf").read_text()
    (folder / "slurm.conf").write_text(template.format(folder=folder, **ports))
    cluster = Cluster(folder)
    # This process outlives the test process, however it ends, and stops the cluster when its input ends.
    words = [sys.executable, "-m", "tests.support.slurm", str(folder)]
    pipe = subprocess.PIPE
    keeper = subprocess.Popen(words, stdin=pipe, stdout=pipe, cwd=REPOSITORY, start_new_session=True)
    try:
        assert keeper.stdout and keeper.stdout.readline(), "the nodes have their names"
        munge = [f"--{name}={folder}/munge.{name.split('-')[0]}" for name in ("socket", "pid-file", "log-file")]
        cluster.ask("munged", "--force", *munge, f"--key-file={key}", f"--seed-file={folder}/munge.seed")
        cluster.ask("slurmctld", "-f", folder / "slurm.conf")
        for node in NODES:
            cluster.ask("slurmd", "-N", node, "-f", folder / "slurm.conf")
        cluster.wait_for_nodes()
        yield cluster
    finally:
        keeper.communicate()
    assert keeper.returncode == 0, f"the cluster has not ended as it should; see {folder}"


def _stop(cluster: Cluster) -> None:
    """Stop all jobs, then all daemons."""
    try:
        if (cluster.folder / "slurmctld.pid").is_file():
            cluster.run("scancel", "--full", "--user=root")
            cluster.run("scancel", "--signal=KILL", "--user=root")
            cluster.wait(lambda: not cluster.ask("squeue", "-h"), "jobs gone")
    finally:
        for daemon in (*(f"slurmd.{node}" for node in NODES), "slurmctld", "munge"):
            _kill(cluster.folder / f"{daemon}.pid")


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(closing(socket.socket())) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextmanager
def _names() -> Iterator[None]:
    """Resolve n1 and n2 to this machine while the context is open, if they don't already."""
    known: set[str] = set()
    with suppress(OSError):
        known = {socket.gethostbyname(node) for node in NODES}
    if known == {"127.0.0.1"}:
        yield
        return
    with _HOSTS.open("a") as file:
        file.write(_LINE)
    try:
        yield
    finally:
        _HOSTS.write_text(_HOSTS.read_text().replace(_LINE, ""))


def _kill(pid_file: Path) -> None:
    """Kill a daemon. Nobody needs its state, and an orderly end takes seconds."""
    if pid_file.is_file():
        with suppress(ProcessLookupError):
            os.kill(int(pid_file.read_text()), signal.SIGKILL)


if __name__ == "__main__":
    with _names():
        print(flush=True)
        sys.stdin.read()
        _stop(Cluster(Path(sys.argv[1])))
