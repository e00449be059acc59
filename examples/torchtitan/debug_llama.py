"""The debug Llama of torchtitan under compiled schedules on CPU processes, beside the model in one piece.

torchrun --nproc-per-node=4 debug_llama.py chimera.out [dapple.out ..], schedules for as many workers and N = 8

It calls what the trainer of torchtitan calls, in its order; the trainer itself demands a GPU. Every rank prints how far
losses and gradients are off, in float32.
"""

import sys
from importlib.util import find_spec
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist

if find_spec("triton") is None:  # it would need triton for experts, of which a Llama has none
    sys.modules["torchtitan.distributed.minimal_async_ep"] = MagicMock()
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

from chimera_runtime import stages_of
from compiled_schedule import with_compiled_schedule

B, MICRO_BATCHES, SEQ_LEN, VOCABULARY = 1, 8, 16, 2048


def debug_llama() -> Any:
    """Its ModelSpec, with attention that runs on a CPU, where torch has no backward of flex attention."""
    spec = model_registry("debugmodel")
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return spec


def initialized(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """A model, or a part of one, with weights and buffers, as the trainer makes them after ``pipelining_fn``."""
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model.train()


def load(part: torch.nn.Module, whole: torch.nn.Module) -> None:
    """Copies the weights of the whole model into a part of it."""
    weights = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            parameter.to_local().copy_(weights[name])


def deviation(directory: str, dims: ParallelDims, parallelism: ParallelismConfig) -> float:
    """How far losses and gradients of a step are off on this rank."""
    rank = dist.get_rank()
    training = TrainingConfig(local_batch_size=MICRO_BATCHES * B, seq_len=SEQ_LEN, mixed_precision_param="float32")
    spec, compilation = with_compiled_schedule(debug_llama(), directory), CompileConfig()
    loss_fn = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY).build(compile_config=compilation)
    with torch.device("meta"):
        model, whole = spec.model.build(), spec.model.build()

    # What the trainer does with the model.
    schedule, parts, has_first, has_last = spec.pipelining_fn(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=compilation,
        ac_config=None,
        dump_folder="",
        device=torch.device("cpu"),
        model_config=spec.model,
        parallelize_fn=spec.parallelize_fn,
        loss_fn=loss_fn,
    )
    initialized(whole, seed=0)
    held_before = {stage for other in range(rank) for stage in stages_of(directory, other)}
    for stage, part in zip(stages_of(directory, rank), parts, strict=True):
        initialized(part, seed=rank)
        if stage not in held_before:  # replicas of a stage take the weights of the first rank that holds it
            load(part, whole)

    # A step of the trainer.
    text = torch.randint(VOCABULARY, (MICRO_BATCHES, B, SEQ_LEN + 1), generator=torch.Generator().manual_seed(7))
    tokens, labels = text[:, :, :-1], text[:, :, 1:]
    valid, positions = torch.tensor(labels.numel()), torch.arange(SEQ_LEN).expand(B, -1)
    losses: list[torch.Tensor] = []
    schedule.step(
        arg_mbs=[(part,) for part in tokens] if has_first else None,
        kwarg_mbs=[{"positions": positions} for _ in tokens],
        target_mbs=[*labels] if has_last else None,
        losses=losses if has_last else None,
        loss_kwargs={"global_valid_tokens": valid},
        return_outputs=False,
    )
    schedule.close()

    # The model in one piece.
    pairs = zip(tokens, labels, strict=True)
    expected = [loss_fn(whole(part, positions=positions), target, valid)[0] for part, target in pairs]
    torch.stack(expected).sum().backward()
    off = [torch.stack(losses) - torch.stack(expected).detach()] if has_last else []
    of_whole = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for part in parts:
        off += [parameter.grad.to_local() - of_whole[name] for name, parameter in part.named_parameters()]
    return max(float(difference.abs().max()) for difference in off)


def main() -> None:
    """Prints a line for each directory and rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_dims.device_type = "cpu"  # torchtitan takes cuda where there is no accelerator
    size = dist.get_world_size()
    parallelism = ParallelismConfig(
        pipeline_parallel_degree=size, pipeline_parallel_microbatch_size=B, spmd_backend="partial_dtensor"
    )
    set_spmd_backend(parallelism.spmd_backend)
    dims = ParallelDims.from_config(parallelism, size)
    dims.build_mesh()
    for directory in sys.argv[1:]:
        print(f"rank {dist.get_rank()}: {directory}: off by {deviation(directory, dims, parallelism):.1e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
