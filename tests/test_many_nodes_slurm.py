"""One conversion on two nodes of a real Slurm cluster: a process is killed, and a batch job goes on from there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support.commands import contents, process
from tests.support.engines import REPOSITORY
from tests.support.slurm import Cluster

pytestmark = pytest.mark.slow

ZERO3 = REPOSITORY / "fixtures" / "toy-zero3"
SCRIPT = REPOSITORY / "train" / "slurm" / "convert.sbatch"


def test_killed_on_one_node_and_gone_on_with(cluster: Cluster, tmp_path: Path) -> None:
    convert = ["zero3", "zero3", ZERO3, "--world-size", "4", "-o"]
    assert process("convert", *convert, tmp_path / "alone").code == 0
    out, log = tmp_path / "together", tmp_path / "log"
    dying = [sys.executable, "-m", "tests.support.dying", "1", tmp_path / "died", "convert", *convert, out, "--resume"]
    done = cluster.run("srun", "--nodes=2", "--ntasks=2", "--kill-on-bad-exit=0", *dying, timeout=240)
    assert done.returncode and (tmp_path / "died").exists()
    assert "another process of this conversion has ended" in done.stderr and "rank 1 of 2" in done.stderr, done.stderr
    assert not out.exists()

    asked = ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", f"--output={log}"]
    number = cluster.submit(*asked, SCRIPT, *convert, out)
    cluster.wait_for_state(number, "COMPLETED", "FAILED", timeout=240)
    said = log.read_text()
    assert "2 processes of srun" in said and said.endswith(f"{out}\n") and said.count("wrote ") == 1, said
    there = re.search(r"(\S+ \S?B) were there already", said)
    assert there and not there[1].startswith("0"), said
    assert contents(out) == contents(tmp_path / "alone")

    one = cluster.run("salloc", "--nodes=2", "--ntasks=2", sys.executable, "-m", "ckpt", "convert", *convert, out)
    assert one.returncode == 2 and "the destination exists" in one.stderr and "processes" not in one.stderr, one.stderr
