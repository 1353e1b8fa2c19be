"""Why a few exponents are enough: the paper's window, and the bits that a Gaussian tensor takes.

Training tensors are close to X ~ N(0, sigma^2), so the exponent field of X in a dtype is known from sigma::

    P(field < e) = P(|X| < t_e) = erf(t_e / (sigma sqrt 2)),    t_e = 2^(e - bias) (1 - half an ulp below it)

Field 0 holds zeros and subnormals, the topmost field also what overflows.

**Window.** With k = floor(log2 sigma), the seven likeliest values of floor(log2 |X|) are [k-5, k+1] where
log2 sigma - k is below ``window_switch()`` = 0.7196, and [k-4, k+2] above it; they hold 97 to 98 %.

**From the mean exponent instead.** E[log2 |X|] = log2 sigma - (gamma + ln 2) / (2 ln 2) = log2 sigma - 0.916,
and rounding down takes another half on average over an octave: the mean exponent is log2 sigma - 1.416 and so
gives sigma away. It costs one integer addition per element and, unlike a sum of squares, is not led astray by
one huge element. A tile of 1024 estimates it to within std(exponent) / 32, about 0.05.

**The constants of MODE_SPECS.** A tile's ``top`` is floor(mean + c / 16). ``best_top_16ths`` finds the c that
takes the fewest bits, averaged over log2 sigma uniform in an octave: 43 in fast (3.098 bits per exponent)
and 30 in dense (2.648), where the entropy is 2.544. The ZERO flag moves every other exponent down a rank and
saves zeros the path to the last level. ``best_zero_min`` is the number of zeros in a tile from which that
pays. It varies with sigma, 6 to 9 in fast and 27 to 42 in dense, and each zero more or less is worth some 12
of a tile's 3000 bits, so that ``zero_min`` (8 and 35) need not be exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

from . import plot
from .format import DTYPES, GROUP, MODE_SPECS, TILE, DType, Mode

OCTAVE_STEPS = 48  # values of sigma over which an average over one octave is taken
BF16 = DTYPES["bfloat16"]  # has a field for every exponent of ordinary tensors: the dtype of the constants


def field_probabilities(sigma: float, dtype: DType) -> list[float]:
    """P(exponent field = e) for e = 0, 1, ... of N(0, sigma^2) rounded to nearest in ``dtype``."""
    num_fields = 2**dtype.exponent_bits
    bias = num_fields // 2 - 1
    mantissa_bits = dtype.residual_bits - 1 + dtype.low_bits
    below = [0.0]
    for e in range(1, num_fields):
        # What lies less than half an ulp below 2^(e - bias) is rounded up to it; subnormals have the
        # ulp of the first binade.
        half_ulp = 2.0 ** -(mantissa_bits + (1 if e == 1 else 2))
        below.append(math.erf(2.0 ** (e - bias) * (1 - half_ulp) / (sigma * math.sqrt(2))))
    return [b - a for a, b in zip(below, [*below[1:], 1.0], strict=True)]


def entropy(probabilities: Sequence[float]) -> float:
    """Bits; of exponent fields, the bound for any code of single exponents."""
    return sum(-p * math.log2(p) for p in probabilities if p > 0)


def window_probability(probabilities: Sequence[float], width: int = 7) -> float:
    """Probability of the likeliest ``width`` neighbouring exponent fields."""
    p = probabilities
    return max(sum(p[e : e + width]) for e in range(max(1, len(p) - width + 1)))


def entropy_bits(sigma: float, dtype: DType) -> float:
    """``entropy`` of the exponent field of N(0, sigma^2)."""
    return entropy(field_probabilities(sigma, dtype))


def coverage(sigma: float, dtype: DType, width: int = 7) -> float:
    """``window_probability`` of N(0, sigma^2)."""
    return window_probability(field_probabilities(sigma, dtype), width)


def window(sigma: float, width: int = 7) -> range:
    """The likeliest ``width`` neighbouring values of floor(log2 |X|), if exponents had no bounds."""
    k = math.floor(math.log2(sigma))
    # P(2^a <= |X| < 2^b) as a difference of erf, over every window that could be the best.
    held = {
        low: math.erf(2.0 ** (low + width) / (sigma * math.sqrt(2)))
        - math.erf(2.0**low / (sigma * math.sqrt(2)))
        for low in range(k - width - 1, k + 3)
    }
    low = max(held, key=held.__getitem__)
    return range(low, low + width)


def window_switch(width: int = 7) -> float:
    """The fraction of log2 sigma from which the best window lies one exponent higher.

    There the exponent that leaves below is as likely as the one that enters above; the former's
    probability falls with sigma and the latter's grows, so bisection finds it.
    """
    low, high, first = 0.0, 1.0, window(1.0, width)
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if window(2.0**middle, width) == first else (low, middle)
    return high


def mean_exponent(probabilities: Sequence[float]) -> tuple[float, float]:
    """(mean, standard deviation) of the exponent fields that are not 0; (0, 0) if all are."""
    total = sum(probabilities[1:])
    if not total:
        return 0.0, 0.0
    mean = sum(e * p for e, p in enumerate(probabilities) if e) / total
    variance = sum((e - mean) ** 2 * p for e, p in enumerate(probabilities) if e) / total
    return mean, math.sqrt(variance)


@cache
def rank_bits(mode: Mode) -> tuple[int, ...]:
    """Bits of an exponent by rank, and last of an exponent without a rank.

    >>> rank_bits(Mode.DENSE)
    (2, 2, 2, 4, 4, 4, 6, 6, 6, 8, 8, 8, 16)
    """
    spec = MODE_SPECS[mode]
    bits = [spec.code_bits] * (2**spec.code_bits - 1)
    for level in range(1, spec.levels):
        bits += [spec.code_bits + level * spec.level_bits] * (2**spec.level_bits - 1)
    return (*bits, bits[-1] + 8)


def exponent_bits(probabilities: Sequence[float], mode: Mode, top: int, zero: bool = False) -> float:
    """Expected bits of one exponent in a tile with this ``top``, with the ZERO flag or without."""
    *by_rank, unranked = rank_bits(mode)
    order = [(top - d) % 256 for d in MODE_SPECS[mode].order]
    ranked = [0, *order][: len(order)] if zero else order
    bits = dict(zip(reversed(ranked), reversed(by_rank), strict=True))  # an exponent's first rank counts
    return sum(p * bits.get(e, unranked) for e, p in enumerate(probabilities))


def top_probabilities(probabilities: Sequence[float], top_16ths: int) -> list[tuple[int, float]]:
    """(top, its probability), the mean over the nonzero elements of a tile being nearly normal."""
    mean, std = mean_exponent(probabilities)
    shifted = mean + top_16ths / 16
    if not std:
        return [(math.floor(shifted), 1.0)]
    noise = std / math.sqrt(TILE * (1 - probabilities[0]))
    tops = range(math.floor(shifted - 6 * noise), math.floor(shifted + 6 * noise) + 1)
    at_most = [(1 + math.erf((top + 1 - shifted) / (noise * math.sqrt(2)))) / 2 for top in tops[:-1]]
    return [(top, b - a) for top, a, b in zip(tops, [0.0, *at_most], [*at_most, 1.0], strict=True)]


def code_bits(probabilities: Sequence[float], mode: Mode, top_16ths: int | None = None) -> float:
    """Expected bits of one exponent, over the tops and ZERO flags that a tile of 1024 may get."""
    spec, p0 = MODE_SPECS[mode], probabilities[0]
    top_16ths = spec.top_16ths if top_16ths is None else top_16ths
    few_zeros = sum(math.comb(TILE, n) * p0**n * (1 - p0) ** (TILE - n) for n in range(spec.zero_min))
    return sum(
        weight * p_flag * exponent_bits(probabilities, mode, top % 256, zero)
        for top, weight in top_probabilities(probabilities, top_16ths)
        for zero, p_flag in ((False, few_zeros), (True, 1 - few_zeros))
    )


def expected_bits(sigma: float, dtype: DType, mode: Mode) -> float:
    """Bits of a payload per element of a long tensor of N(0, sigma^2), header left out."""
    if mode == Mode.RAW:
        return 8.0 * dtype.itemsize
    metadata = 32 / TILE + 32 / (GROUP * TILE)
    return (
        code_bits(field_probabilities(sigma, dtype), mode) + dtype.residual_bits + dtype.low_bits + metadata
    )


def expected_ratio(sigma: float, dtype: DType, mode: Mode) -> float:
    """Size of the tensor over the size of its payload."""
    return 8 * dtype.itemsize / expected_bits(sigma, dtype, mode)


def octave(steps: int = OCTAVE_STEPS) -> list[float]:
    """Values of sigma with log2 sigma uniform in one octave."""
    return [2.0 ** ((k + 0.5) / steps) for k in range(steps)]


def best_top_16ths(mode: Mode) -> int:
    """The ``ModeSpec.top_16ths`` that takes the fewest bits, averaged over an octave of sigma."""
    tensors = [field_probabilities(sigma, BF16) for sigma in octave()]
    return min(range(16, 64), key=lambda c: sum(code_bits(p, mode, c) for p in tensors))


def best_zero_min(mode: Mode) -> int:
    """The ``ModeSpec.zero_min`` from which the ZERO flag takes fewer bits, averaged over an octave.

    With z zeros it saves (bits of no rank - bits of the first) z and costs ``loss`` (1024 - z), where
    ``loss`` is what a nonzero exponent takes more, one rank further down.
    """
    loss = 0.0
    for sigma in octave():
        p = field_probabilities(sigma, BF16)
        for top, weight in top_probabilities(p, MODE_SPECS[mode].top_16ths):
            loss += weight * (exponent_bits(p, mode, top, True) - exponent_bits(p, mode, top)) / OCTAVE_STEPS
    first, *_, unranked = rank_bits(mode)
    return math.ceil(TILE * loss / (unranked - first + loss))


# What docs/theory.md shows


def shown_text(steps: int = 12) -> str:
    """Rows for sigma from 2^-6 to 2^-5, bf16: what the window holds, entropy, ratios, their limit."""
    lines = ["   sigma  7 exponents  entropy   fast  dense  limit"]
    for step in range(steps + 1):
        sigma = 2.0 ** (step / steps - 6)
        entropy = entropy_bits(sigma, BF16)
        fast, dense = (expected_ratio(sigma, BF16, mode) for mode in (Mode.FAST, Mode.DENSE))
        limit = 8 * BF16.itemsize / (entropy + BF16.residual_bits)
        lines.append(
            f"{sigma:8.5f}{coverage(sigma, BF16):13.4f}{entropy:9.3f}{fast:7.3f}{dense:7.3f}{limit:7.3f}"
        )
    return "\n".join(lines)


def figure() -> Any:
    """The same as a matplotlib Figure, beside the exponents of one sigma and its window."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(11, 4), layout="constrained")
    exponents, held, ratios = drawn.subplots(1, 3)
    sigma, bias = 0.02, 127
    p = field_probabilities(sigma, BF16)
    inside = [e + bias for e in window(sigma)]
    fields = range(inside[0] - 5, inside[-1] + 3)
    colours = ["tab:blue" if e in inside else "lightgray" for e in fields]
    exponents.bar([e - bias for e in fields], [p[e] for e in fields], color=colours)
    exponents.set(title=f"sigma = {sigma}, its window in blue", xlabel="floor(log2 |x|)")
    exponents.set(ylabel="probability", xticks=[e - bias for e in fields][::3])
    sigmas = [2.0 ** (k / 24 - 8) for k in range(24 * 4 + 1)]
    for width, style in ((7, "-"), (3, "--")):
        held.plot(sigmas, [coverage(s, BF16, width) for s in sigmas], style, label=f"{width} exponents")
    held.set(title="what a window holds", xlabel="sigma")
    held.legend()
    entropies = [entropy_bits(s, BF16) for s in sigmas]
    ratios.plot(sigmas, [16 / (e + 8) for e in entropies], ":", color="black", label="limit")
    for mode in (Mode.DENSE, Mode.FAST):
        ratios.plot(sigmas, [expected_ratio(s, BF16, mode) for s in sigmas], label=mode.name.lower())
    ratios.set(title="ratio of bf16", xlabel="sigma")
    ratios.legend()
    for axes in (held, ratios):
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
    return drawn


if __name__ == "__main__":
    plot.command("What the theory says of Gaussian bf16.", shown_text, figure)
