"""Memory of each GPU in training, by strategy: pure arithmetic on shapes, in bytes.

Model states follow the ZeRO paper (Rajbhandari et al. 2020, section 3.1) and the engines' allocations, padding
included. They count the rank with the most memory:

* ddp: torch.nn.parallel.DistributedDataParallel. Its buckets are a second copy of the gradients (torch docs,
  `gradient_as_bucket_view`). Autocast keeps 16-bit copies of matrices until the backward pass ends.
* zero1, zero2: DeepSpeed 0.19 runtime/zero/stage_1_and_2.py. 16-bit parameters are whole, flat, and padded to twice the
  number of ranks. A rank has float32 masters and states for its partition, and float32 gradients for it during the
  step. zero1 keeps all gradients until they are reduced. zero2 keeps whole gradients of every parameter that overlaps
  the partition.
* zero3: runtime/zero/stage3.py and partition_parameters.py. Every parameter is padded alone and partitioned over all
  ranks. Parameters in use (`stage3_max_live_parameters`) and the smallest ones (`stage3_param_persistence_threshold`)
  are whole.
* Offload: `offload_optimizer` and `offload_param`, to device cpu or (stage 3) nvme. ZeRO-Infinity has buffers in host
  memory, runtime/swap_tensor/partitioned_{optimizer,param}_swapper.py. FSDP's CPUOffload and CPUOffloadPolicy move
  parameters, gradients and states together.
* fsdp1, fsdp2: torch.distributed.fsdp, one unit per layer and one for the rest, gathered from forward to backward.
  FSDP2 shards dim 0 of each parameter into equal chunks. FSDP1 shards a unit's flat parameter, which aligns parameters
  to 16 bytes.
* megatron: megatron-core 0.16, tensor and pipeline parallel, float32 gradients, distributed optimizer
  (distributed/param_and_grad_buffer.py: parameters start at multiples of 64, buffers end at a multiple of 128 and of
  the data parallel size).

Not counted: the CUDA context, NCCL's own buffers, and the allocator's fragmentation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, lcm, prod

from ckpt.base.errors import UsageError
from ckpt.base.text import pluralize
from ckpt.base.words import Message
from ckpt.commands.estimate import activations
from ckpt.commands.estimate.activations import Activations
from ckpt.commands.estimate.setup import CPU, DDP, FSDP1, ITEMSIZES, NVME, ZERO1, ZERO2, ZERO3, Setup, placed
from ckpt.state.parameters import EXPERT, LINEAR, Block, Model, Parameter, Stage, num_elements

_FP32 = 4
#: In bytes, under use_orig_params (_flat_param.py `_get_aligned_numel`).
_FLAT_ALIGNMENT = 16
#: bitsandbytes 4-bit: elements per scale, and 8-bit scales per float32 scale.
_NF4_BLOCK, _NF4_NESTED = 64, 256
#: Its float32 tables: 16 values, 256 values for the scales, and their offset.
_NF4_TABLES = (16 + 256 + 1) * _FP32


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the fullest GPU.

    `gathered` counts temporary whole copies of sharded or cast tensors. `late` buffers peak at the end of the backward
    pass, when few activations are left. `step` is for the optimizer's step, without activations. `activations` is None
    for unknown layers. `host` counts one rank's host memory without activations, `nvme` its data on disks.
    """

    parameters: int
    gradients: int
    optimizer: int
    masters: int
    gathered: int = 0
    buffers: int = 0
    step: int = 0
    host: int = 0
    nvme: int = 0
    late: bool = False
    activations: Activations | None = None

    @property
    def states(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.masters

    def total(self, *, checkpointing: bool) -> int:
        """Return the peak, in the backward pass or the optimizer's step."""
        backward = 0
        if self.activations is not None:
            backward = self.activations.checkpointed if checkpointing else self.activations.kept
        backward = max(backward, self.buffers) if self.late else backward + self.buffers
        return self.states + max(self.gathered + backward, self.step)

    def at_peak(self, *, checkpointing: bool) -> dict[str, int]:
        total, made = self.total(checkpointing=checkpointing), self.activations
        acts = 0 if made is None else made.checkpointed if checkpointing else made.kept
        parts = {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer": self.optimizer + self.masters,
        }
        rest = total - self.states
        if self.step > 0 and rest == self.step:  # without activations
            parts["the step"] = rest
        else:
            parts |= {"activations": acts, "gathered, buffers": rest - acts}
        return {name: nbytes for name, nbytes in parts.items() if nbytes}


def estimate(model: Model, strategy: str, setup: Setup) -> Memory:
    """Estimate a data-parallel strategy on all GPUs. Raise UsageError for an unsupported setup."""
    frozen, trained = _frozen_and_trained(model, setup)
    if not setup.lora_rank and setup.quantized:
        raise UsageError("4-bit weights cannot be trained", expected=Message("{lora_r} with {qlora=True}"))
    engine, optimizer, params = placed(strategy, setup)
    makers: dict[str, Callable[..., Memory]] = {DDP: _ddp, ZERO1: _zero12, ZERO2: _zero12, ZERO3: _zero3}
    made = makers.get(engine, _fsdp)(
        frozen, trained, engine, replace(setup, offload_optimizer=optimizer, offload_params=params)
    )
    if not model.blocks:
        return made
    return replace(made, activations=activations.transformers(model.blocks, model.vocabulary, setup))


def megatron(
    stages: Sequence[Stage], blocks: Sequence[Block], vocabulary: int, setup: Setup, tp: int, ep: int = 1
) -> Memory:
    """Estimate the pipeline stage with the most memory. `vocabulary` is the whole model's, `tp` divides each stage."""
    if setup.lora_rank:
        raise UsageError(
            "estimate doesn't support LoRA with Megatron", found=Message("{lora_r} with the strategy megatron")
        )
    pp = len(stages)
    if setup.gpus % (tp * pp * setup.context_parallel) or setup.gpus % (ep * pp):
        raise UsageError(
            "the parallel sizes don't divide the GPUs",
            found=f"{pluralize(setup.gpus, 'GPU')}, tp {tp}, pp {pp}, cp {setup.context_parallel}, ep {ep}",
        )
    found = []
    for number, stage in enumerate(stages):
        # Data and context parallel ranks divide the optimizer's states.
        memory = _stage_memory(stage, setup, setup.gpus // (tp * pp), setup.gpus // (pp * (tp if ep == 1 else ep)))
        if blocks:
            mine = [blocks[layer] for layer in stage.layers]
            of_layers = activations.megatron(mine, pp - number, blocks[0].hidden, vocabulary, setup, tp, stage.is_last)
            memory = replace(memory, activations=of_layers)
        found.append(memory)
    return max(found, key=lambda memory: memory.total(checkpointing=False))


def _frozen_and_trained(model: Model, setup: Setup) -> tuple[tuple[Parameter, ...], tuple[Parameter, ...]]:
    if not setup.lora_rank:
        return (), model.parameters
    made = [adapter for parameter in model.parameters for adapter in _adapters(parameter, setup)]
    if not made:
        raise UsageError("the model has no module with this name", found=", ".join(setup.lora_targets or ()))
    return model.parameters, tuple(made)


def _adapters(parameter: Parameter, setup: Setup) -> Iterable[Parameter]:
    """Yield adapter factors. A layer's experts share one pair."""
    times = parameter.adapter
    if setup.lora_targets is not None:
        module = parameter.name.removesuffix(".weight")
        times = int(parameter.kind == LINEAR and module.rpartition(".")[2] in setup.lora_targets)
    if times:
        rank, (rows, columns) = times * setup.lora_rank, parameter.shape[-2:]
        yield replace(parameter, name=f"{parameter.name}.lora_A", shape=(rank, columns))
        yield replace(parameter, name=f"{parameter.name}.lora_B", shape=(rows, rank))


def _frozen_bytes(parameter: Parameter, setup: Setup, itemsize: int) -> int:
    """Return bytes. 4-bit parameters add an 8-bit scale per 64 weights, a float32 per 256 scales.

    QLoRA (Dettmers et al. 2023), section 3. transformers quantizes linear layers, but not the output layer and not
    stacked experts (integrations/bitsandbytes.py).
    """
    if not (setup.quantized and parameter.kind == LINEAR):
        return parameter.numel * itemsize
    blocks = ceil(parameter.numel / _NF4_BLOCK)
    return ceil(parameter.numel / 2) + blocks + ceil(blocks / _NF4_NESTED) * _FP32 + _NF4_TABLES


def _ddp(frozen: tuple[Parameter, ...], trained: tuple[Parameter, ...], _engine: str, setup: Setup) -> Memory:
    # Adapters are float32 (PEFT's `autocast_adapter_dtype`), the frozen model keeps its loaded dtype.
    held = _FP32 if setup.mixed or frozen else setup.itemsize
    count = num_elements(trained)
    casts = setup.itemsize * sum(p.numel for p in trained if len(p.shape) > 1) if setup.itemsize < held else 0
    return Memory(
        parameters=held * count + sum(_frozen_bytes(p, setup, setup.itemsize) for p in frozen),
        gradients=held * count,
        optimizer=sum(p.count * setup.state_bytes(p.numel // p.count, held) for p in trained),
        masters=0,
        gathered=casts,
        buffers=held * count if setup.gpus > 1 else 0,
    )


def _zero12(frozen: tuple[Parameter, ...], trained: tuple[Parameter, ...], stage: str, setup: Setup) -> Memory:
    item, count = setup.itemsize, num_elements(trained)
    padded = multiple(count, 2 * setup.gpus)
    part = padded // setup.gpus
    master, states = _deepspeed_optimizer(part, setup)
    made = Memory(
        parameters=item * padded + sum(_frozen_bytes(p, setup, item) for p in frozen),
        gradients=item * (count if stage == ZERO1 else _touching(trained, part)),
        optimizer=states,
        masters=master * part,
        buffers=item * setup.zero.reduce_bucket_size * (2 if setup.zero.overlap_comm else 1),
        step=master * part,
    )
    if not setup.offload_optimizer:
        return made
    # Host memory also holds gradients in the masters' dtype, and updated parameters on their way back. Both sides hold
    # the largest gradient in transfer.
    largest = item * max(p.numel // p.count for p in trained)
    host = made.optimizer + made.masters + master * part + item * part + largest
    left = made.gradients if stage == ZERO1 else 0  # reduced at the end
    return replace(made, gradients=left, optimizer=0, masters=0, step=0, buffers=made.buffers + largest, host=host)


def _deepspeed_optimizer(part: int, setup: Setup) -> tuple[int, int]:
    """Return bytes per master element, and total state bytes. engine.py needs 16-bit masters for 16-bit states."""
    if setup.state_dtype != "fp32" and setup.master_dtype == "fp32":
        raise UsageError(
            "DeepSpeed keeps 16-bit states only with 16-bit masters",
            expected="bf16_master_weights_and_grads with bf16_optimizer_states",
            found=f"states in {setup.state_dtype}, masters in fp32",
            hint=Message("{master_dtype=bf16}"),
        )
    return ITEMSIZES[setup.master_dtype], setup.state_bytes(part, ITEMSIZES[setup.state_dtype])


def _touching(parameters: Sequence[Parameter], part: int) -> int:
    """Return the elements of all parameters that overlap the worst partition."""
    found = {0: 0}
    start = 0
    for parameter in (p for p in parameters if p.numel):
        for rank in range(start // part, (start + parameter.numel - 1) // part + 1):
            found[rank] = found.get(rank, 0) + parameter.numel
        start += parameter.numel
    return max(found.values())


def _zero3(frozen: tuple[Parameter, ...], trained: tuple[Parameter, ...], _engine: str, setup: Setup) -> Memory:
    item, ranks, zero = setup.itemsize, setup.gpus, setup.zero
    part = sum(p.count * ceil(p.numel // p.count / ranks) for p in trained)
    every = (*frozen, *trained)
    whole = num_elements(every)
    largest = max(p.numel // p.count for p in every)
    kept = item * sum(p.numel for p in every if p.numel // p.count <= zero.param_persistence_threshold)
    live = item * min(whole, max(zero.max_live_parameters, largest))
    master, states = _deepspeed_optimizer(part, setup)
    made = Memory(
        parameters=item * part + sum(_frozen_part(p, setup) for p in frozen),
        gradients=item * part,
        optimizer=states,
        masters=master * part,
        gathered=min(live + kept, item * whole) + item * max(p.numel // p.count for p in trained),
        buffers=item * zero.reduce_bucket_size,
        step=master * min(part, zero.sub_group_size),
    )
    if setup.offload_params == CPU:
        made = replace(made, parameters=0, host=made.parameters)
    elif setup.offload_params == NVME:
        in_host = min(made.parameters, item * zero.max_in_cpu)
        host = in_host + item * zero.param_buffers * zero.param_buffer_size
        made = replace(made, parameters=0, host=host, nvme=made.parameters - in_host)
    if not setup.offload_optimizer:
        return made
    host, nvme = made.host + made.gradients, made.optimizer + made.masters + master * part
    if setup.offload_optimizer == CPU:
        host, nvme = host + nvme, 0
    else:
        host += master * zero.optimizer_buffers * min(part, zero.sub_group_size)
    return replace(made, gradients=0, optimizer=0, masters=0, step=0, host=host, nvme=made.nvme + nvme)


def _frozen_part(parameter: Parameter, setup: Setup) -> int:
    if setup.quantized and parameter.kind == LINEAR:
        return ceil(_frozen_bytes(parameter, setup, setup.itemsize) / setup.gpus)
    return setup.itemsize * parameter.count * ceil(parameter.numel // parameter.count / setup.gpus)


def _fsdp(frozen: tuple[Parameter, ...], trained: tuple[Parameter, ...], engine: str, setup: Setup) -> Memory:
    held = setup.itemsize if frozen or not setup.mixed else _FP32  # one dtype per unit: adapters have the model's
    item = setup.itemsize
    part = _flat_parts(trained, setup) if engine == FSDP1 else _chunks(trained, setup.gpus)
    still = _flat_parts(frozen, setup) if engine == FSDP1 else _chunks(frozen, setup.gpus)
    units: dict[int | None, int] = {}
    gradients: dict[int | None, int] = {}
    for parameter in (*frozen, *trained):
        units[parameter.layer] = units.get(parameter.layer, 0) + parameter.numel
    for parameter in trained:
        gradients[parameter.layer] = gradients.get(parameter.layer, 0) + parameter.numel
    root = units.pop(None, 0)
    # The root stays gathered. Two layers are gathered at a time. Whole gradients exist in the compute dtype and in the
    # reduction's.
    layers = 2 * max(units.values(), default=0) if setup.reshard else sum(units.values())
    parameters = held * (part + still)
    if setup.quantized:
        parameters = held * part + ceil(sum(_frozen_bytes(p, setup, item) for p in frozen) / setup.gpus)
    made = Memory(
        parameters=parameters,
        gradients=held * part,
        optimizer=setup.state_bytes(part, held),
        masters=0,
        gathered=item * (root + layers),
        buffers=(item + held) * max(gradients.values()),
        late=True,
    )
    if not setup.offload_params:
        return made
    return replace(made, parameters=0, gradients=0, optimizer=0, host=made.states)


def _chunks(parameters: Iterable[Parameter], ranks: int) -> int:
    """Return the elements in the first rank's dim 0 chunks, the largest ones. Scalars are whole."""
    return sum(p.count * ceil((*p.shape, 1)[0] / ranks) * prod(p.shape[1:]) for p in parameters)


def _flat_parts(parameters: Iterable[Parameter], setup: Setup) -> int:
    aligned = _FLAT_ALIGNMENT // setup.itemsize
    units: dict[int | None, int] = {}
    for parameter in parameters:
        units[parameter.layer] = multiple(units.get(parameter.layer, 0), aligned) + parameter.numel
    return sum(ceil(numel / setup.gpus) for numel in units.values())


def _stage_memory(stage: Stage, setup: Setup, dp: int, expert_dp: int) -> Memory:
    item = setup.itemsize
    experts = [p for p in stage.parameters if p.kind == EXPERT]
    others = [p for p in stage.parameters if p.kind != EXPERT]
    whole = part = 0
    for parameters, ranks in ((others, dp), (experts, expert_dp)):
        if setup.distributed_optimizer:
            starts = sum(p.count * multiple(p.numel // p.count, 64) for p in parameters)
            numel = multiple(starts, lcm(ranks, 128))
            whole, part = whole + numel, part + numel // ranks
        else:
            whole, part = whole + num_elements(parameters), part + num_elements(parameters)
    return Memory(
        parameters=item * whole,
        gradients=_FP32 * whole,
        optimizer=setup.state_bytes(part, ITEMSIZES[setup.state_dtype]),
        masters=0 if setup.dtype == "fp32" else ITEMSIZES[setup.master_dtype] * part,
    )


def multiple(number: int, of: int) -> int:
    return -(-number // of) * of
