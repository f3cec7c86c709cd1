from __future__ import annotations

from assay.bench.findings import findings
from tests.bench.samples import point


def test_speedups_by_length_beside_the_literature() -> None:
    points = [
        point({"assay": [0.002], "SDPA cuDNN": [0.001], "standard": [0.0018]}),
        point({"assay": [0.002], "SDPA cuDNN": [0.001], "standard": [0.0025]}, length=2048),
        point({"assay": [0.002], "SDPA cuDNN": [0.001], "standard": [0.0025]}, length=4096),
    ]
    told = findings(points, on_gpu=True)[0]
    assert "D 128" in told
    assert "1.8× at 512 (the literature: 1.5×), 2.5× at 2048 (the literature: 2×), 2.5× at 4096." in told
    assert "literature" not in findings(points, on_gpu=False)[0]


def test_where_flash_does_not_help() -> None:
    points = [
        point({"assay": [0.001], "standard": [0.002]}),
        point({"assay": [0.001], "SDPA cuDNN": [0.002], "standard": [0.00102]}, queries=1),
    ]
    lines = [line for line in findings(points, on_gpu=True) if "does not help" in line]
    assert lines == [
        "Flash does not help at 1 query against 512 keys (D 128), forward: the fastest, assay, is 1.02× as fast as "
        "standard attention."
    ]
    points[1].figures[0].graph_samples.append(0.0001)
    points[1].figures[2].graph_samples.append(0.0003)
    assert "3.00× as CUDA graphs" in next(line for line in findings(points, on_gpu=True) if "not help" in line)


def test_where_it_always_helps() -> None:
    points = [
        point({"assay": [0.001], "standard": [0.002]}),
        point({"assay": [0.001], "standard": [0.0015]}, length=64, which="forward+backward"),
    ]
    told = "\n".join(findings(points, on_gpu=True))
    assert "faster than standard attention at every shape measured; least at N 64 (D 128), forward and backward" in told
    assert "does not help" not in told


def test_how_ours_stands() -> None:
    even = point({"assay": [1.0], "SDPA cuDNN": [0.98], "standard": [2.0]})
    told = findings([even], on_gpu=True)[-1]
    assert told == "assay is nowhere slower than the best other, within 3%; least at N 512 (D 128), forward: 0.98×."
    slower = point({"assay": [1.0], "SDPA cuDNN": [0.5], "standard": [2.0]}, length=64)
    told = findings([even, slower], on_gpu=True)[-1]
    assert told == "Forward, assay is slower than the best other: 0.50× the speed of SDPA cuDNN at N 64 (D 128)."


def test_an_unsteady_machine_is_named() -> None:
    made = point({"assay": [1.0, 1.1], "standard": [2.0, 4.0]})
    told = findings([made], on_gpu=False)[-1]
    assert told.startswith("1 of 2 figures moved by more than 20% from round to round, at most 2.0×")


def test_without_measurements_nothing_is_said() -> None:
    assert findings([], on_gpu=True) == []
    assert findings([point({"assay": [], "standard": []})], on_gpu=True) == []
    assert findings([point({"assay": [1.0]})], on_gpu=False) == []
    assert len(findings([point({"SDPA cuDNN": [1.0], "standard": [2.0]})], on_gpu=False)) == 2
