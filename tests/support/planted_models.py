"""Llamas with something planted that paged KV does not serve. Each computes what it should natively.

The classes are found by the module's code only through the model itself, as those of a user would be.
"""

import torch
from transformers import LlamaConfig
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.llama import modeling_llama as llama


class Planted(LlamaConfig):
    model_type = "planted"
    sliding_window: int | None = None


def config(**values):
    return Planted(
        **{
            "vocab_size": 200,
            "hidden_size": 96,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "sliding_window": 40,
        }
        | values
    )


class Plain(llama.LlamaForCausalLM):
    """Nothing is planted."""

    config_class = Planted


class StateLayer(llama.LlamaDecoderLayer):
    """Beside attention, the mean of all hidden states so far: a state."""

    def forward(self, hidden_states, **rest):
        count = torch.arange(1, hidden_states.shape[1] + 1, device=hidden_states.device)[:, None]
        mean = hidden_states.cumsum(dim=1) / count
        return super().forward(hidden_states, **rest) + 0.5 * mean


class WithState(Plain):
    def __init__(self, config):
        super().__init__(config)
        for number in range(config.num_hidden_layers):
            self.model.layers[number] = StateLayer(config, number)


class MaskedModel(llama.LlamaModel):
    """A sliding window that only the mask knows."""

    def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None, **rest):
        embedded = self.embed_tokens(input_ids)
        mask = create_sliding_window_causal_mask(
            self.config, embedded, None, rest.get("past_key_values"), rest.get("position_ids")
        )
        return super().forward(inputs_embeds=embedded, attention_mask=mask, **rest)


class MaskOnlyWindow(Plain):
    def __init__(self, config):
        super().__init__(config)
        self.model = MaskedModel(config)


class CountingModel(llama.LlamaModel):
    """Counts positions itself, from the first token of the batch on."""

    def forward(self, *args, position_ids=None, **rest):
        return super().forward(*args, **rest)


class OwnPositions(Plain):
    def __init__(self, config):
        super().__init__(config)
        self.model = CountingModel(config)


class MemoryAttention(llama.LlamaAttention):
    """Attends to four learned keys and values in front of its own: attention to something else."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.memory = torch.nn.Parameter(torch.randn(1, 4, config.hidden_size))

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **rest):
        memory = self.memory.expand(len(hidden_states), -1, -1)
        cos, sin = position_embeddings
        widened = [torch.cat([one[:, :1].expand(-1, 4, -1), one], dim=1) for one in (cos, sin)]
        if attention_mask is not None:  # every token sees the memory
            attention_mask = torch.nn.functional.pad(attention_mask, (4, 0, 4, 0))
        every = torch.cat([memory, hidden_states], dim=1)
        out, weights = super().forward(every, tuple(widened), attention_mask, **rest)
        return out[:, 4:], weights


class CrossAttention(Plain):
    def __init__(self, config):
        super().__init__(config)
        for number, layer in enumerate(self.model.layers):
            layer.self_attn = MemoryAttention(config, number)


class TiedCache(Plain):
    """The last layer keeps its K and V under the number of the layer before."""

    def __init__(self, config):
        super().__init__(config)
        self.model.layers[-1].self_attn.layer_idx -= 1


class MixingLayer(llama.LlamaDecoderLayer):
    """Takes the mean over all tokens of the batch away: tokens of one request change another's."""

    def forward(self, hidden_states, **rest):
        out = super().forward(hidden_states, **rest)
        return out - 0.1 * out[:, :1]


class Mixing(Plain):
    def __init__(self, config):
        super().__init__(config)
        self.model.layers[0] = MixingLayer(config, 0)


class LooseLogits(Plain):
    """Gives the logits of all tokens, whatever it is asked to keep."""

    def forward(self, *args, logits_to_keep=0, **rest):
        return super().forward(*args, **rest)
