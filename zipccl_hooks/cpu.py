"""The codec on the CPU: payloads in and out of NumPy arrays of bits, several tiles at a time.

Byte-identical to reference.py. Work is cut at group boundaries and shared among a thread pool of
``torch.get_num_threads()`` workers; the kernels release the GIL. Importing this module imports Numba,
so the package does it when something is first encoded or decoded.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch

from . import _cpu_kernels as kernels
from .errors import CorruptPayload
from .format import GROUP, HEADER_BYTES, MODE_SPECS, TILE, Header, Layout, Mode

MIN_WORKER_BYTES = 256 * 1024  # tensor bytes per worker, below which handing over does not pay

Array = np.ndarray[Any, Any]


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="zipccl-codec")


def _each(function: Callable[..., Any], calls: list[tuple[Any, ...]]) -> list[Any]:
    if len(calls) == 1:
        return [function(*calls[0])]
    return list(_pool().map(lambda call: function(*call), calls))


def _ranges(first: int, last: int, itemsize: int) -> list[tuple[int, int]]:
    """Cuts tiles ``first`` to ``last - 1`` at group boundaries into a range per worker, none empty."""
    size = (last - first) * TILE * itemsize
    groups = -(-(last - first) // GROUP)
    workers = max(1, min(torch.get_num_threads(), size // MIN_WORKER_BYTES, groups))
    cuts = [first + GROUP * (groups * k // workers) for k in range(workers)]
    return list(zip(cuts, [*cuts[1:], last], strict=True))


@cache
def _kernel_spec(exponent_bits: int, mode: Mode) -> tuple[tuple[int, ...], Array]:
    spec = MODE_SPECS[mode]
    numbers = (exponent_bits, spec.code_bits, spec.level_bits, spec.levels, spec.top_16ths, spec.zero_min)
    return numbers, np.array(spec.order, np.int64)


def _sections(payload: Array, lay: Layout) -> tuple[Array, Array, Array, Array]:
    """(meta, bases, codes, residual) of a payload that starts on 4 bytes."""
    groups = -(-lay.num_tiles // GROUP)
    return (
        payload[lay.meta :][: 4 * lay.num_tiles].view(np.uint32),
        payload[lay.bases :][: 4 * groups].view(np.uint32),
        payload[lay.codes : lay.residual].view(np.uint32),
        payload[lay.residual : lay.tail],
    )


def checksum(data: Array) -> int:
    """Checksum of a tensor's bytes (uint8, starting on 4 bytes), as format.py defines it."""
    words = data[: len(data) // 4 * 4].view(np.uint32)
    ranges = _ranges(0, -(-len(words) // TILE), 4)
    parts = [(words[TILE * a : TILE * b], TILE * a) for a, b in ranges]
    total = sum(int(part) for part in _each(kernels.checksum_words, parts))
    if rest := data[4 * len(words) :].tobytes():
        last = np.array([int.from_bytes(rest, "little")], np.uint32)
        total += int(kernels.checksum_words(last, len(words)))
    return total & 0xFFFFFFFF


def encode(bits: Array, lay: Layout, payload: Array) -> int:
    """Writes the payload of ``bits`` (uint8, uint16 or uint32, flat) and returns its size in bytes.

    ``payload`` is uint8, starts on 4 bytes and holds at least ``lay.max_bytes``; nothing is written
    past the returned size. The header's shape is ``(numel,)``, and it has
    no checksum.
    """
    data = bits.view(np.uint8)
    dynamic_bytes = 0
    if lay.mode == Mode.RAW:
        payload[HEADER_BYTES : lay.static_bytes] = data
    else:
        dynamic_bytes = _encode_tiles(bits, lay, payload)
        tail = data[lay.num_tiles * TILE * lay.dtype.itemsize :]
        payload[lay.tail :][: len(tail)] = tail
        payload[lay.tail + len(tail) : lay.static_bytes] = 0
    header = Header(lay.dtype, lay.mode, lay.numel, dynamic_bytes, (lay.numel,))
    payload[:HEADER_BYTES] = np.frombuffer(header.pack(), np.uint8)
    return lay.static_bytes + dynamic_bytes


def _encode_tiles(bits: Array, lay: Layout, payload: Array) -> int:
    meta, bases, *_ = sections = _sections(payload, lay)
    payload[lay.meta + meta.nbytes : lay.bases] = 0
    payload[lay.bases + bases.nbytes : lay.codes] = 0
    if not lay.num_tiles:
        return 0
    dtype, dynamic = lay.dtype, payload[lay.static_bytes : lay.max_bytes]
    spec, order = _kernel_spec(dtype.exponent_bits, lay.mode)
    chunk = lay.max_dynamic_bytes // lay.num_tiles
    ranges = _ranges(0, lay.num_tiles, dtype.itemsize)
    # The first worker's chunks are in place already; the others' follow once their sizes are known.
    parts = [dynamic, *(np.empty((b - a) * chunk, np.uint8) for a, b in ranges[1:])]
    fixed = (lay.num_tiles, dtype.low_bits, dtype.residual_bits, spec, order, *sections)
    calls = [(bits, a, b, *fixed, part) for (a, b), part in zip(ranges, parts, strict=True)]
    sizes = _each(kernels.encode_tiles, calls)
    end = sizes[0]
    for (a, b), part, size in list(zip(ranges, parts, sizes, strict=True))[1:]:
        bases[a // GROUP : -(-b // GROUP)] += end // 4
        dynamic[end : end + size] = part[:size]
        end += size
    return end


def decode(payload: Array, lay: Layout, out: Array, start: int = 0) -> None:
    """Decodes elements ``start`` to ``start + len(out) - 1`` of a payload into ``out``, their bits.

    ``payload`` is exactly one payload whose header was checked, and starts on 4 bytes. ``start`` is a
    multiple of a group's 8192 elements; the end is a multiple of 1024 or the end of the tensor.
    Raises CorruptPayload where the dynamic part contradicts the static part.
    """
    dtype, stop = lay.dtype, start + len(out)
    first, last = start // TILE, min(stop // TILE, lay.num_tiles)
    if first < last:
        spec, order = _kernel_spec(dtype.exponent_bits, lay.mode)
        fixed = (lay.num_tiles, dtype.low_bits, dtype.residual_bits, spec, order)
        sections = (*_sections(payload, lay), payload[lay.static_bytes :])
        calls = [
            (out[a * TILE - start : b * TILE - start], a, b, *fixed, *sections)
            for a, b in _ranges(first, last, dtype.itemsize)
        ]
        if not all(_each(kernels.decode_tiles, calls)):
            raise CorruptPayload("payload: the dynamic part contradicts the static part")
    plain = max(start, lay.num_tiles * TILE)
    if plain < stop:
        source = payload[lay.tail + (plain - lay.num_tiles * TILE) * dtype.itemsize :]
        target = out[plain - start :].view(np.uint8)
        target[:] = source[: len(target)]
