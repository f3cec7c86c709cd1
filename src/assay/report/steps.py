"""The steps of attention in plain words. (`assay.cases` defines them; a report must not import what it reports on.)"""

from __future__ import annotations

from typing import NamedTuple


class Step(NamedTuple):
    """How a step is called, written and explained."""

    label: str
    formula: str
    words: str
    part: str


_SCORES, _SOFTMAX, _OUTPUT, _BACKWARD = "scores", "softmax", "output", "backward"

STEPS: dict[str, Step] = {
    "inputs": Step("Inputs", "Q, K, V", "Q, K and V as they enter.", _SCORES),
    "scores": Step("Scores", "Q·Kᵀ", "Q·Kᵀ, as the dot product leaves it.", _SCORES),
    "scale": Step("Scaling", "× 1/√d", "The scores times the softmax scale.", _SCORES),
    "maximum": Step("Row maximum", "max", "The row maximum, of a block and running.", _SOFTMAX),
    "exponential": Step("Exponential", "exp(s − m)", "Score minus maximum, and its exponential (P).", _SOFTMAX),
    "row_sum": Step("Row sum", "Σ P", "The sum of P over a row, of a block and running.", _SOFTMAX),
    "rescale": Step("Rescaling", "exp(m − m′)", "What corrects earlier blocks when the maximum moves.", _SOFTMAX),
    "probabilities": Step("Probabilities", "P", "P as the P·V product takes it.", _OUTPUT),
    "accumulator": Step("Sums in products", "Σ aᵢbᵢ", "Partial sums inside every dot product.", _OUTPUT),
    "output_accumulator": Step("Running output", "O + P·V", "A block's P·V, its rescaling, and its sum.", _OUTPUT),
    "normalization": Step("Normalization", "O ÷ Σ P", "The division of the output by the row sum.", _OUTPUT),
    "output": Step("Output", "O", "The result as it leaves.", _OUTPUT),
    "log_sum_exp": Step("Log-sum-exp", "log Σ exp", "What forward leaves for backward, a number per row.", _BACKWARD),
    "recomputed": Step("P recomputed", "P", "P computed again for dS = P∘(dP − delta).", _BACKWARD),
    "delta": Step("Delta", "Σ dO∘O", "The row sums of dO∘O.", _BACKWARD),
    "dprobabilities": Step("dP", "dO·Vᵀ", "The gradient of P.", _BACKWARD),
    "dscores": Step("dS", "P∘(dP − δ)", "The gradient of the scores, as the products take it.", _BACKWARD),
    "dq": Step("dQ", "dQ", "The running dQ.", _BACKWARD),
    "dk": Step("dK", "dK", "The running dK.", _BACKWARD),
    "dv": Step("dV", "dV", "The running dV.", _BACKWARD),
}  # fmt: skip
"""In the order of the algorithm."""
PARTS = (_SCORES, _SOFTMAX, _OUTPUT, _BACKWARD)


def explain(step: str) -> Step:
    """The step in words; one that is not known is called by its name."""
    return STEPS.get(step) or Step(step.replace("_", " "), step, "", _OUTPUT)
