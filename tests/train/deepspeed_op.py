"""DeepSpeed's shared-memory operation, loaded once before ranks are forked."""

from deepspeed.comm.torch import build_shm_op

build_shm_op()
