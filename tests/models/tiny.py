"""Models small enough for a test, and torch's attention for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from assay.models.arithmetic import PLAIN, Arithmetic, Attention
from assay.models.gpt import Gpt, GptConfig
from assay.models.text_to_image import TextToImage, TextToImageConfig

IMAGES = TextToImageConfig(image=8, patch=2, words=10, caption=3, width=32, depth=2, heads=2)
TOKENS = GptConfig(vocabulary=50, context=24, width=32, depth=2, heads=4, kv_heads=2)


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def images_model(attention: Attention = sdpa, arithmetic: Arithmetic = PLAIN) -> TextToImage:
    """With weights as if trained: nothing is 0, so that every gate is open and every weight matters."""
    model = TextToImage(IMAGES, attention, arithmetic)
    disturb(model)
    return model


def tokens_model(attention: Attention = sdpa, arithmetic: Arithmetic = PLAIN, config: GptConfig = TOKENS) -> Gpt:
    model = Gpt(config, attention, arithmetic)
    disturb(model)
    return model


def disturb(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.3)


def images_inputs(batch: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Noisy images, times, captions."""
    generator = torch.Generator().manual_seed(2)
    noisy = torch.randn(batch, 3, 8, 8, generator=generator).to(dtype)
    time = torch.rand(batch, generator=generator)
    return noisy, time, torch.randint(0, 10, (batch, 3), generator=generator)


def tokens_inputs(batch: int = 2, length: int = 24) -> Tensor:
    return torch.randint(0, 50, (batch, length), generator=torch.Generator().manual_seed(3))
