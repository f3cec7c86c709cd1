"""`assay watch`: a transformers model on this machine's disk, its attention beside the same computed plainly."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from assay.cli.messages import refusing
from assay.cli.sweep import OUT_HELP

if TYPE_CHECKING:
    from torch import nn

_NAME = "watch"
_DTYPES = ("fp32", "bf16", "fp16")


def watch(
    model: Annotated[str, typer.Option(help="A folder with a transformers model, or the name of one on this disk.")],
    prompt: Annotated[list[str], typer.Option(help="What it reads. Repeat it for a batch.")],
    attention: Annotated[str, typer.Option(help="Its attn_implementation: sdpa, eager, assay, …")] = "sdpa",
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "bf16",
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where there is one.")] = "auto",
    out: Annotated[Path, typer.Option(help=OUT_HELP)] = Path("runs/watch"),
) -> None:
    """Run a transformers model over a prompt and compare every attention call with the same computed plainly.

    Nothing is downloaded. Writes the records, the worst call's q, k and v (worst.safetensors, for
    `assay sweep inputs --from PATH`) and the report.
    """
    from assay.cli.devices import find_device
    from assay.cli.reporting import conclude
    from assay.results.store import StoreError
    from assay.watching.watch import watch as watched

    with refusing(_NAME, ValueError, OSError, StoreError):
        place = find_device(device)
        network, inputs = _load(model, prompt, attention, dtype, place)
        with watched(network, out=out) as seen:
            _run(network, inputs)
        typer.echo(seen.summary())
        seen.worst.save(out / "worst.safetensors")
    asked = f"Is the attention of {model} as near as plain attention in {dtype}?"
    conclude(_NAME, out, asked=asked, as_json=False, claims=False)


def _load(name: str, prompts: list[str], attention: str, dtype: str, device: str) -> tuple[nn.Module, Any]:
    """The model and its inputs."""
    import torch
    from safetensors import SafetensorError

    from assay.integrations.versions import needed

    if dtype not in _DTYPES:
        raise ValueError(f"--dtype is one of {', '.join(_DTYPES)}; got {dtype}.")
    if Path(name).is_absolute() and not Path(name).is_dir():
        raise ValueError(f"--model is a folder with a transformers model, or the name of one; {name} is no folder.")
    try:
        transformers = needed("transformers", (5,), (6,))
    except ImportError as error:
        raise ValueError(str(error)) from None
    if attention == "assay":
        from assay.integrations import register_transformers

        register_transformers()
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    config = _config(transformers, name)
    decoder = any("CausalLM" in kind or "LMHead" in kind for kind in config.architectures or ())
    family = transformers.AutoModelForCausalLM if decoder else transformers.AutoModel
    try:
        network = family.from_pretrained(
            name, local_files_only=True, dtype=kinds[dtype], attn_implementation=attention, use_safetensors=True
        )
    except ImportError as error:  # of what this attention needs
        raise ValueError(f"--attention {attention} cannot be had here: {error} Install it, or use sdpa.") from error
    except SafetensorError as error:
        raise ValueError(f"--model must have whole weights (safetensors); those of {name} are not: {error}.") from error
    tokens = transformers.AutoTokenizer.from_pretrained(name, local_files_only=True)
    if len(prompts) > 1 and tokens.pad_token is None:
        tokens.pad_token = tokens.eos_token
    inputs = tokens(prompts, return_tensors="pt", padding=len(prompts) > 1).to(device)
    most, length = getattr(config, "max_position_embeddings", None), inputs["input_ids"].shape[1]
    if length == 0:
        raise ValueError("--prompt must have a word in it, got one without any.")
    if most is not None and length > most:
        raise ValueError(f"--prompt must be at most {most} tokens long, as {name} is made for; got {length}.")
    found: Any = network
    return found.to(device).eval(), inputs


def _config(transformers: Any, name: str) -> Any:
    """Of a model that is there, and that one forward pass over a prompt makes sense for."""
    try:
        config = transformers.AutoConfig.from_pretrained(name, local_files_only=True)
    except OSError as error:
        raise ValueError(
            "--model must be a folder with a transformers model (config.json, weights, tokenizer), or the name of one "
            f"that is on this disk, for nothing is downloaded; no model was found at {name}. Give its folder."
        ) from error
    if config.is_encoder_decoder:
        raise ValueError(
            f"--model must be a decoder (Llama, GPT-2, …) or an encoder (BERT, …); {name} is an encoder-decoder "
            f"({config.model_type}), which reads a prompt and an answer. Watch it in Python: "
            "`with assay.watch(model): model(**inputs, labels=…)`."
        )
    return config


def _run(network: nn.Module, inputs: Any) -> None:
    import torch

    with torch.no_grad():
        network(**inputs)
