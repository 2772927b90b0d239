"""Batch jobs on a real Slurm cluster of two nodes: a run is stopped, requeued with one node less, and cancelled."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.support.engines import REPOSITORY, launch
from tests.support.resuming import losses
from tests.support.slurm import Cluster

pytestmark = pytest.mark.slow

TRAIN = REPOSITORY / "train" / "slurm" / "multinode.sbatch"
OPTIONS = {"strategy": "zero2", "model": "toy", "dtype": "fp32"}


def test_a_run_goes_on_with_the_nodes_that_came_back(cluster: Cluster, tmp_path: Path) -> None:
    run, logs = tmp_path / "outputs", tmp_path / "log"
    words = [word for name, value in OPTIONS.items() for word in (f"--{name}", value)]
    asked = ["--gpus-per-node=0", f"--output={logs}"]
    name = f"--job-name={tmp_path / 'ranks'}"
    number = cluster.submit(
        *asked, name, TRAIN, run, "--until", "100000", *words, RANKS_PER_NODE="1", PREFLIGHT="--timeout 120"
    )

    def steps() -> int:
        return len(losses(run)) if (run / "metrics.jsonl").is_file() else 0

    def wait_for_steps(count: int) -> None:
        over = ("FAILED", "COMPLETED", "CANCELLED", "NODE_FAIL")
        cluster.wait(lambda: steps() >= count or cluster.job(number)["JobState"] in over, f"{count} steps", 240)
        printed = [file.read_text()[-2000:] for file in (logs, *tmp_path.glob("ranks-*/*.log")) if file.is_file()]
        assert steps() >= count, "\n".join(printed)

    try:
        wait_for_steps(3)
        job, step = cluster.job(number), cluster.ask("scontrol", "show", "step", f"{number}.1")
        assert job["NumNodes"] == "2" and "mem=16000M" in job["TRES"], "all of both nodes' memory"
        assert re.search(r"TRES=cpu=16\b", step), f"2 ranks with all CPUs of a node each\n{step}"

        cluster.ask("scontrol", "update", "nodename=n2", "state=drain", "reason=broken")
        cluster.ask("scancel", "--signal=USR1", number)  # as Slurm does ahead of the limit, to all ranks
        cluster.wait(lambda: cluster.job(number).get("Restarts") == "1", "requeued")
        saved = steps()
        wait_for_steps(saved + 3)
        assert cluster.job(number)["NumNodes"] == "1"
        cluster.ask("scancel", number)
        cluster.wait_for_state(number, "CANCELLED")
    finally:
        cluster.run("scontrol", "update", "nodename=n2", "state=resume")
        cluster.run("scancel", number)
    log = logs.read_text()
    assert re.search(r"start 0 on n\[1-2\]: 2 ranks", log) and re.search(r"start 1 on n1: 1 ranks", log), log
    assert "written by 2 ranks, and there are 1" in log and "converted from" in log
    ranks = {node: (tmp_path / f"ranks-{number}" / f"{node}.log").read_text() for node in ("n1", "n2")}
    assert "SIGUSR1: saved" in ranks["n1"] and "SIGTERM: saved" in ranks["n1"]
    assert "rank 0 of 2, 8 CPUs" in ranks["n1"] and "rank 0 of 1, 8 CPUs" in ranks["n1"]
    assert re.fullmatch(r"\S+ rank 1 of 2, 8 CPUs\n", ranks["n2"]), ranks["n2"]

    found = losses(run)
    last = max(found)
    assert list(found) == list(range(1, last + 1)), "every step once"
    assert (run / "latest").read_text() == f"global_step{last}" and (run / f"global_step{saved}").is_dir()
    launch([OPTIONS | {"output": str(tmp_path / "unbroken"), "steps": last}], 2, tmp_path)
    whole = losses(tmp_path / "unbroken")
    apart = max(abs(loss - whole[step]) / whole[step] for step, loss in found.items())
    assert apart < 1e-6, "sums in another order, and nothing else"


@pytest.fixture
def nodes_apart(tmp_path: Path) -> Path:
    """A script that runs a command on n2 with another package, other data and a full disk."""
    (tmp_path / "odd" / "deepspeed-0.0.1.dist-info").mkdir(parents=True)
    (tmp_path / "odd" / "deepspeed-0.0.1.dist-info" / "METADATA").write_text("Name: deepspeed\nVersion: 0.0.1\n")
    for node in ("n1", "n2"):
        (tmp_path / node).mkdir()
        (tmp_path / node / "corpus.bin").write_bytes(b"same" * 1000 + node.encode())
    script = tmp_path / "on-each-node"
    script.write_text(
        f"cd {tmp_path}/$SLURMD_NODENAME\n"
        f"[ $SLURMD_NODENAME = n1 ] || {{ export PYTHONPATH={tmp_path}/odd:$PYTHONPATH; ulimit -f 100; }}\n"
        'exec python -m train.preflight "$@"\n'
    )
    return script


def test_the_preflight_names_what_is_odd(cluster: Cluster, nodes_apart: Path, tmp_path: Path) -> None:
    done = cluster.run("srun", "-N2", "bash", nodes_apart, tmp_path / "run", "--timeout", "100", "--data", "corpus.bin")
    said = [line for line in done.stderr.splitlines() if line.startswith("preflight")]
    assert done.returncode == 1 and said[-1] == f"preflight: 2 nodes, {len(said) - 1} problems", done.stderr
    assert any(re.fullmatch(r"preflight: n2: deepspeed 0\.0\.1, and [\d.]+ on n1", line) for line in said)
    assert any(re.match(r"preflight: n2: data in corpus.bin \w{12}, and \w{12} on n1", line) for line in said)
    assert any(line.startswith(f"preflight: n2: no space in {tmp_path}: ") for line in said), said
    assert not any(" n1: " in line for line in said)


def test_the_preflight_names_a_node_that_cannot_be_reached(cluster: Cluster, tmp_path: Path) -> None:
    log, start = tmp_path / "log", time.monotonic()
    command = f"srun python -m train.preflight {tmp_path} --timeout 15"
    with cluster.frozen("n2"):
        number = cluster.submit("-N2", f"--output={log}", "--wrap", command)
        cluster.wait(lambda: log.is_file() and "problems" in log.read_text(), "a verdict", 60)
    assert time.monotonic() - start < 60
    assert "preflight: n2: not heard of within 15 s" in log.read_text()
    cluster.ask("scancel", number)
    cluster.wait_for_state(number, "CANCELLED", "FAILED")
