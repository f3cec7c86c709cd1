"""Small random models of transformers, and the same models in FP64."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

VOCABULARY = 61
WINDOW = 5
_COMMON = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_GROUPED = _COMMON | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_BERT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
# A token goes to all experts: a choice between them could flip with rounding. Many heads: sinks enough to average over.
_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2, "num_attention_heads": 16, "head_dim": 8}
_DENSE = {"mlp_only_layers": [0, 1], "use_sliding_window": True, "max_window_layers": 0}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", _GROUPED | {"sliding_window": WINDOW}),
    # A soft cap that bites, a window in every other layer, a scale of its own.
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        _GROUPED | {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _COMMON | {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "bert": ("BertForMaskedLM", "BertConfig", _COMMON | _BERT),
    # Sinks, and a window in every other layer.
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        _GROUPED
        | _EXPERTS
        | {"sliding_window": WINDOW, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    # Windows in its masks, of which its attention is told nothing.
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", _GROUPED | _DENSE | {"sliding_window": WINDOW}),
    # Learned position biases, an encoder and a decoder that looks into it.
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        _COMMON | {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 1},
    ),
}
DECODERS = ["llama", "mistral", "gemma2", "gpt2", "gpt_oss"]


def build(name: str, implementation: str = "assay", **changes: Any) -> Any:
    """The same weights every time: large enough that attention is far from even, and sinks that are not all alike."""
    model_class, config_class, options = MODELS[name]
    config = getattr(transformers, config_class)(**(options | changes))
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, model_class)._from_config(config, attn_implementation=implementation).eval()
    for weight_name, weight in model.named_parameters():
        if weight.dim() > 1 or weight_name.endswith("sinks"):
            torch.nn.init.normal_(weight, std=1.0 if weight.dim() == 1 else 0.15)
    return model


def variant(model: Any, implementation: str, dtype: torch.dtype) -> Any:
    """A copy with its weights in another dtype. Buffers (rotary frequencies) stay, as `from_pretrained` leaves them."""
    model = copy.deepcopy(model)
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    model.set_attn_implementation(implementation)
    return model


class StaysDouble(TorchFunctionMode):
    """FP64 stays FP64 where a model asks for FP32: its norms and its softmax do, which would spoil a golden value."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if x is torch.float32 else x for x in args)
            kwargs = {key: torch.float64 if x is torch.float32 else x for key, x in kwargs.items()}
        return func(*args, **kwargs)


def tokens(batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, VOCABULARY, (batch, length), generator=generator)


def padding(kind: str, batch: int, length: int) -> Tensor:
    """1 for tokens: the first sequence is short, the last whole."""
    given = torch.ones(batch, length, dtype=torch.long)
    for row, missing in enumerate(range(batch - 1, -1, -1)):
        if kind == "left":
            given[row, : 3 * missing] = 0
        elif kind == "right":
            given[row, length - 3 * missing :] = 0
    return given
