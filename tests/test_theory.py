"""The paper's window and bit counts: recomputed by other means, and the constants of MODE_SPECS."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest
import torch
from corpus import BITS, CODED, known, name_of

from zipccl_hooks import theory
from zipccl_hooks.format import DTYPES, MODE_SPECS, Mode

BF16 = DTYPES["bfloat16"]
MODES = pytest.mark.parametrize("mode", [Mode.FAST, Mode.DENSE], ids=["fast", "dense"])


def test_doctests() -> None:
    results = doctest.testmod(theory)
    assert results.attempted and not results.failed


@pytest.mark.parametrize("dtype", CODED, ids=name_of)
@pytest.mark.parametrize("sigma", [1e-6, 0.02, 1.3, 3e4])
def test_field_probabilities_match_a_histogram(dtype: torch.dtype, sigma: float) -> None:
    """Subnormals, overflow and rounding up to the next binade included: fp8 shows all three."""
    numel = 400_000
    x = torch.randn(numel, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * sigma
    pattern = x.float().to(dtype).view(BITS[dtype.itemsize]).numpy().astype(np.int64)
    shift = 8 * dtype.itemsize - 1 - known(dtype).exponent_bits
    num_fields = 2 ** known(dtype).exponent_bits
    found = np.bincount(pattern >> shift & (num_fields - 1), minlength=num_fields) / numel
    expected = np.array(theory.field_probabilities(sigma, known(dtype)))
    assert len(expected) == num_fields and expected.sum() == pytest.approx(1)
    # Five standard deviations of a count, and one for the fields that should be empty.
    assert np.all(np.abs(found - expected) <= 5 * np.sqrt(expected / numel) + 1 / numel)


@pytest.mark.parametrize("log2_sigma", np.arange(-3, 3, 0.13).tolist(), ids=lambda v: f"{v:+.2f}")
def test_window_moves_up_once_an_octave(log2_sigma: float) -> None:
    k = math.floor(log2_sigma)
    first = k - 5 if log2_sigma - k < theory.window_switch() else k - 4
    assert theory.window(2.0**log2_sigma) == range(first, first + 7)


def test_window_switch_is_where_both_ends_are_equally_likely() -> None:
    """P(floor(log2 |X|) = -5) = P(floor(log2 |X|) = 2), solved here on a grid."""
    grid = np.linspace(0, 1, 100_001)
    scaled = 2**grid * math.sqrt(2)
    erf = np.vectorize(math.erf)
    below = erf(2.0**-4 / scaled) - erf(2.0**-5 / scaled)
    above = erf(8 / scaled) - erf(4 / scaled)
    assert theory.window_switch() == pytest.approx(grid[np.argmin(np.abs(below - above))], abs=2e-5)
    assert theory.window_switch() == pytest.approx(0.7196, abs=5e-5)


def test_coverage_of_seven_exponents_is_what_the_paper_says() -> None:
    covered = [theory.coverage(sigma, BF16) for sigma in theory.octave()]
    assert 0.9697 < min(covered) < 0.97 and 0.978 < max(covered) < 0.979
    assert theory.coverage(0.02, BF16, 256) == pytest.approx(1)


@pytest.mark.parametrize("sigma", [0.011, 0.02, 1.0, 7.3])
def test_coverage_is_that_of_the_window(sigma: float) -> None:
    window, p = theory.window(sigma), theory.field_probabilities(sigma, DTYPES["float32"])
    assert theory.coverage(sigma, DTYPES["float32"]) == pytest.approx(sum(p[e + 127] for e in window))


def test_mean_exponent_gives_sigma_away() -> None:
    offsets = [
        theory.mean_exponent(theory.field_probabilities(sigma, DTYPES["float32"]))[0] - 127 - math.log2(sigma)
        for sigma in theory.octave()
    ]
    exact = -(0.5772156649 + math.log(2)) / (2 * math.log(2)) - 0.5
    assert exact == pytest.approx(-1.416, abs=5e-4)
    assert sum(offsets) / len(offsets) == pytest.approx(exact, abs=1e-4)


def test_mean_exponent_leaves_zeros_out() -> None:
    assert theory.mean_exponent([0.5, 0, 0.25, 0, 0.25]) == (3, 1)
    assert theory.mean_exponent([1.0, 0.0]) == (0, 0)


@MODES
def test_top_16ths_is_the_optimum(mode: Mode) -> None:
    assert theory.best_top_16ths(mode) == MODE_SPECS[mode].top_16ths


@MODES
def test_zero_min_is_near_the_optimum(mode: Mode) -> None:
    first, *_, unranked = theory.rank_bits(mode)
    off = abs(theory.best_zero_min(mode) - MODE_SPECS[mode].zero_min)
    assert off * (unranked - first) <= 40  # bits, of a tile's 1024 * 2.6 at least


@pytest.mark.parametrize(("mode", "bits"), [(Mode.FAST, 3.0984), (Mode.DENSE, 2.6477)], ids=["fast", "dense"])
def test_mean_code_bits_over_an_octave(mode: Mode, bits: float) -> None:
    """Beside the entropy of 2.544; test_cpu compares with payloads."""
    octave = [theory.field_probabilities(sigma, BF16) for sigma in theory.octave()]
    assert sum(theory.code_bits(p, mode) for p in octave) / len(octave) == pytest.approx(bits, abs=1e-4)
    entropy = sum(theory.entropy_bits(sigma, BF16) for sigma in theory.octave()) / len(octave)
    assert entropy == pytest.approx(2.544, abs=5e-4)


@MODES
def test_exponent_bits_counts_the_first_rank_of_an_exponent(mode: Mode) -> None:
    """With top = 2, exponent 0 has a rank by itself; the ZERO flag gives it the first."""
    certain = [1.0] + [0.0] * 255
    first, *_ = theory.rank_bits(mode)
    assert theory.exponent_bits(certain, mode, top=2, zero=True) == first
    assert theory.exponent_bits(certain, mode, top=2) == first  # rank 2 is on level 1 as well
    assert theory.exponent_bits(certain, mode, top=100) == theory.rank_bits(mode)[-1]


def test_expected_bits_of_an_ordinary_tensor() -> None:
    """By hand for a constant exponent: code plane, residual, low bits, meta, base."""
    metadata = 32 / 1024 + 32 / 8192
    tiny = 2.0**-60  # rounds to field 0 in fp8
    assert theory.expected_bits(tiny, DTYPES["float8_e5m2"], Mode.FAST) == pytest.approx(3 + 3 + metadata)
    assert theory.expected_bits(tiny, DTYPES["float8_e4m3fn"], Mode.DENSE) == pytest.approx(2 + 4 + metadata)
    bf16 = theory.expected_bits(0.02, BF16, Mode.FAST)
    assert theory.expected_bits(0.02, DTYPES["float32"], Mode.FAST) == pytest.approx(bf16 + 16, rel=1e-3)
    assert theory.expected_ratio(0.02, BF16, Mode.FAST) == pytest.approx(16 / bf16)
    assert theory.expected_bits(0.02, DTYPES["int64"], Mode.RAW) == 64
