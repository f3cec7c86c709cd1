"""Policies: torch.autocast is the judge of "bf16" and "fp16", ml_dtypes and plain torch of the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from assay.models.arithmetic import Arithmetic
from assay.models.gpt import Gpt, GptConfig, next_token_loss
from assay.models.text_to_image import TextToImage, TextToImageConfig, flow_loss
from assay.training.precision import POLICIES, Policy, PolicyArithmetic, convert_weights
from assay.training.tf32 import tf32_linear

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, gpu])]

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


class Gates(nn.Module):
    """Everything an arithmetic does, once; with a bias, and a norm whose input comes in low precision."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.arithmetic = arithmetic
        self.table, self.last = nn.Parameter(torch.empty(11, 16)), nn.Parameter(torch.empty(5, 16))
        self.inner, self.bias = nn.Parameter(torch.empty(48, 16)), nn.Parameter(torch.empty(48))
        self.scale, self.q_scale = nn.Parameter(torch.empty(16)), nn.Parameter(torch.empty(8))

    def forward(self, ids: Tensor) -> Tensor:
        arithmetic = self.arithmetic
        x = arithmetic.embedding(ids, self.table)
        inner = arithmetic.linear(arithmetic.norm(x, self.scale), self.inner, self.bias)
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in inner.chunk(3, dim=-1))
        mixed = arithmetic.attention(sdpa, arithmetic.norm(q, self.q_scale), k, v, True)
        x = arithmetic.residual(x, mixed.transpose(1, 2).flatten(2))
        return arithmetic.linear(arithmetic.norm(x, None), self.last, place="last_layer")


Example = tuple[nn.Module, Callable[[nn.Module], Tensor]]


def gates(arithmetic: Arithmetic, device: str) -> Example:
    ids = torch.arange(18, device=device).reshape(2, 9) % 11
    return Gates(arithmetic).to(device), lambda model: model(ids).float().square().mean()


def gpt(arithmetic: Arithmetic, device: str) -> Example:
    tokens = torch.randint(32, (2, 17), generator=torch.Generator().manual_seed(0)).to(device)
    config = GptConfig(vocabulary=32, context=16, width=32, depth=2, heads=4, kv_heads=2)
    return Gpt(config, sdpa, arithmetic).to(device), lambda model: next_token_loss(model, tokens)


def text_to_image(arithmetic: Arithmetic, device: str) -> Example:
    source = torch.Generator().manual_seed(0)
    images, noise = (torch.randn(2, 3, 8, 8, generator=source).to(device) for _ in range(2))
    words, time = torch.arange(8, device=device).reshape(2, 4), torch.tensor([0.3, 0.8], device=device)
    config = TextToImageConfig(image=8, patch=4, words=16, caption=4, width=32, depth=2, heads=2)
    return TextToImage(config, sdpa, arithmetic).to(device), lambda model: flow_loss(model, images, words, noise, time)


EXAMPLES = pytest.mark.parametrize("example", [gates, gpt, text_to_image])
Maker = Callable[[Arithmetic, str], Example]


def filled(example: Example) -> Example:
    """With weights that are nowhere 0, so that every gradient counts."""
    source = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in example[0].parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=source) * 0.3)
    return example


def gradients(example: Example) -> dict[str, Tensor]:
    model, loss = example
    value = loss(model)
    value.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert len(found) == len(list(model.parameters()))
    return {"loss": value.detach(), **found}


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert torch.isfinite(value).all(), name
        assert torch.equal(actual[name], value), name


def assert_near(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """FP16 on the CPU: our products are FP32's, rounded once, torch's may sum up in another order. So a result may be
    rounded to the other neighbour, and what follows from it moves by a few units in the last place of FP16."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert torch.isfinite(value).all(), name
        assert (actual[name] - value).abs().max() <= 8 * 2.0**-11 * value.abs().max(), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LOW)
@EXAMPLES
def test_low_precision_has_the_bits_of_autocast(example: Maker, name: str, device: str) -> None:
    model, loss = filled(example(Arithmetic(), device))

    def with_autocast(model: nn.Module) -> Tensor:
        with torch.autocast(device, LOW[name]):
            return loss(model)

    expected = gradients((model, with_autocast))
    found = gradients(filled(example(PolicyArithmetic(POLICIES[name]), device)))
    if (name, device) == ("fp16", "cpu"):
        assert_near(found, expected)
    else:
        assert_same_bits(found, expected)
    plain = gradients(filled(example(Arithmetic(), device)))
    assert not torch.equal(expected["loss"], plain["loss"])  # autocast did something


@EXAMPLES
def test_fp32_has_the_bits_of_plain_torch(example: Maker) -> None:
    expected = gradients(filled(example(Arithmetic(), "cpu")))
    assert_same_bits(gradients(filled(example(PolicyArithmetic(POLICIES["fp32"]), "cpu"))), expected)


def test_pure_bf16_has_the_bits_of_a_model_in_bf16() -> None:
    model, loss = filled(gates(Arithmetic(), "cpu"))
    expected = gradients((model.to(torch.bfloat16), loss))
    model, loss = filled(gates(PolicyArithmetic(POLICIES["bf16_pure"]), "cpu"))
    assert_same_bits(gradients((convert_weights(model, POLICIES["bf16_pure"]), loss)), expected)


@pytest.mark.parametrize("example", [gpt, text_to_image])
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_trains(example: Maker, name: str) -> None:
    policy = POLICIES[name]
    model, loss = example(PolicyArithmetic(policy), "cpu")
    model = convert_weights(model, policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize("place", ["norms", "attention", "residuals", "embeddings", "last_layer"])
def test_each_place_counts_by_itself(place: str) -> None:
    base = POLICIES["fp32"]
    expected = gradients(filled(gates(PolicyArithmetic(base), "cpu")))
    perturbed = gradients(filled(gates(PolicyArithmetic(base.replace(**{place: "bf16"})), "cpu")))
    difference = (perturbed["inner"] - expected["inner"]).norm() / expected["inner"].norm()
    assert 1e-6 < difference < 0.05


@pytest.mark.parametrize(
    ("policy", "dtypes"),
    [
        (POLICIES["fp32"], ("float32",) * 5),
        (POLICIES["tf32"], ("float32",) * 5),
        (POLICIES["bf16"], ("bfloat16", "bfloat16", "float32", "float32", "float32")),
        (POLICIES["bf16_pure"], ("bfloat16",) * 5),
        (POLICIES["fp8"], ("bfloat16", "bfloat16", "float32", "float32", "float32")),
        (POLICIES["fp16"].replace(last_layer="fp32"), ("float16", "float32", "float32", "float32", "float32")),
        (POLICIES["bf16"].replace(norms="matmul"), ("bfloat16", "bfloat16", "bfloat16", "float32", "float32")),
        (POLICIES["bf16"].replace(residuals="fp16"), ("bfloat16", "bfloat16", "float32", "float16", "float32")),
        (POLICIES["bf16"].replace(embeddings="bf16"), ("bfloat16", "bfloat16", "float32", "float32", "bfloat16")),
    ],
    ids=str,
)
def test_what_each_place_leaves(policy: Policy, dtypes: tuple[str, ...]) -> None:
    arithmetic, x, weight = PolicyArithmetic(policy), torch.randn(3, 16), torch.randn(16, 16)
    found = (
        arithmetic.linear(x, weight),
        arithmetic.linear(x, weight, place="last_layer"),
        arithmetic.norm(x.bfloat16(), weight[0]),
        arithmetic.residual(x, x.bfloat16()),
        arithmetic.embedding(torch.tensor([1, 2]), weight),
    )
    assert tuple(str(value.dtype).removeprefix("torch.") for value in found) == dtypes


def test_attention_gets_its_dtype() -> None:
    seen: list[torch.dtype] = []

    def spy(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        seen.extend((q.dtype, k.dtype, v.dtype))
        assert causal
        return q

    q = torch.randn(1, 2, 4, 8)
    for policy in (POLICIES["fp16"], POLICIES["fp8"], POLICIES["bf16"].replace(attention="fp32")):
        PolicyArithmetic(policy).attention(spy, q, q.bfloat16(), q, True)
    assert seen == [torch.float16] * 3 + [torch.bfloat16] * 3 + [torch.float32] * 3


def test_embedding_gradients_add_up_in_the_table() -> None:
    """Cast after the look-up: 300 times 1 is 300, which a sum in bf16 would not reach."""
    table = torch.ones(2, 4, requires_grad=True)
    arithmetic = PolicyArithmetic(POLICIES["fp32"].replace(embeddings="bf16"))
    arithmetic.embedding(torch.zeros(300, dtype=torch.int64), table).float().sum().backward()
    assert table.grad is not None
    assert table.grad.tolist() == [[300.0] * 4, [0.0] * 4]


def test_converting_weights() -> None:
    layer = nn.Linear(4, 4)
    model, first = nn.Sequential(layer, nn.BatchNorm1d(4)), layer.weight
    assert convert_weights(model, POLICIES["bf16_pure"]) is model
    assert layer.weight is first  # optimizers and tied layers still hold it
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32, torch.int64}
    optimizer = torch.optim.AdamW(model.parameters())
    layer(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert optimizer.state[first]["exp_avg"].dtype == optimizer.state[first]["exp_avg_sq"].dtype == torch.bfloat16
    convert_weights(model, POLICIES["bf16"])
    assert (first.dtype, first.grad) == (torch.float32, None)  # a bf16 gradient would not fit


def test_tf32_products_take_rounded_operands() -> None:
    source = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(shape, generator=source) for shape in ((2, 3, 64), (8, 64), (2, 3, 8)))
    bias = torch.randn(8, generator=source)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    out = tf32_linear(*leaves)
    out.backward(grad)
    x64, w64, g64 = (tf32_by_hand(t) for t in (x, weight, grad))
    expected = (g64 @ w64, g64.reshape(-1, 8).T @ x64.reshape(-1, 64), grad.double().numpy().sum((0, 1)))
    assert close(out, x64 @ w64.T + bias.double().numpy())
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert leaf.grad is not None
        assert close(leaf.grad, gradient)
    assert not close(F.linear(x, weight, bias), x64 @ w64.T + bias.double().numpy())


def tf32_by_hand(x: Tensor) -> np.ndarray:
    """10 bits of mantissa, to nearest even: fp16's, where the exponents fit it; ml_dtypes has no TF32."""
    scaled = x.numpy() * np.float32(2.0**4)
    assert (np.abs(scaled) > 2.0**-14).all()
    assert (np.abs(scaled) < 65504).all()
    return scaled.astype(np.float16).astype(np.float64) / 2.0**4


def close(actual: Tensor, expected: np.ndarray) -> bool:
    """To the error of FP32 sums of 64 products of size 1."""
    return bool(np.abs(actual.detach().double().numpy() - expected).max() < 64 * 2.0**-23)


def test_tf32_leaves_the_flag_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = torch.backends.cuda.matmul
    seen: list[str] = []
    before = backend.fp32_precision
    real = F.linear

    def spy(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(backend.fp32_precision)
        return real(x, weight, bias)

    monkeypatch.setattr(F, "linear", spy)
    x = torch.randn(4, 4, requires_grad=True)
    tf32_linear(x, x).sum().backward()
    assert (seen, backend.fp32_precision) == (["tf32"], before)
    with pytest.raises(RuntimeError, match="shapes"):
        tf32_linear(x, torch.randn(3, 5))
    assert backend.fp32_precision == before


@pytest.mark.gpu
@gpu
def test_tf32_on_cuda_is_near_its_emulation() -> None:
    x, weight = torch.randn(64, 256), torch.randn(32, 256)
    both = []
    for device in ("cpu", "cuda"):
        leaf = weight.detach().to(device).requires_grad_()
        out = tf32_linear(x.to(device), leaf)
        out.square().sum().backward()
        assert leaf.grad is not None
        both.append((out.detach().cpu(), leaf.grad.cpu()))
    exact = x.double() @ weight.double().T
    # An operand moves by 2⁻¹¹ of itself at most (2⁻¹⁰ if the device truncates); FP32 alone would be 100 times nearer.
    sizes = (x.abs() @ weight.abs().T) * 2.0**-9
    for out, _ in both:
        assert ((out - exact).abs() <= sizes).all()
        assert (out - exact).abs().max() > 1e-4
    assert (both[0][1] - both[1][1]).norm() < 2.0**-9 * both[0][1].norm()


def test_bf16_linear_is_what_ml_dtypes_says() -> None:
    x, weight = torch.randn(4, 8), torch.randn(3, 8)
    found = PolicyArithmetic(POLICIES["bf16"]).linear(x, weight)
    x64, w64 = (t.numpy().astype(ml_dtypes.bfloat16).astype(np.float64) for t in (x, weight))
    assert np.array_equal(found.float().numpy(), (x64 @ w64.T).astype(ml_dtypes.bfloat16).astype(np.float32))


def test_a_policy_is_data() -> None:
    policy = POLICIES["bf16"]
    assert str(policy) == (
        "bf16: matmul bf16, norms fp32, attention matmul, residuals fp32, embeddings fp32, last layer matmul, "
        "weights fp32, loss scale None"
    )
    changed = policy.replace(norms="matmul")
    assert changed.name == "bf16 with norms=matmul"
    assert (changed.precision("norms"), changed.dtype("norms")) == ("bf16", torch.bfloat16)
    assert changed != policy
    assert changed.replace(norms="fp32", name="again") == policy  # a name decides nothing
    assert Policy(**policy.as_dict()) == policy  # type: ignore[arg-type]
    assert len({*POLICIES.values(), policy}) == 6
    assert list(POLICIES) == [policy.name for policy in POLICIES.values()]
    with pytest.raises(FrozenInstanceError):
        policy.norms = "bf16"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm": "fp32"}, r"Unknown place 'norm'\. .*norms.*The places are: matmul, norms"),
        ({"norms": "float32"}, r"norms must be one of matmul, fp32, bf16, fp16; got 'float32'"),
        ({"norms": "fp8"}, r"norms must be one of .*got 'fp8'"),
        ({"matmul": "int8"}, r"matmul must be one of fp32, tf32, bf16, fp16, fp8; got 'int8'"),
        ({"weights": "fp16"}, r"weights must be one of fp32, bf16; got 'fp16'"),
        ({"residuals": None}, r"residuals must be one of .*got None"),
        ({"loss_scale": "static"}, r"loss_scale must be None, 'dynamic' or a positive finite number, got 'static'"),
        ({"loss_scale": 0.0}, r"got 0\.0"),
        ({"loss_scale": float("inf")}, r"got inf"),
        ({"loss_scale": True}, r"got True"),
    ],
)
def test_bad_policies(change: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        POLICIES["bf16"].replace(**change)
