"""A diffusion transformer that draws what a caption says."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from torch import Tensor, nn
from torch.nn.functional import silu

from assay.models.arithmetic import PLAIN, Arithmetic, Attention
from assay.models.checks import check_counts, check_multiple
from assay.models.flow import flow_loss as flow_loss
from assay.models.flow import sample as sample
from assay.models.layers import Embedding, Linear, MultiHead, Norm, SwiGlu
from assay.models.patches import from_patches, to_patches
from assay.models.positions import grid_sines, sines
from assay.models.weights import Weights


@dataclass(frozen=True, kw_only=True)
class TextToImageConfig:
    """The sizes of a TextToImage."""

    image: int = 32
    """Pixels a side."""
    patch: int = 4
    """Pixels a side of what becomes one token."""
    channels: int = 3
    words: int = 2048
    """The vocabulary, with the empty word, 0."""
    caption: int = 16
    """Words of every caption, the empty ones at its end included."""
    width: int = 128
    depth: int = 4
    heads: int = 4

    def __post_init__(self) -> None:
        check_counts(**asdict(self))
        check_multiple("image", self.image, "patch", self.patch)
        check_multiple("width", self.width, "heads", self.heads)
        check_multiple("width", self.width, "sines and cosines of two axes", 4)


text_to_image_sizes = {
    "300k": TextToImageConfig(width=48, depth=4, heads=3),
    "1m": TextToImageConfig(width=96, depth=5, heads=3),
    "5m": TextToImageConfig(width=192, depth=7, heads=6),
    "30m": TextToImageConfig(image=64, width=384, depth=12, heads=6),
    "100m": TextToImageConfig(image=64, width=768, depth=10, heads=12),
    "300m": TextToImageConfig(image=64, width=1024, depth=17, heads=16),
}
"""By the number of parameters: from what a laptop trains in minutes to a GPU's."""


class Block(nn.Module):
    """Self-attention, cross-attention, MLP. The time shifts and scales what each sees, and gates what it adds."""

    def __init__(
        self, config: TextToImageConfig, attention: Attention, arithmetic: Arithmetic, weights: Weights
    ) -> None:
        super().__init__()
        width, heads = config.width, config.heads
        self.arithmetic = arithmetic
        self.offsets = weights.zeros(9, width)
        self.self_attention = MultiHead(weights, arithmetic, attention, width, heads, qk_norm=True)
        self.cross_attention = MultiHead(weights, arithmetic, attention, width, heads, qk_norm=True)
        self.mlp = SwiGlu(weights, arithmetic, width)

    def forward(self, x: Tensor, caption: Tensor, time: Tensor) -> Tensor:
        """The stream (B, N, width), the caption (B, L, width) and what the time says to all blocks (B, 9, width)."""
        residual = self.arithmetic.residual
        said = (time + self.offsets).unsqueeze(2).unbind(1)
        seen = adapted(self.arithmetic, x, said[0], said[1])
        x = residual(x, said[2] * self.self_attention(seen, seen))
        seen = adapted(self.arithmetic, x, said[3], said[4])
        x = residual(x, said[5] * self.cross_attention(seen, caption))
        seen = adapted(self.arithmetic, x, said[6], said[7])
        return residual(x, said[8] * self.mlp(seen))


class TextToImage(nn.Module):
    """The velocity of a rectified flow from noise to the images of a caption: a diffusion transformer.

    Patches with sines of their row and column; blocks of self-attention, cross-attention to the caption and SwiGLU;
    the time enters by adaptive norms, one projection for all blocks and learnt offsets for each. The gates and the last
    layer begin with 0: at first every block passes its input on, and the velocity is 0.

    A caption is words with learnt positions. The word 0 is no word: it fills captions up and makes the empty one. An
    attention here takes no mask, so empty words are not hidden: they are keys like the others, whose rows are learnt.
    """

    def __init__(
        self, config: TextToImageConfig, attention: Attention, arithmetic: Arithmetic = PLAIN, seed: int = 0
    ) -> None:
        super().__init__()
        weights, width, pixels = Weights(seed), config.width, config.channels * config.patch**2
        self.config, self.arithmetic = config, arithmetic
        self.patches = Linear(weights, arithmetic, pixels, width, bias=True)
        self.words = Embedding(weights, arithmetic, config.words, width)
        self.word_positions = weights.normal(config.caption, width, std=0.02)
        self.words_norm = Norm(weights, arithmetic, width)
        self.time_in = Linear(weights, arithmetic, width, width, bias=True)
        self.time_out = Linear(weights, arithmetic, width, width, bias=True)
        self.adaptive = Linear(weights, arithmetic, width, 9 * width, bias=True, gain=0)
        self.blocks = nn.ModuleList(Block(config, attention, arithmetic, weights) for _ in range(config.depth))
        self.last_adaptive = Linear(weights, arithmetic, width, 2 * width, bias=True, gain=0)
        self.last = Linear(weights, arithmetic, width, pixels, bias=True, gain=0, place="last_layer")

    def forward(self, noisy: Tensor, time: Tensor, caption: Tensor) -> Tensor:
        """Noisy images (B, C, S, S), times (B,) from 0 (image) to 1 (noise), captions (B, L) int64 → (B, C, S, S)."""
        self._check(noisy, time, caption)
        arithmetic, config, dtype = self.arithmetic, self.config, self.patches.weight.dtype
        said = silu(self.time_out(silu(self.time_in(sines(1000 * time.float(), config.width).to(dtype)))))
        words = self.words_norm(arithmetic.residual(self.words(caption), self.word_positions))
        places = grid_sines(config.image // config.patch, config.width, noisy.device).to(dtype)
        x = arithmetic.residual(self.patches(to_patches(noisy.to(dtype), config.patch)), places)
        to_blocks = self.adaptive(said).unflatten(1, (9, config.width))
        for block in self.blocks:
            x = block(x, words, to_blocks)
        shift, scale = self.last_adaptive(said).unsqueeze(1).chunk(2, dim=-1)
        return from_patches(self.last(adapted(arithmetic, x, shift, scale)), config.patch, config.channels)

    def _check(self, noisy: Tensor, time: Tensor, caption: Tensor) -> None:
        c, batch = self.config, noisy.shape[:1]
        image, words = (c.channels, c.image, c.image), (c.caption,)
        if noisy.dim() != 4 or noisy.shape[1:] != image or time.shape != batch or caption.shape != batch + words:
            raise ValueError(
                f"Images must be (batch, {c.channels}, {c.image}, {c.image}), times (batch,) and captions "
                f"(batch, {c.caption}), filled up with 0; got {tuple(noisy.shape)}, {tuple(time.shape)} and "
                f"{tuple(caption.shape)}."
            )


def adapted(arithmetic: Arithmetic, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """The RMS norm of x, scaled by 1 + scale and shifted."""
    return arithmetic.norm(x, None) * (1 + scale) + shift
