"""How much KV fits beside the weights: the arithmetic with which vLLM sizes its pool.

    KV = memory x gpu_memory_utilization - weights - peak activation of a profile run - what else it took - CUDA graphs

Source: `determine_available_memory` in vllm/v1/worker/gpu_worker.py. The peak of the profile run is a formula here. The
test of this file holds it against published logs of vLLM.
"""

from dataclasses import dataclass

from harness.config.schema import DeviceConfig, SchedulerConfig
from harness.cost.model_shape import ModelShape

# The sampler of the profile run holds for each logit: bfloat16 (2), float32 (4), sorted (4), index of the sorted (8),
# probability (4), sum of the sorted (4). FlashInfer's and Triton's samplers, which newer versions choose, take less.
_SAMPLER_BYTES = 26


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of each device in bytes: `usable` = `weights` + `activations` + `other` + `graphs` + KV.

    `usable` is the share of the device's memory that the engine may take. `activations` is the peak of the profile run,
    `other` what libraries allocate outside of PyTorch and the rotations of the positions.
    """

    usable: float
    weights: float
    activations: float
    other: float
    graphs: float

    @property
    def kv(self) -> float:
        """What is left for KV; negative where the weights do not fit."""
        return self.usable - self.weights - self.activations - self.other - self.graphs


def device_memory(
    device: DeviceConfig, scheduler: SchedulerConfig, model: ModelShape, weight_bytes: float
) -> DeviceMemory:
    """The memory of each of the devices that share the model; `weight_bytes` are those of all models together."""
    formula = activation_bytes(model, scheduler, device.tensor_parallel)
    return DeviceMemory(
        usable=device.memory_gb * 1e9 * device.memory_utilization,
        weights=weight_bytes / device.tensor_parallel,
        activations=formula if device.activation_gb is None else device.activation_gb * 1e9,
        other=device.other_memory_gb * 1e9,
        graphs=device.graph_memory_gb * 1e9,
    )


def activation_bytes(model: ModelShape, scheduler: SchedulerConfig, parallel: int = 1) -> float:
    """The peak of a profile run on each device: of a forward pass with a full budget of tokens, or of the sampler.

    The pass holds per token four vectors of the hidden width (input, residual, queries, output), and the MLP's
    input after and before the gate. A token of a mixture of experts holds them for each of its experts. The sampler
    holds `max_running` rows of logits over the whole vocabulary, beside one hidden vector for each token.
    """
    tokens, width = scheduler.max_batched_tokens, model.bytes_per_element
    hidden = float(model.hidden * width)
    mlp = model.mlp_matrices * model.intermediate * width / parallel
    if model.experts:
        routed = model.experts.intermediate / parallel
        each = max((model.mlp_matrices - 1) * routed, model.hidden) + routed
        shared = model.mlp_matrices * model.experts.shared * width / parallel
        mlp = max(mlp if model.experts.dense_layers else 0.0, model.experts.active * each * width + shared)
    forward = tokens * (4 * hidden + mlp)
    rows = min(scheduler.max_running, tokens)
    return max(forward, tokens * hidden + rows * model.vocab * _SAMPLER_BYTES)
