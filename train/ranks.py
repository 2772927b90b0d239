"""Ranks on this machine, started as torchrun starts them; but what goes wrong is told by the ranks alone."""

import math
import os
import signal
import socket
import subprocess
import sys
import time

from train.config import UserError, print_error

#: Seconds that the others are given when a rank has failed: those that wait for it on GPUs would wait for minutes.
_PATIENCE = 30.0
#: What is handed on to the ranks, and as what: they save at SIGTERM, and an interrupt is that here.
_SIGNALS = {signal.SIGINT: signal.SIGTERM, signal.SIGTERM: signal.SIGTERM, signal.SIGUSR1: signal.SIGUSR1}


def are_to_be_started(ranks: int) -> bool:
    """Whether this process is none of the ranks that --ranks asks for. UserError where a launcher started others."""
    if "RANK" not in os.environ:
        os.environ["WORLD_SIZE"] = str(ranks or 1)
        return ranks > 1
    if ranks and int(os.environ.get("WORLD_SIZE", "1")) != ranks:
        raise UserError(f"--ranks {ranks}: a launcher has started {os.environ.get('WORLD_SIZE', '1')} already")
    return False


def start(ranks: int) -> int:
    """Runs this very command on so many ranks, and returns its exit code: 2 for a mistake of the user's."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared.setdefault("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    command = [sys.executable, "-m", "train", *sys.argv[1:]]
    processes: list[subprocess.Popen[bytes]] = []
    for number, as_what in _SIGNALS.items():
        signal.signal(number, lambda *_, as_what=as_what: [process.send_signal(as_what) for process in processes])
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        # In a session of its own, so that an interrupt at the terminal reaches this process alone.
        processes.append(subprocess.Popen(command, env=os.environ | shared | own, start_new_session=True))
    from torch.distributed import TCPStore  # now, as the ranks take as long to import torch

    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach(), use_libuv=True
    )
    try:
        return _wait(processes)
    finally:
        for process in processes:
            process.kill()
        del store


def _wait(processes: list[subprocess.Popen[bytes]]) -> int:
    """The exit code of all: that of a mistake, of a signal, or of any error.

    Those that have not ended some time after another one has failed are left to be killed.
    """
    end = math.inf
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        if end == math.inf and any(process.returncode for process in processes):
            end = time.monotonic() + _PATIENCE
        time.sleep(0.05)
    codes = [process.poll() or 0 for process in processes]
    if (lowest := min(codes)) < 0:
        print_error(f"rank {codes.index(lowest)} was ended by {signal.Signals(-lowest).name}")
    return 2 if 2 in codes else 128 - lowest if lowest < 0 else max(codes)
