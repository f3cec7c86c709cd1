"""`flash_attention` as a user calls it, on the CPU."""

from __future__ import annotations

import subprocess
import sys

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

import assay
from assay import flash_attention, scaled_dot_product_attention
from assay.flash.checks import check_packing, check_sinks, check_window
from assay.flash.numerics import Numerics
from assay.flash.rotary import Rotary
from tests.flash.inputs import CU, draw, qkv
from tests.flash.reference import reference_attention
from tests.test_structure import run_without


def test_causal_is_aligned_with_the_last_key_and_in_sdpa_with_the_first() -> None:
    q, k, v = qkv(queries=3, keys=20)
    expected, _ = reference_attention(q, k, v, causal=True)
    assert (flash_attention(q, k, v, causal=True) - expected).abs().max() < 1e-5
    first = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert (scaled_dot_product_attention(q, k, v, is_causal=True) - first).abs().max() < 1e-5
    assert (first - expected).abs().max() > 0.1


def test_lse_and_its_gradient() -> None:
    q, k, v = (x.double().requires_grad_() for x in qkv())
    _, lse = flash_attention(q, k, v, return_lse=True)
    expected = (q @ k.mT * 0.25).logsumexp(-1)
    assert (lse - expected).abs().max() < 1e-12
    weights = draw(2, 4, 20, seed=5).double()
    found, wanted = (torch.autograd.grad((x * weights).sum(), (q, k)) for x in (lse, expected))
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).abs().max() < 1e-12


def test_fully_masked_rows() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(queries=20, keys=5))
    out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    assert (out[:, :, :15] == 0).all()
    assert (lse[:, :, :15] == -torch.inf).all()
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert (dq[:, :, :15] == 0).all()
    assert dq.isfinite().all()


def test_rotary() -> None:
    q, k, v = qkv(queries=7)
    angles = torch.arange(20)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
    rotary = Rotary(angles.cos(), angles.sin())

    def turned(x: torch.Tensor, first: int) -> torch.Tensor:
        a, b, rest = x.split((4, 4, 8), -1)
        cos, sin = (t[first : first + x.shape[2]] for t in rotary[:2])
        return torch.cat((a * cos - b * sin, a * sin + b * cos, rest), -1)

    expected = flash_attention(turned(q, 13), turned(k, 0), v, causal=True)
    assert (flash_attention(q, k, v, causal=True, rotary=rotary) - expected).abs().max() < 1e-5


def test_dropout() -> None:
    q, k, v = qkv(keys=400)
    ones = torch.ones_like(v)
    seeded = [flash_attention(q, k, ones, dropout_p=0.25, dropout_seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(seeded[0], seeded[1])
    assert not torch.equal(seeded[0], seeded[2])
    torch.manual_seed(3)
    first = flash_attention(q, k, v, dropout_p=0.25)
    assert not torch.equal(first, flash_attention(q, k, v, dropout_p=0.25))
    torch.manual_seed(3)
    assert torch.equal(first, flash_attention(q, k, v, dropout_p=0.25))
    # What stays is divided by its share: the mean over 2·4·20 rows of 400 keys is 1 within 5 standard errors.
    share = 0.25
    error = (share / (1 - share) / 400 * 3) ** 0.5 / 160**0.5  # a row's P varies: its squares sum to under 3/400
    assert abs(seeded[0][..., 0].mean().item() - 1) < 5 * error


def test_autocast() -> None:
    q, k, v = qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flash_attention(q, k, v).dtype == torch.bfloat16
        assert scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
    assert flash_attention(q, k, v).dtype == torch.float32


def test_the_callers_switches_do_not_reach_the_cpu() -> None:
    """Math attention would write the matrix of scores out."""
    q, k, v = qkv()
    expected = flash_attention(q, k, v)
    for backend in (SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION):
        with sdpa_kernel(backend):
            assert torch.equal(flash_attention(q, k, v), expected)


def test_autocast_leaves_fp64() -> None:
    q, k, v = (x.double() for x in qkv())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flash_attention(q, k, v).dtype == torch.float64


def test_a_window_beyond_all_lengths() -> None:
    q, k, v = qkv()
    for side in (2**31 - 1, sys.maxsize):
        found = flash_attention(q, k, v, window=(side, side), softcap=5.0)
        assert torch.equal(found, flash_attention(q, k, v, softcap=5.0))
    assert check_window((sys.maxsize, 3), causal=False) == (2**30, 3)


def test_strided_side_inputs() -> None:
    """What the kernels read one after the other is made so first."""
    q, k, v = (x[:1] for x in qkv())
    cu = torch.stack((CU, CU + 1), 1)[:, 0]
    sinks = torch.stack((torch.ones(4), torch.zeros(4)), 1)[:, 0]
    found = flash_attention(q, k, v, cu_seqlens_q=cu, sinks=sinks)
    assert torch.equal(found, flash_attention(q, k, v, cu_seqlens_q=CU, sinks=torch.ones(4)))
    assert all(x.is_contiguous() for x in check_packing(cu, None, q) if x is not None)
    assert check_sinks(sinks, 4, q.device).is_contiguous()


@given(
    st.builds(
        Numerics,
        probabilities=st.sampled_from([None, "bf16", "fp16", "fp32"]),
        row_sum=st.sampled_from(["bf16", "fp16", "fp32"]),
        rescale=st.sampled_from(["bf16", "fp16", "fp32"]),
        output_accumulator=st.sampled_from(["bf16", "fp16", "fp32"]),
        sum_after_cast=st.booleans(),
        reverse_keys=st.booleans(),
        block=st.none() | st.tuples(*2 * [st.sampled_from([16, 32, 64, 128, 256])]),
    )
)
def test_numerics_survive_being_written_down(numerics: Numerics) -> None:
    assert Numerics.decoded(numerics.encoded()) == numerics


def test_it_needs_no_triton() -> None:
    program = """
import torch, assay
q = torch.randn(1, 4, 32, 16, requires_grad=True)
out = assay.flash_attention(q, q, q, causal=True, window=(5, 0), softcap=3.0)
out.sum().backward()
print(out.shape == q.shape, q.grad.isfinite().all().item())
"""
    done = run_without({"triton", "flash_attn", "transformers", "rich", "typer"}, program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True"]


def test_the_provider_is_known_and_not_active() -> None:
    program = """
import torch, assay, assay.flash.provider
attention = torch.nn.attention
if hasattr(attention, "list_flash_attention_impls"):
    assert "assay" in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names() -> None:
    assert assay.flash_attention is flash_attention
    assert assay.scaled_dot_product_attention is scaled_dot_product_attention
