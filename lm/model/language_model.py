"""The character-level language model of Longformer, section 4 (small and large).

Bytes in, logits over the 256 byte values out: embedding, pre-LayerNorm blocks of banded attention
and feed-forward, a head that shares the embedding. Positions enter through the attention alone.

Shapes: B batch, N positions, M model width, F feed-forward width, H heads, D = M / H, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernels import Band
from lm.model.attention import BandedAttention, KeyValueCache
from lm.model.dropout import dropout
from lm.model.positions import sinusoidal_table
from lm.schedule import Stage

SYMBOLS = 256


@dataclass
class ModelConfig:
    """What a model is. The paper's text leaves some of it open: see docs/deviations.md.

    Attributes:
        layers, heads, width: L, H and M.
        feedforward: F.
        dropout: on embeddings, position table, attention output, feed-forward (inner and outer)
            and the last hidden state.
        attention_dropout: on the attention weights.
        tie_embedding: the head shares the embedding's matrix.
        scale_embedding: multiply the embedding by sqrt(M).
        init_std: of the normal distribution of every matrix and of u and v.
        attention_bias: whether the q, k, v and o projections have biases.
        output_bias: whether the head has one.
        final_norm: LayerNorm before the head.
        share_position_biases: one u and v for all layers.
        position_unit: characters (true distance) or steps (of the head's stride).
        backend: of the attention: auto, tvm, chunks, loop or dense.
    """

    layers: int = 12
    heads: int = 8
    width: int = 512
    feedforward: int = 2048
    dropout: float = 0.2
    attention_dropout: float = 0.0
    tie_embedding: bool = True
    scale_embedding: bool = True
    init_std: float = 0.02
    attention_bias: bool = False
    output_bias: bool = True
    final_norm: bool = True
    share_position_biases: bool = True
    position_unit: str = "characters"
    backend: str = "auto"


def bands(stage: Stage) -> list[Band]:
    """The band of each layer in a stage."""
    return [Band(w, s) for w, s in zip(stage.windows, stage.strides, strict=True)]


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, config: ModelConfig, band: Band) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = BandedAttention(
            config.width,
            config.heads,
            band,
            dropout=config.attention_dropout,
            bias=config.attention_bias,
            unit=config.position_unit,
            backend=config.backend,
        )
        self.feedforward_norm = nn.LayerNorm(config.width)
        self.inner = nn.Linear(config.width, config.feedforward)
        self.outer = nn.Linear(config.feedforward, config.width)
        self.dropout = config.dropout

    def forward(
        self,
        x: Float[Tensor, "B N M"],
        table: Float[Tensor, "distances M"],
        content_bias: Float[Tensor, "H D"],
        position_bias: Float[Tensor, "H D"],
        cache: KeyValueCache | None = None,
    ) -> Float[Tensor, "B N M"]:
        """One block; with a cache, `x` continues the positions that the cache holds."""
        attended = self.attention(self.attention_norm(x), table, content_bias, position_bias, cache)
        x = x + self.drop(attended)
        hidden = self.drop(F.gelu(self.inner(self.feedforward_norm(x))))
        return x + self.drop(self.outer(hidden))

    def drop(self, x: Float[Tensor, "B N width"]) -> Float[Tensor, "B N width"]:
        """Dropout, while training."""
        return dropout(x, self.dropout, self.training)


class LanguageModel(nn.Module):
    """Predicts each next byte from the bytes before it.

    Parameters (small: 41.08 M, large: 102.51 M), with L, M, F, H as above::

        embedding (shared with the head)    256 M  (+ 256 for the head's bias)
        u and v                             2 M
        each of L blocks: q, k, v, o, W_kR  5 M^2
            feed-forward                    2 M F + F + M
            two LayerNorms                  4 M
        final LayerNorm                     2 M

    Initial values::

        matrices, embedding, u, v           normal, mean 0, std init_std
        biases                              0
        LayerNorm                           weight 1, bias 0

    Args:
        config: the model.
        bands: one per layer, bottom to top (see `bands`). They hold no parameters, so weights
            pass from stage to stage unchanged.
        gradient_checkpointing: keep only each block's input and recompute the rest in backward.
    """

    table: Tensor

    def __init__(
        self, config: ModelConfig, bands: Sequence[Band], *, gradient_checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.gradient_checkpointing = gradient_checkpointing
        self.embedding = nn.Embedding(SYMBOLS, config.width)
        self.blocks = nn.ModuleList(Block(config, band) for band in bands)
        sets = 1 if config.share_position_biases else config.layers
        head_width = config.width // config.heads
        self.content_bias = nn.Parameter(torch.empty(sets, config.heads, head_width))
        self.position_bias = nn.Parameter(torch.empty(sets, config.heads, head_width))
        self.final_norm = nn.LayerNorm(config.width) if config.final_norm else nn.Identity()
        self.head = nn.Linear(config.width, SYMBOLS, bias=config.output_bias)
        if config.tie_embedding:
            self.head.weight = self.embedding.weight
        farthest = max(self._farthest(band) for band in bands)
        self.register_buffer(
            "table", sinusoidal_table(farthest + 1, config.width), persistent=False
        )
        self._initialise()

    def _farthest(self, band: Band) -> int:
        return band.reach if self.config.position_unit == "characters" else band.window

    def _initialise(self) -> None:
        std = self.config.init_std
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.content_bias, std=std)
        nn.init.normal_(self.position_bias, std=std)

    def position_biases(self, layer: int) -> tuple[Float[Tensor, "H D"], Float[Tensor, "H D"]]:
        """Transformer-XL's u and v for one layer."""
        index = 0 if self.config.share_position_biases else layer
        return self.content_bias[index], self.position_bias[index]

    def forward(
        self,
        tokens: Integer[Tensor, "B N"],
        caches: Sequence[KeyValueCache] | None = None,
        last: int | None = None,
    ) -> Float[Tensor, "B predicted 256"]:
        """Logits (float32) of the byte that follows each position.

        Args:
            tokens: byte values.
            caches: one per layer: `tokens` then continue what the caches hold.
            last: give logits for the last so many positions only.
        """
        x = dropout(self.embed(tokens), self.config.dropout, self.training)
        table = dropout(self.table, self.config.dropout, self.training)
        for layer, block in enumerate(self.blocks):
            biases = self.position_biases(layer)
            if caches is not None:
                x = block.forward(x, table, *biases, caches[layer])  # never the compiled one
            elif self.gradient_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, table, *biases, use_reentrant=False)
            else:
                x = block(x, table, *biases)
        if last is not None:
            x = x[:, -last:]
        return self.predict(x)

    def embed(self, tokens: Integer[Tensor, "B N"]) -> Float[Tensor, "B N M"]:
        """The input of the first block, before dropout."""
        x = F.embedding(tokens.int(), self.embedding.weight)
        return x * self.config.width**0.5 if self.config.scale_embedding else x

    def predict(self, x: Float[Tensor, "B N M"]) -> Float[Tensor, "B N 256"]:
        """Logits (float32) from the output of the last block."""
        x = dropout(self.final_norm(x), self.config.dropout, self.training)
        return self.head(x).float()


def parameters(config: ModelConfig) -> int:
    """Number of parameters by the formula in `LanguageModel`'s docstring."""
    m, f = config.width, config.feedforward
    head = (0 if config.tie_embedding else SYMBOLS * m) + (SYMBOLS if config.output_bias else 0)
    biases = 2 * m * (1 if config.share_position_biases else config.layers)
    attention = 5 * m * m + (4 * m if config.attention_bias else 0)
    block = attention + 2 * m * f + f + m + 4 * m
    return SYMBOLS * m + head + biases + config.layers * block + (2 * m if config.final_norm else 0)
