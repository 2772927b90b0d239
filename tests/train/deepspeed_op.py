"""DeepSpeed's shared-memory operation, loaded once for a process that ranks are forked from."""

from deepspeed.comm.torch import build_shm_op

build_shm_op()
