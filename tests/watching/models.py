"""Small models whose attention can be found, each in its own way."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention  # by name, as some models import it

WIDTH, HEADS = 32, 4


class Layer(nn.Module):
    """Self-attention; `by_name` calls the function that was imported by name."""

    def __init__(self, by_name: bool = False, causal: bool = True) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.by_name, self.causal = by_name, causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attention = scaled_dot_product_attention if self.by_name else F.scaled_dot_product_attention
        y: Tensor = self.out(attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))
        return y


class Stack(nn.Module):
    """Layers with residuals."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Multihead(nn.Module):
    """torch's own, as a self-attention layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x, x, x, need_weights=False)[0]
        return y


def stack(dtype: torch.dtype = torch.bfloat16, **how: bool) -> Stack:
    torch.manual_seed(0)
    return Stack(*(Layer(**how) for _ in range(3))).to(dtype)


def inputs(dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> Tensor:
    return torch.randn(2, 21, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output and all gradients."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    out = model(x)
    out.float().square().mean().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert x.grad is not None
    return [out.detach(), x.grad, *gradients]
