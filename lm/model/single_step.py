"""One character at a time, as fast as small tensors allow.

The computation is that of `language_model`, over the caches of `stream`; what a call of many
positions can afford is left out: q, k and v come from one product, and attention of a single query
is two products per head. It does not depend on the attention backend.

Shapes: H heads, h heads of one stride, D head width, M model width, m keys that a head sees.
"""

from __future__ import annotations

from itertools import groupby

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lm.model.language_model import Block
from lm.model.stream import LayerCache, StreamState


class Stepper:
    """Reads on where a `StreamState` stands, one byte per call.

    Args:
        state: of one text; its caches are used further, its weights are copied in part.

    Raises:
        ValueError: if the state reads several texts at once.
    """

    def __init__(self, state: StreamState) -> None:
        if state.batch != 1:
            raise ValueError(f"the state reads {state.batch} texts; a stepper reads one")
        self.state = state
        model = state.model
        self.layers = [
            LayerStep(block, cache, torch.stack(model.position_biases(layer)))
            for layer, (block, cache) in enumerate(zip(state.blocks, state.caches, strict=True))
        ]
        self.scale = model.config.width**0.5 if model.config.scale_embedding else 1.0

    @torch.inference_mode()
    def step(self, byte: int) -> Float[Tensor, " 256"]:
        """Logits of the byte that follows `byte`."""
        model = self.state.model
        self.state.position += 1
        x = model.embedding.weight[byte : byte + 1] * self.scale
        for layer in self.layers:
            x = layer(x)
        return model.head(model.final_norm(x))[0]


class LayerStep:
    """One block for one position.

    Args:
        block: whose weights are used.
        cache: of the block's layer.
        biases: Transformer-XL's u and v of the layer.
    """

    @torch.inference_mode()
    def __init__(self, block: Block, cache: LayerCache, biases: Float[Tensor, "2 H D"]) -> None:
        attention = block.attention
        scale = biases.shape[2] ** -0.5
        parts = (attention.q, attention.k, attention.v)
        # Taken out of their modules once, not anew at each character.
        self.norms = [
            (norm.normalized_shape, norm.weight, norm.bias, norm.eps)
            for norm in (block.attention_norm, block.feedforward_norm)
        ]
        self.o, self.inner, self.outer = (
            (part.weight, part.bias) for part in (attention.o, block.inner, block.outer)
        )
        self.cache = cache
        self.biases = biases * scale
        self.weight = torch.cat([part.weight for part in parts])
        self.weight[: len(attention.q.weight)] *= scale
        self.bias = None
        if attention.q.bias is not None:
            self.bias = torch.cat([part.bias for part in parts])
            self.bias[: len(attention.q.bias)] *= scale
        self.window = attention.band.window
        # Runs of neighbouring heads with one stride; r from the farthest distance to the nearest,
        # as the keys lie. Products with one row on the left are several times as fast as products
        # with one column on the right, and r is laid out so that its rows are read in one go.
        self.runs = []
        backwards = cache.distance_keys.flip(1).transpose(1, 2)
        for stride, run in groupby(enumerate(attention.band.strides), lambda item: item[1]):
            heads = [head for head, _ in run]
            inside = slice(heads[0], heads[-1] + 1)
            self.runs.append((stride, inside, backwards[inside].contiguous()))

    def __call__(self, x: Float[Tensor, "1 M"]) -> Float[Tensor, "1 M"]:
        """The block's output at the new position."""
        attended = self._attend(torch.layer_norm(x, *self.norms[0]))
        x = x + F.linear(attended, *self.o)
        hidden = F.gelu(F.linear(torch.layer_norm(x, *self.norms[1]), *self.inner))
        return x + F.linear(hidden, *self.outer)

    def _attend(self, x: Float[Tensor, "1 M"]) -> Float[Tensor, "1 M"]:
        _, heads, width = self.biases.shape
        q, k, v = F.linear(x, self.weight, self.bias).view(3, heads, width)
        keys, values = self.cache.extend(k[None, None], v[None, None])
        content, position = (q + self.biases)[:, :, None]  # [H, 1, D] each
        newest = keys.shape[1] - 1
        out = torch.empty_like(content)
        for stride, inside, r in self.runs:
            farthest = min(self.window, newest // stride)
            seen = slice(newest - farthest * stride, None, stride)
            k_seen = keys[0, seen, inside].permute(1, 2, 0)  # [h, D, m]
            v_seen = values[0, seen, inside].transpose(0, 1)  # [h, m, D]
            scores = torch.bmm(position[inside], r[:, :, self.window - farthest :])  # [h, 1, m]
            scores = torch.baddbmm(scores, content[inside], k_seen)
            torch.bmm(scores.softmax(-1), v_seen, out=out[inside])
        return out.view(1, -1)
