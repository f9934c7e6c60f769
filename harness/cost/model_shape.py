"""The shape of a decoder in numbers: what it holds in memory, what a step reads and computes.

Sizes are elements unless the name says bytes. Norms, biases and the router's bias are left out: together they are less
than a thousandth of the weights of the models that PageTwin has presets for.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from harness.metrics.log import FloatArray
from harness.replay.features import Sight

# Tokens of a step up to which touched experts are counted; from there on all count as touched.
MOST_TOKENS = 65_536


@dataclass(frozen=True)
class Experts:
    """The mixture of experts of a layer: a token goes to `active` of `count` experts and to all shared ones.

    `intermediate` is the width of one routed expert, `shared` that of all shared experts together. The first
    `dense_layers` layers have a dense MLP instead. With `skew` 0 every expert is equally likely; above, the i-th of
    them is chosen in proportion to i^-skew.
    """

    count: int
    active: int
    intermediate: int
    shared: int = 0
    dense_layers: int = 0
    skew: float = 0.0

    def chances(self) -> FloatArray:
        """The probability that a token goes to each expert, `[count]`; their sum is `active`.

        Where the law gives an expert more than 1, it gets 1 and the rest goes to the others by the same law.
        """
        weight = np.arange(1, self.count + 1, dtype=np.float64) ** -self.skew
        chances = np.zeros(self.count)
        certain = 0
        while certain < self.active:
            rest = weight[certain:]
            chances[certain:] = (self.active - certain) * rest / rest.sum()
            if chances[certain] <= 1.0:
                break
            chances[certain] = 1.0
            certain += 1
        return chances

    @lru_cache(maxsize=64)  # noqa: B019  # equal values of this class share the entry
    def touched(self, groups: int = 1) -> FloatArray:
        """The expected number of distinct experts that 0, 1, 2, ... tokens go to, until it no longer grows.

        Sum over experts of 1 - (1 - p)^tokens, for tokens that choose independently of one another. For equal chances
        that is count x (1 - (1 - active / count)^tokens). With `groups` devices, each of which holds as many
        neighbouring experts, it is the number on the device where it is largest.
        """
        missed = 1.0 - self.chances()
        uncertain = missed[(missed > 0.0) & (missed < 1.0)]
        slowest = float(uncertain.max()) if len(uncertain) else 0.0
        steps = int(min(MOST_TOKENS, np.ceil(np.log(1e-9) / np.log(slowest)))) if slowest else 1
        parts = np.array_split(np.arange(self.count), groups)
        table = np.empty(steps + 1)
        left = np.ones(self.count)
        for tokens in range(steps + 1):
            table[tokens] = max(len(part) - left[part].sum() for part in parts)
            left *= missed
        table.flags.writeable = False
        return table

    def busiest(self, groups: int) -> float:
        """The expected load of the device with the most, as a multiple of the mean."""
        parts = np.array_split(self.chances(), groups)
        return float(max(part.sum() for part in parts)) * groups / self.active


@dataclass(frozen=True)
class LatentKV:
    """Multi-head latent attention (DeepSeek-V2): each token keeps one latent vector and one rotary key for all heads.

    The heads' `head_dim` is the part of a key without position. `query_rank` 0 means that queries are not compressed.
    """

    rank: int
    rope_dim: int
    value_dim: int
    query_rank: int = 0


@dataclass(frozen=True)
class ModelShape:
    """The shape of a decoder. `mlp_matrices` is 3 with a gate (Llama, Qwen), 2 without.

    `windowed_layers` layers attend to the last `window` tokens alone, with `chunked` to those of the chunk of so many
    tokens that a token lies in. `state_layers` layers keep `state_bytes` of a recurrent state for each sequence and no
    K and V; their weights count as those of a layer with attention.
    `layer_bits` is the width of an element of the layers' matrices with their scales, `expert_bits` that of routed
    experts; None: `bytes_per_element`. Embeddings are never quantised.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    bytes_per_element: int
    mlp_matrices: int = 3
    kv_bytes_per_element: int | None = None  # None: as the weights
    tied_embeddings: bool = False  # one matrix serves as input and as output embedding
    experts: Experts | None = None
    latent: LatentKV | None = None
    window: int | None = None
    windowed_layers: int = 0
    chunked: bool = False
    state_layers: int = 0
    state_bytes: int = 0
    layer_bits: float | None = None
    expert_bits: float | None = None

    @property
    def sight(self) -> Sight | None:
        """What windowed layers see; None where all layers see every token."""
        return Sight(self.window, self.chunked) if self.window else None

    @property
    def most_flops(self) -> float:
        """What matrix units may do with its elements at most, as a multiple of `flops`: those of 4 bits four times."""
        return 4.0 if self.layer_bits or self.expert_bits or self.kv_bytes_per_element else 1.0

    @property
    def attention_weights(self) -> int:
        """The matrices of one layer's attention."""
        latent = self.latent
        if latent is None:
            return self.hidden * (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        query = self.heads * (self.head_dim + latent.rope_dim)
        queries = latent.query_rank * (self.hidden + query) if latent.query_rank else self.hidden * query
        down = self.hidden * (latent.rank + latent.rope_dim)
        up = latent.rank * self.heads * (self.head_dim + latent.value_dim)
        return queries + down + up + self.heads * latent.value_dim * self.hidden

    @property
    def layer_weights(self) -> int:
        """The matrices of one layer with a dense MLP."""
        return self.attention_weights + self._mlp(self.intermediate)

    @property
    def expert_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.experts.dense_layers if self.experts else 0

    @property
    def expert_weights(self) -> int:
        """The matrices of one routed expert."""
        return self._mlp(self.experts.intermediate) if self.experts else 0

    @property
    def common_weights(self) -> int:
        """The matrices of all layers that every token meets: all but the routed experts; the routers included."""
        dense = (self.layers - self.expert_layers) * self.layer_weights
        if not self.experts:
            return dense
        router = self.hidden * self.experts.count
        return dense + self.expert_layers * (self.attention_weights + self._mlp(self.experts.shared) + router)

    @property
    def token_weights(self) -> int:
        """The matrices of all layers that one token meets, its experts included; 2 FLOP for each."""
        active = self.experts.active if self.experts else 0
        return self.common_weights + self.expert_layers * active * self.expert_weights

    @property
    def expert_bytes(self) -> float:
        """Bytes of one routed expert in all layers that have it."""
        return self.expert_layers * self.expert_weights * self._bytes(self.expert_bits)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory; tied embeddings count once."""
        embeddings = (1 if self.tied_embeddings else 2) * self.hidden * self.vocab * self.bytes_per_element
        experts = self.experts.count * self.expert_bytes if self.experts else 0.0
        return round(self.common_weights * self._bytes(self.layer_bits) + experts) + embeddings

    @property
    def step_bytes(self) -> int:
        """Bytes of the weights that every step reads: all layers without routed experts, and the output embedding.

        Of the input embedding a step reads one row a token, which is left out.
        """
        output = self.hidden * self.vocab * self.bytes_per_element
        return round(self.common_weights * self._bytes(self.layer_bits)) + output

    @property
    def attention_layers(self) -> int:
        """Layers that keep K and V, or latent vectors, of tokens."""
        return self.layers - self.state_layers

    @property
    def layer_kv_bytes(self) -> int:
        """Bytes of K and V of one token in one layer: 2 x kv_heads x head_dim, or one latent vector and key."""
        width = self.kv_bytes_per_element or self.bytes_per_element
        if self.latent:
            return (self.latent.rank + self.latent.rope_dim) * width
        return 2 * self.kv_heads * self.head_dim * width

    @property
    def kv_bytes_per_token(self) -> int:
        """The same in all layers that keep tokens, windowed ones included."""
        return self.attention_layers * self.layer_kv_bytes

    @property
    def decode_pair_flops(self) -> float:
        """FLOP of one query-key pair in one layer where a row has one token: 4 x heads x head_dim.

        Latent attention multiplies queries and weights with the latent vector itself there (the absorbed form).
        """
        if self.latent:
            return 2.0 * self.heads * (2 * self.latent.rank + self.latent.rope_dim)
        return 4.0 * self.heads * self.head_dim

    @property
    def prompt_pair_flops(self) -> float:
        """FLOP of one query-key pair in one layer of a prompt: 4 x heads x head_dim, or of unpacked latent keys."""
        if self.latent:
            return 2.0 * self.heads * (self.head_dim + self.latent.rope_dim + self.latent.value_dim)
        return 4.0 * self.heads * self.head_dim

    def kv_share(self, parallel: int) -> float:
        """The share of a token's KV that each of `parallel` devices holds.

        Heads are split as far as there are any, and then repeated; the latent vector is on every device.
        """
        return 1.0 if self.latent else max(1.0 / parallel, 1.0 / self.kv_heads)

    def _mlp(self, width: int) -> int:
        return self.mlp_matrices * self.hidden * width

    def _bytes(self, bits: float | None) -> float:
        return self.bytes_per_element if bits is None else bits / 8
