"""AdamW as in Longformer, appendix A: decay on matrices, warm-up then a constant rate."""

from __future__ import annotations

from torch import nn
from torch.optim import AdamW, Optimizer

from lm.config.schema import OptimConfig
from lm.schedule import Stage


def build_optimizer(
    model: nn.Module, config: OptimConfig, stage: Stage, *, fused: bool = True
) -> AdamW:
    """AdamW over all parameters, in two groups: decayed and not.

    With `decay=matrices`, weights of two dimensions are decayed; biases, LayerNorm and the
    position biases u and v are not. The fused implementation makes one pass over the memory; under
    an fp16 scaler it would also unscale, after the clipping, so there it is not used.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [p for name, p in named if config.decay == "all" or p.dim() == 2]
    chosen = {id(p) for p in decayed}
    others = [p for _, p in named if id(p) not in chosen]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    beta1, beta2 = config.betas
    return AdamW(
        [group for group in groups if group["params"]],
        lr=stage.learning_rate(0),
        betas=(beta1, beta2),
        eps=config.eps,
        fused=fused,
    )


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Give every group the learning rate of the coming step."""
    for group in optimizer.param_groups:
        group["lr"] = lr
