"""The operation that DeepSpeed sums up with in shared memory, loaded: for a process that ranks are forked from.

Each of them would have ninja look whether it must be compiled, which takes longer than most jobs do.
"""

from deepspeed.comm.torch import build_shm_op

build_shm_op()
