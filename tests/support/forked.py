"""Ranks forked from one process with warm imports: `python -m tests.support.forked PRELOAD STARTS`.

PRELOAD: modules with commas; STARTS: JSON, a list of [ranks, module, arguments]. Each rank calls the module's `main()`
in torchrun's environment. Without arguments it serves launches, one JSON on each line. Nothing is imported here,
because processes spawned by megatron-core would import it again.
"""

import gc
import importlib
import json
import os
import sys
import traceback

#: Seconds for the other ranks to end by themselves after one has failed.
_PATIENCE = 10.0


def main() -> None:
    if len(sys.argv) > 1:
        launch(sys.argv[1].split(","), json.loads(sys.argv[2]))
    else:
        serve()


def serve() -> None:
    """Answer each line with the pid of its process, then with the exit code when the process ends."""
    for line in sys.stdin:
        asked = json.loads(line)
        for name in asked["shared"]:
            importlib.import_module(name)
        leave_imports()
        pid = os.fork()
        if not pid:
            _answer(asked)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _answer(asked: dict) -> None:
    """Run one launch in its own session, with both streams in files. Never return."""
    os.setsid()
    for number, name in enumerate((os.devnull, *asked["streams"])):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT, 0o600), number)
    code = 1
    try:
        launch(asked["preload"], asked["starts"])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def launch(preload: list[str], starts: list) -> None:
    """Import the modules and run the starts one after the other."""
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp

    torch.set_printoptions(threshold=0, edgeitems=1)  # DeepSpeed's stage 3 formats each parameter, and prints none
    for name in filter(None, [*preload, *dict.fromkeys(module for _, module, _ in starts)]):
        importlib.import_module(name)
    leave_imports()
    for ranks, module, arguments in starts:
        # The store belongs to no rank, like under torchrun's agent.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.environ |= {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        # Use the store only after all forks: a lock held by its thread during a fork is never released in the child.
        waits, goes = os.pipe()
        begun = mp.start_processes(_rank, (module, arguments, waits, goes), ranks, join=False, start_method="fork")
        os.close(goes)
        os.close(waits)
        try:
            while not begun.join(grace_period=_PATIENCE):
                pass
        except mp.ProcessExitedException:  # names one rank, though several may have failed at once
            codes = [process.exitcode for process in begun.processes]
            print(*(f"rank {rank}: exit code {code}" for rank, code in enumerate(codes)), sep="\n", file=sys.stderr)
            raise


def leave_imports() -> None:
    """Exclude the imported objects from garbage collection: each collection in a child would copy their pages."""
    gc.collect()
    gc.freeze()


def _rank(rank: int, module: str, arguments: list[str], waits: int, goes: int) -> None:
    os.close(goes)
    os.read(waits, 1)  # end of file: every process has closed the other side
    os.close(waits)
    sys.argv[1:] = arguments
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    sys.exit(importlib.import_module(module).main())


if __name__ == "__main__":
    main()
