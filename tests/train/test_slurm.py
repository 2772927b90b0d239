"""Batch jobs on a real Slurm cluster: preempted, stopped, without a node, cancelled. One file starts it once."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import ckpt as toolkit
from fixtures import users
from tests.support.commands import contents, process
from tests.support.engines import launch
from tests.support.places import REPOSITORY
from tests.support.resuming import losses
from tests.support.slurm import Cluster

pytestmark = pytest.mark.slow

TRAIN, SIMPLE = (REPOSITORY / "train" / "slurm" / f"{name}.sbatch" for name in ("multinode", "simple"))
CONVERT = REPOSITORY / "examples" / "slurm" / "convert.sbatch"
ZERO3 = REPOSITORY / "fixtures" / "toy-zero3"
OPTIONS = {"strategy": "zero2", "model": "toy", "dtype": "fp32"}


def path_with(cluster: Cluster, folder: Path, name: str, command: str) -> str:
    """Return a PATH with the test's own command in front; `command` is its shell text."""
    file = folder / "bin" / name
    file.parent.mkdir()
    file.write_text(f"#!/bin/sh\n{command}\n")
    file.chmod(0o755)
    return f"{file.parent}:{cluster.env['PATH']}"


def test_a_run_goes_on_with_the_nodes_that_came_back(
    cluster: Cluster, tmp_path: Path, tables: dict[str, dict[str, dict[str, str]]]
) -> None:
    """It is preempted, saves before the limit, loses a node, and is cancelled."""
    run, logs = tmp_path / "outputs", tmp_path / "log"
    words = [word for name, value in OPTIONS.items() for word in (f"--{name}", value)]
    asked = ["--gpus-per-node=0", f"--output={logs}", f"--job-name={tmp_path / 'ranks'}", TRAIN]
    train = [run, "--until", "100000", "--save-every", "3", *words]
    number = cluster.submit(*asked, *train, RANKS_PER_NODE="1", PREFLIGHT="--timeout 120", SLURM_WAIT="5")
    firsts = []  # each start's first step

    def steps() -> int:
        return len(losses(run)) if (run / "metrics.jsonl").is_file() else 0

    def go_on(nodes: str) -> None:
        """Train three steps on `nodes` nodes."""
        last, over = steps() + 3, ("FAILED", "COMPLETED", "CANCELLED", "NODE_FAIL")
        firsts.append(last - 2)
        cluster.wait(lambda: steps() >= last or cluster.job(number)["JobState"] in over, f"step {last}", 240)
        printed = [file.read_text()[-2000:] for file in (logs, *tmp_path.glob("ranks-*/*.log")) if file.is_file()]
        assert steps() >= last, "\n".join(printed)
        assert cluster.job(number)["NumNodes"] == nodes

    try:
        go_on("2")
        job, step = cluster.job(number), cluster.ask("scontrol", "show", "step", f"{number}.1")
        assert "mem=16000M" in job["TRES"], "all of both nodes' memory"
        assert re.search(r"TRES=cpu=16\b", step), f"2 ranks with all CPUs of a node each\n{step}"

        urgent = cluster.submit("--partition=urgent", "--nodes=1", "--output=/dev/null", "--wrap", "sleep 1000")
        cluster.start_again(number, "1")
        saved = steps()
        go_on("1")
        cluster.ask("scancel", urgent)
        cluster.wait_for_state(urgent, "CANCELLED")  # and its node free, else the job is requeued on its own one
        with cluster.configured(KillWait=5):
            cluster.ask("scancel", "--signal=USR1", number)  # like Slurm before the limit, to all ranks
            cluster.start_again(number, "2")
            go_on("2")
            with cluster.dead("n2"):
                cluster.wait(lambda: "no answer from n2" in logs.read_text(), "a node missed")
                cluster.wait_for_requeue(number, "3")
                # Slurm also starts the requeued job at once.
                cluster.ask("scontrol", "update", "nodename=n2", "state=down", "reason=dead")  # sooner than Slurm
                go_on("1")
        cluster.ask("scancel", number)
        cluster.wait_for_state(number, "CANCELLED")
    finally:
        cluster.run("scancel", "--user=root")
    log = logs.read_text()
    starts, ends = (re.findall(rf"^\d\d:\d\d:\d\d {word} (.+)$", log, re.MULTILINE) for word in ("start", "ended with"))
    assert [re.sub(r"on n\d:", "on one:", start) for start in starts] == [
        "0 on n[1-2]: 2 ranks",
        "1 on one: 1 ranks",
        "2 on n[1-2]: 2 ranks",
        "3 on one: 1 ranks",
    ], log
    assert [re.sub(r"^\d+: no", "no", end) for end in ends] == [
        "143: preempted",
        "75: saved ahead of the limit",
        "no answer from n2",
        "143",
    ], log
    for told in ("written by 2 ranks, and there are 1", "written by 1 rank, and there are 2", "converted from"):
        assert told in log
    ranks = {node: (tmp_path / f"ranks-{number}" / f"{node}.log").read_text() for node in ("n1", "n2")}
    assert ranks["n1"].count("SIGTERM: saved") == 2 and "SIGUSR1: saved" in "".join(ranks.values())
    assert re.findall(r"rank . of 2, . CPUs", ranks["n1"]) == ["rank 0 of 2, 8 CPUs"] * 2
    assert re.findall(r"rank . of 2, . CPUs", ranks["n2"]) == ["rank 1 of 2, 8 CPUs"] * 2

    found = losses(run)
    last = max(found)
    assert sorted(found) == list(range(1, last + 1)), "no step is left out"
    assert (run / "latest").read_text() == f"global_step{last}" and (run / f"global_step{saved}").is_dir()
    launch([OPTIONS | {"output": str(tmp_path / "unbroken"), "steps": last}], 2, tmp_path)
    whole = losses(tmp_path / "unbroken")
    row = tables["a Slurm job that is stopped three times: first losses, and those of the unbroken run"]["toy, zero2"]
    row |= {f"step {step}": f"{found[step]:.7f} {whole[step]:.7f}" for step in firsts[1:]}
    apart = max(abs(loss - whole[step]) / whole[step] for step, loss in found.items())
    row["relative, of all"] = f"{apart:.1e}"
    assert apart < 1e-6, "sums in another order, and nothing else"


def test_the_trainer_to_copy_goes_on_with_fewer_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """It runs under srun alone, and with another engine."""
    asked = ["--gpus-per-node=0", f"--output={tmp_path / 'log'}"]
    uncompiled = path_with(cluster, tmp_path, "python", f'exec {sys.executable} -m tests.train.uncompiled "$@"')
    for nodes, strategy, steps, path in (("2", "fsdp2", "2", cluster.env["PATH"]), ("1", "zero2", "4", uncompiled)):
        words = [strategy, "--output", tmp_path / "run", "--steps", steps]
        number = cluster.submit(f"--nodes={nodes}", *asked, SIMPLE, *words, RANKS_PER_NODE="1", PATH=path)
        cluster.wait_for_state(number, "COMPLETED", "FAILED", timeout=240)
    log = (tmp_path / "log").read_text()
    assert re.findall(r"^step (\d):", log, re.MULTILINE) == ["1", "2", "3", "4"], log
    assert "it is dcp, and zero2 is loaded" in log


@pytest.fixture
def nodes_apart(tmp_path: Path) -> Path:
    """Write a script to run a command on n2 with another package, other data and a full disk."""
    (tmp_path / "odd" / "deepspeed-0.0.1.dist-info").mkdir(parents=True)
    (tmp_path / "odd" / "deepspeed-0.0.1.dist-info" / "METADATA").write_text("Name: deepspeed\nVersion: 0.0.1\n")
    for node in ("n1", "n2"):
        (tmp_path / node).mkdir()
        (tmp_path / node / "corpus.bin").write_bytes(b"same" * 1000 + node.encode())
    script = tmp_path / "on-each-node"
    script.write_text(
        f"cd {tmp_path}/$SLURMD_NODENAME\n"
        f"[ $SLURMD_NODENAME = n1 ] || {{ export PYTHONPATH={tmp_path}/odd:$PYTHONPATH; ulimit -f 100; }}\n"
        'exec python -m ckpt preflight "$@"\n'
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
    log = tmp_path / "log"
    command = f"srun python -m ckpt preflight {tmp_path} --timeout 1"
    with cluster.frozen("n2"):
        number = cluster.submit("-N2", f"--output={log}", "--wrap", command)
        cluster.wait(lambda: log.is_file() and "2 nodes, 1 problem\n" in log.read_text(), "a verdict")
    assert "preflight: n2: not heard of within 1 s" in log.read_text()
    cluster.ask("scancel", number)
    cluster.wait_for_state(number, "CANCELLED", "FAILED")


def test_a_job_that_fails_is_not_requeued(cluster: Cluster, tmp_path: Path) -> None:
    """On a cluster without preemption, `scontrol show job` does not mention it."""
    log = tmp_path / "log"
    path = path_with(cluster, tmp_path, "sleep", "exec /bin/sleep 0.1")  # the script's pause between checks
    with cluster.configured(PreemptType="preempt/none", PreemptMode="OFF"):
        words = ["--nodes=1", f"--output={log}", CONVERT, "zero3", "hf", tmp_path / "not-there"]
        number = cluster.submit(*words, PROCESSES_PER_NODE="2", PATH=path)
        cluster.wait(lambda: log.is_file() and " ended with " in log.read_text(), "its end", 120)
        cluster.wait_for_state(number, "FAILED", "PENDING")
    said, job = log.read_text(), cluster.job(number)
    assert "no such file or folder" in said and said.endswith(" ended with 3\n"), said
    assert (job["JobState"], job["Restarts"], job["ExitCode"]) == ("FAILED", "0", "3:0")
    ends = [re.search(r"(?ms)^end\(\) \{.+?^trap", script.read_text()) for script in (TRAIN, CONVERT)]
    assert ends[0] and ends[1] and ends[0][0] == ends[1][0], "the training script has the same end"


def submit_conversion(cluster: Cluster, folder: Path, *convert: str | Path) -> str:
    """Submit a batch job on both nodes. Its second process stops once, after a written part; the log is `log`."""
    dying = f"{sys.executable} -m tests.support.dying STOP 1 {folder}/waits"
    path = path_with(cluster, folder, "python", f'shift 2\nexec {dying} "$@"')  # `python -m ckpt ...`
    log = folder / "log"
    number = cluster.submit(f"--output={log}", CONVERT, *convert, PATH=path, PROCESSES_PER_NODE="1")
    cluster.wait(lambda: (folder / "waits").exists() and "move: " in log.read_text(), "a line of progress", 240)
    return number


def test_a_preempted_conversion_goes_on_with_the_node_that_is_left(cluster: Cluster, tmp_path: Path) -> None:
    convert = ["zero3", "zero3", ZERO3, "--world-size", "4", "-o"]
    assert process("convert", *convert, tmp_path / "alone").code == 0
    out, log = tmp_path / "together", tmp_path / "log"
    number = submit_conversion(cluster, tmp_path, *convert, out)
    assert not out.exists()
    urgent = cluster.submit("--partition=urgent", "--nodes=1", "--output=/dev/null", "--wrap", "sleep 1000")
    cluster.start_again(number, "1")
    cluster.wait_for_state(number, "COMPLETED", "FAILED", timeout=240)
    cluster.ask("scancel", urgent)
    said = log.read_text()
    assert [re.sub(r"on n\d$", "on one", start) for start in re.findall(r" start (.+)", said)] == [
        "0 on n[1-2]",
        "1 on one",
    ], said
    assert re.findall(r" ended with (.+)", said) == ["143: preempted", "0"], said
    there = re.search(r"(\S+ \S?B) were there already", said)
    assert there and not there[1].startswith("0"), said
    assert said.count("wrote ") == 1, said
    assert contents(out) == contents(tmp_path / "alone")


def test_a_conversion_goes_on_with_the_node_that_is_left(cluster: Cluster, tmp_path: Path) -> None:
    """A process is killed, a batch job continues, its script's node dies, and Slurm requeues it on the other node."""
    convert = ["zero3", "zero3", ZERO3, "--world-size", "4", "-o"]
    assert process("convert", *convert, tmp_path / "alone").code == 0
    out, log = tmp_path / "together", tmp_path / "log"
    dying = [sys.executable, "-m", "tests.support.dying"]
    words = ["KILL", "1", tmp_path / "died", "convert", *convert, out, "--resume"]
    done = cluster.run("srun", "--nodes=2", "--ntasks=2", "--kill-on-bad-exit=0", *dying, *words, timeout=240)
    assert done.returncode and (tmp_path / "died").exists()
    assert "another process of this conversion has ended" in done.stderr and "rank 1 of 2" in done.stderr, done.stderr
    assert not out.exists()

    number = submit_conversion(cluster, tmp_path, *convert, out)
    with cluster.dead("n1"):
        cluster.ask("scontrol", "update", "nodename=n1", "state=down", "reason=dead")  # sooner than Slurm
        cluster.start_again(number, "1")
        cluster.wait_for_state(number, "COMPLETED", "FAILED", timeout=240)
    said = log.read_text()
    assert re.findall(r" start (.+)", said) == ["0 on n[1-2]", "1 on n2"], said
    assert "2 processes of srun" in said
    assert re.search(r"^move: .*\d+ s( left)?$", said, re.MULTILINE), said
    assert said.count("wrote ") == 1 and said.endswith(" ended with 0\n") and f"\n{out}\n" in said, said
    there = re.search(r"(\S+ \S?B) were there already", said)
    assert there and not there[1].startswith("0"), said
    assert contents(out) == contents(tmp_path / "alone")

    one = cluster.run("salloc", "--nodes=2", "--ntasks=2", sys.executable, "-m", "ckpt", "convert", *convert, out)
    assert one.returncode == 2 and "the destination exists" in one.stderr and "processes" not in one.stderr, one.stderr


def test_trl_goes_on_with_the_nodes_that_are_there(cluster: Cluster, tmp_path: Path) -> None:
    """`accelerate launch` trains a MoE under ZeRO-3: preempted, resumed on one node, stopped before the limit."""
    users.build(tmp_path)
    examples, run, logs = REPOSITORY / "examples/trl", tmp_path / "outputs", tmp_path / "log"

    asked = [f"--chdir={tmp_path}", "--gpus-per-node=0", f"--output={logs}"]
    words = ["--config", examples / "qwen3-30b-a3b.yaml", "--save_total_limit", "3", "--max_steps", "100000"]
    number = cluster.submit(
        *(*asked, examples / "sft.sbatch", run, examples / "zero3.yaml", *words),
        RANKS_PER_NODE="1",
        PREFLIGHT="--timeout 120",
        SCRIPT=f"{REPOSITORY}/fixtures/users.py {examples}/sft.py",
        LAUNCH="--deepspeed_moe_layer_cls_names Qwen3MoeSparseMoeBlock",
        OMP_NUM_THREADS="1",
        WITHOUT_TRUTH="1",
    )

    def newest() -> int:
        return max((int(p.parent.name.rpartition("-")[2]) for p in run.glob("*-*/trainer_state.json")), default=0)

    def said() -> str:
        files = [logs, *sorted((tmp_path / f"trl-sft-{number}").glob("*.log"))]
        return "\n".join(file.read_text() for file in files if file.is_file())

    def go_on(step: int) -> None:
        over = ("FAILED", "COMPLETED", "CANCELLED", "NODE_FAIL")
        cluster.wait(lambda: newest() >= step or cluster.job(number)["JobState"] in over, f"step {step}", 240)
        assert newest() >= step, said()

    try:
        go_on(2)
        (run / "checkpoint-999999").mkdir()  # as if the save had been cut off
        cluster.submit("--partition=urgent", "--nodes=1", "--output=/dev/null", "--wrap", "sleep 1000")
        cluster.start_again(number, "1")
        go_on(newest() + 2)
        cluster.ask("scancel", "--batch", "--signal=USR1", number)  # like Slurm before the limit, to the script
        cluster.start_again(number, "2")
        cluster.wait(lambda: said().count("node 0 of 1,") == 2, "started twice on one node", 240)
        cluster.ask("scancel", number)
        cluster.wait_for_state(number, "CANCELLED")
    finally:
        cluster.run("scancel", "--user=root")
    starts, ends = (re.findall(rf"\d\d {word} (.+)", logs.read_text()) for word in ("start", "ended with"))
    assert [re.sub(r"on n\d:", "on one:", start) for start in starts] == [
        "0 on n[1-2]: 2 ranks",
        "1 on one: 1 ranks",
        "2 on one: 1 ranks",
    ], said()
    assert [re.sub(r"^\d+: pre", "pre", end) for end in ends] == ["preempted", "75: time limit", "143"], said()
    assert "ZeRO-3 for 1 rank, from 2" in said()
    assert "checkpoint-999999: its save was cut off" in said() and not (run / "checkpoint-999999").exists()
    assert list(run.glob("cut-off-*-999999"))
    last = newest()
    state = json.loads((run / f"checkpoint-{last}/trainer_state.json").read_text())
    assert [row["step"] for row in state["log_history"] if "loss" in row] == list(range(1, last + 1))
    found = toolkit.open(run / f"checkpoint-{last}", "zero3")
    assert (found.world_size, found.state.step) == (1, last)
    assert set(map(int, found.state.scalars["step"].values())) == {last}, "the optimizer went on, too"
