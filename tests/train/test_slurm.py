"""Jobs on a real Slurm cluster of two nodes."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.support.slurm import Cluster

pytestmark = pytest.mark.slow


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
