"""Ranks started on this machine, like with torchrun. Only the ranks report errors."""

import math
import os
import signal
import socket
import subprocess
import sys
import time

from train.config import UserError, print_error

#: Seconds to wait after a failure. Ranks waiting on GPUs would block for minutes.
_PATIENCE = 30.0
#: Ranks save at SIGTERM, so an interrupt becomes SIGTERM.
_SIGNALS = {signal.SIGINT: signal.SIGTERM, signal.SIGTERM: signal.SIGTERM, signal.SIGUSR1: signal.SIGUSR1}


def are_to_be_started(ranks: int) -> bool:
    """Raise UserError if a launcher started another number."""
    if "RANK" not in os.environ:
        os.environ["WORLD_SIZE"] = str(ranks or 1)
        return ranks > 1
    if ranks and int(os.environ.get("WORLD_SIZE", "1")) != ranks:
        raise UserError(f"--ranks {ranks}: a launcher has started {os.environ.get('WORLD_SIZE', '1')} already")
    return False


def start(ranks: int) -> int:
    """Return the exit code: 2 for a user's mistake."""
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
        # A terminal interrupt only reaches this process.
        processes.append(subprocess.Popen(command, env=os.environ | shared | own, start_new_session=True))
    from torch.distributed import TCPStore  # imported while the ranks import torch, too

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
    """Return the joint exit code: a user's mistake first, then a signal, then any error.

    Return early _PATIENCE seconds after a rank failed; the caller kills the others.
    """
    end = math.inf
    while None in [process.poll() for process in processes] and time.monotonic() < end:
        if end == math.inf and any(process.returncode for process in processes):
            end = time.monotonic() + _PATIENCE
        time.sleep(0.05)
    codes = [process.poll() or 0 for process in processes]
    if (lowest := min(codes)) < 0:
        print_error(f"rank {codes.index(lowest)} was ended by {signal.Signals(-lowest).name}")
    return 2 if 2 in codes else 128 - lowest if lowest < 0 else max(codes)
