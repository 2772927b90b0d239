"""Ranks forked from one process that has imported what they need: `python -m tests.support.forked PRELOAD STARTS`.

Importing torch, DeepSpeed and transformers in each rank takes longer than most jobs do.  PRELOAD is a list of modules
with commas between them; STARTS is JSON, a list of [number of ranks, module, its arguments], which are started one
after the other.  Each rank finds the environment that torchrun's agent would give it, and calls the module's `main()`.
What torchrun itself does is tested by the tests that start it.

Nothing is imported here: a process that megatron-core spawns when it saves would import it again.
"""

import importlib
import json
import os
import sys


def main() -> None:
    preload, starts = sys.argv[1].split(","), json.loads(sys.argv[2])
    import gc

    import torch.distributed as dist
    import torch.multiprocessing as mp

    for name in filter(None, [*preload, *dict.fromkeys(module for _, module, _ in starts)]):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is imported is not looked through again whenever an engine is closed
    for ranks, module, arguments in starts:
        # As under torchrun's agent, the store is not a rank's.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.environ |= {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        # Nobody asks the store before all are forked: a lock that its thread holds at a fork is never given back there.
        waits, goes = os.pipe()
        begun = mp.start_processes(_rank, (module, arguments, waits, goes), ranks, join=False, start_method="fork")
        os.close(goes)
        os.close(waits)
        while not begun.join():
            pass


def _rank(rank: int, module: str, arguments: list[str], waits: int, goes: int) -> None:
    os.close(goes)
    os.read(waits, 1)  # to the end, which comes when every process has closed the other side
    os.close(waits)
    sys.argv[1:] = arguments
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    sys.exit(importlib.import_module(module).main())


if __name__ == "__main__":
    main()
