"""The decoding and adding kernel of reductions: one warp a tile, every source in turn, one write."""

from __future__ import annotations

from typing import Any

from ..format import GROUP, MODE_SPECS, TILE, DType, Mode, longest_chunk
from . import ACCUMULATE_WIDE, MAX_SOURCES, SCALED, TARGET_WIDE, THREADS
from ._exponents import STRIDE, WARP_WORDS
from ._frame import kind_word, read_frame
from ._jit import (
    add_f32,
    cuda,
    device,
    end_group,
    load_1_ordered,
    load_4_ordered,
    load_half_ordered,
    multiply_f32,
    pack_bf16,
    pack_f16,
    prefetch,
    prmt,
    shared_address,
    shared_load_4,
    shared_store_4,
    store_1,
    store_4,
    store_half,
    u32,
    u64,
    unpack_f16,
    wait_all_but_1,
    wait_all_but_2,
)  # fmt: skip
from ._low_bits import LOWS_WORDS
from ._tile import make_tile_decoder

MINUS_ZERO = 0x80000000  # the sum of nothing: adding it changes no number, not even -0.0


@device
def write_entry(table, k, address, size, spill):
    """Puts a source into the table, which a loop can index where it cannot index arguments."""
    at = u32(table + u32(32 * k))
    shared_store_4(at, u32(address), u32(address >> u64(32)), u32(size), u32(size >> u64(32)))
    shared_store_4(u32(at + u32(16)), u32(spill), u32(spill >> u64(32)), u32(0), u32(0))


@device
def two_addresses(at):
    w0, w1, w2, w3 = shared_load_4(at)
    return u64(u64(w0) | u64(u64(w1) << u64(32))), u64(u64(w2) | u64(u64(w3) << u64(32)))


@device
def read_entry(table, source):
    at = u32(table + u32(source << u32(5)))
    address, size = two_addresses(at)
    spill, _ = two_addresses(u32(at + u32(16)))
    return address, size, spill


def make(dtype: DType, mode: Mode) -> Any:
    """The kernel for bfloat16, float16 or float32 and a mode.

    Launch: max(1, groups of tiles) blocks of THREADS. Arguments, all 64 bits: for MAX_SOURCES sources
    their addresses (on 16 bytes), then the sizes of the buffers they start, 0 where the source is a plain
    tensor, then the addresses of their spill areas (rest.py) or 0; how many there are; offsets of a
    payload's sections in bytes (meta, bases, codes, residual, tail, dynamic); address of what is added
    first, or 0; address of the target; flags (ACCUMULATE_WIDE, TARGET_WIDE: those two are fp32 whatever the
    dtype; SCALED); the bits of the fp32 scale; numel; address of a u32 that is set to 1 where source 0
    contradicts itself, and bytes from there to that of the next source. Reads every source once and writes
    the target once, which may be one of the plain tensors.

    Invariant: element i of the target is ``round(((first + s0 * scale) + s1 * scale) + ...)``, products
    rounded to the dtype, sums in fp32 in the order of the sources, whatever else runs. A lane keeps the
    sums of its 32 elements in registers while it goes through the sources.

    Example, bf16: sources 1.0 and 2**-9: 1.001953125 in fp32, written as 1.0 (ties to even).
    """
    ITEM, LOW, KIND = dtype.itemsize, dtype.low_bits, kind_word(dtype, mode)
    LONGEST_CHUNK = longest_chunk(dtype, mode)
    FP16 = dtype.name == "float16"
    fetch_codes, fetch_residuals, locate, decode_tile, load_rest, load_exponents, join_octet, load_lows = (
        make_tile_decoder(dtype, mode)
    )
    # Words of shared memory: of eight warps the exponents, two code planes, a residual plane, low halves, and
    # where a warp finds the sources' chunks, eight words a source; the table of sources, likewise.
    CODES = TILE // 32 * MODE_SPECS[mode].code_bits
    RESIDUALS, LOWS = TILE // 4, LOWS_WORDS if LOW else 0
    PLACES = (WARP_WORDS + 2 * CODES + RESIDUALS + LOWS) * GROUP
    TABLE = PLACES + 8 * MAX_SOURCES * GROUP
    SHARED_WORDS = TABLE + 8 * MAX_SOURCES

    @cuda.jit(device=True, inline="always")
    def widen(pair):
        """The two fp32 numbers of a register of 16-bit floats."""
        if FP16:
            return unpack_f16(pair)
        return u32(pair << u32(16)), u32(pair & u32(0xFFFF0000))

    @cuda.jit(device=True, inline="always")
    def narrow(low, high):
        if FP16:
            return pack_f16(low, high)
        return pack_bf16(low, high)

    @cuda.jit(device=True, inline="always")
    def add_four(sums, k, w0, w1, w2, w3, flags, scale):
        """Adds elements k to k + 3 of a lane, given as fp32, times the scale."""
        if u32(flags & u32(SCALED)) != u32(0):
            w0, w1 = multiply_f32(w0, scale), multiply_f32(w1, scale)
            w2, w3 = multiply_f32(w2, scale), multiply_f32(w3, scale)
            if not LOW:
                w0, w1 = widen(narrow(w0, w1))
                w2, w3 = widen(narrow(w2, w3))
        sums[k], sums[k + 1] = add_f32(sums[k], w0), add_f32(sums[k + 1], w1)
        sums[k + 2], sums[k + 3] = add_f32(sums[k + 2], w2), add_f32(sums[k + 3], w3)

    @cuda.jit(device=True, inline="always")
    def to_f32(pair, low_halves):
        """The two fp32 numbers of a register of two elements, of fp32 their upper halves."""
        if LOW:
            return prmt(low_halves, pair, u32(0x5410)), prmt(low_halves, pair, u32(0x7632))
        return widen(pair)

    @cuda.jit(device=True, inline="always")
    def add_octet(sums, g, a, b, c, d, l0, l1, l2, l3, flags, scale):
        w0, w1 = to_f32(a, l0)
        w2, w3 = to_f32(b, l1)
        add_four(sums, 8 * g, w0, w1, w2, w3, flags, scale)
        w0, w1 = to_f32(c, l2)
        w2, w3 = to_f32(d, l3)
        add_four(sums, 8 * g + 4, w0, w1, w2, w3, flags, scale)

    @cuda.jit(device=True, inline="always")
    def add_tile(sums, mine, residuals, halves, lane, rest, lows, flags, scale):
        for half in range(2):
            e0, e1, e2, e3 = load_exponents(mine, half)
            a, b, c, d = join_octet(2 * half, e0, e1, residuals, lane, rest)
            l0, l1, l2, l3 = load_lows(halves, 2 * half, lane, lows)
            add_octet(sums, 2 * half, a, b, c, d, l0, l1, l2, l3, flags, scale)
            a, b, c, d = join_octet(2 * half + 1, e2, e3, residuals, lane, rest)
            l0, l1, l2, l3 = load_lows(halves, 2 * half + 1, lane, lows)
            add_octet(sums, 2 * half + 1, a, b, c, d, l0, l1, l2, l3, flags, scale)

    @cuda.jit(device=True, inline="always")
    def add_plain(sums, at, wide, flags, scale):
        """Adds a lane's elements of a plain tile."""
        for g in range(4):
            if LOW or wide:
                for h in range(2):
                    w0, w1, w2, w3 = load_4_ordered(at + u64(1024 * g + 16 * h))
                    add_four(sums, 8 * g + 4 * h, w0, w1, w2, w3, flags, scale)
            else:
                a, b, c, d = load_4_ordered(at + u64(512 * g))
                add_octet(sums, g, a, b, c, d, u32(0), u32(0), u32(0), u32(0), flags, scale)

    @cuda.jit(device=True, inline="always")
    def store_sums(sums, at, wide):
        for g in range(4):
            if LOW or wide:
                for h in range(2):
                    k = 8 * g + 4 * h
                    store_4(at + u64(1024 * g + 16 * h), sums[k], sums[k + 1], sums[k + 2], sums[k + 3])
            else:
                k = 8 * g
                store_4(
                    at + u64(512 * g),
                    narrow(sums[k], sums[k + 1]),
                    narrow(sums[k + 2], sums[k + 3]),
                    narrow(sums[k + 4], sums[k + 5]),
                    narrow(sums[k + 6], sums[k + 7]),
                )

    @cuda.jit(device=True, inline="always")
    def find_source(
        table, places, source, meta, bases, dynamic, numel, num_tiles, tile, corrupt, corrupt_step
    ):  # fmt: skip
        """Writes a source's place: addresses of it, of a tile's chunk (0: plain), of the end; meta word."""
        payload, size, spill = read_entry(table, source)
        at, limit, word = u64(0), u64(0), u32(0)
        if size != u64(0):
            begin, limit, foreign = read_frame(
                payload, size, dynamic, KIND, numel, spill, num_tiles * u64(LONGEST_CHUNK)
            )
            word, at, bad = locate(payload, meta, bases, tile, begin, limit)
            if at < limit:
                prefetch(at)
            if u32(bad | foreign) != u32(0):
                store_1(corrupt + u64(source) * corrupt_step, u32(1))
        place = u32(places + u32(source << u32(5)))
        shared_store_4(place, u32(payload), u32(payload >> u64(32)), u32(at), u32(at >> u64(32)))
        shared_store_4(u32(place + u32(16)), u32(limit), u32(limit >> u64(32)), word, u32(0))

    @cuda.jit(device=True, inline="always")
    def start_codes(entry, plane, codes, tile, lane):
        """Starts to fetch a source's code plane, if it is a payload."""
        payload, size = two_addresses(entry)
        if size != u64(0):
            fetch_codes(plane, payload, codes, tile, lane)

    @cuda.jit(device=True, inline="always")
    def start_residuals(entry, residuals, residual, tile, lane):
        payload, size = two_addresses(entry)
        if size != u64(0):
            fetch_residuals(residuals, payload, residual, tile, lane)

    @cuda.jit(device=True, inline="always")
    def load_element(at, k, wide):
        """Element k, as fp32, of the tensor at an address."""
        if LOW or wide:
            return load_1_ordered(at + k * u64(4))
        low, _ = widen(load_half_ordered(at + k * u64(2)))
        return low

    def kernel(
        a0, a1, a2, a3, a4, a5, a6, a7, n0, n1, n2, n3, n4, n5, n6, n7,
        m0, m1, m2, m3, m4, m5, m6, m7, num_sources,
        meta, bases, codes, residual, tail, dynamic,
        first, target, flags, scale, numel, corrupt, corrupt_step,
    ):  # fmt: skip
        lane = u32(cuda.threadIdx.x & 31)
        warp = u32(cuda.threadIdx.x >> 5)
        num_tiles = u64(numel >> u64(10))
        tile = u64(u64(cuda.blockIdx.x) * u64(GROUP) + u64(warp))
        shared = cuda.shared.array(SHARED_WORDS, u32)
        start = shared_address(shared)
        mine = u32(start + u32(u32(cuda.threadIdx.x) * u32(4 * STRIDE)))
        places = u32(start + u32(4 * PLACES) + u32(warp * u32(32 * MAX_SOURCES)))
        table = u32(start + u32(4 * TABLE))
        # One lane: with a warp an entry, sums of two took 2% longer (H200, bf16 and fp32 of 1 GiB).
        if cuda.threadIdx.x == 0:
            write_entry(table, 0, a0, n0, m0)
            write_entry(table, 1, a1, n1, m1)
            if u32(num_sources) > u32(2):
                write_entry(table, 2, a2, n2, m2)
                write_entry(table, 3, a3, n3, m3)
                write_entry(table, 4, a4, n4, m4)
                write_entry(table, 5, a5, n5, m5)
                write_entry(table, 6, a6, n6, m6)
                write_entry(table, 7, a7, n7, m7)
        cuda.syncthreads()
        planes = u32(start + u32(4 * WARP_WORDS * GROUP) + u32(warp * u32(8 * CODES)))
        residuals = u32(start + u32(4 * (WARP_WORDS + 2 * CODES) * GROUP) + u32(warp * u32(4 * RESIDUALS)))
        halves = u32(
            start + u32(4 * (WARP_WORDS + 2 * CODES + RESIDUALS) * GROUP) + u32(warp * u32(4 * LOWS))
        )
        rest = cuda.local.array(8, u32)
        sums = cuda.local.array(32, u32)
        flags, scale = u32(flags), u32(scale)
        wide_target = u32(flags & u32(TARGET_WIDE)) != u32(0)
        if tile < num_tiles:
            start_codes(table, planes, codes, tile, lane)
            end_group()
            start_residuals(table, residuals, residual, tile, lane)
            end_group()
            # A lane a source: one wait for all headers and meta words, and then for all chunks.
            if lane < u32(num_sources):
                find_source(
                    table, places, lane, meta, bases, dynamic, numel, num_tiles, tile, corrupt, corrupt_step
                )
            cuda.syncwarp()
            for k in range(32):
                sums[k] = u32(MINUS_ZERO)
            octet = tile * u64(TILE) + u64(u32(lane << u32(3)))  # the lane's first element
            if first != u64(0):
                if LOW or u32(flags & u32(ACCUMULATE_WIDE)) != u32(0):
                    add_plain(sums, first + octet * u64(4), True, u32(0), scale)
                else:
                    add_plain(sums, first + octet * u64(ITEM), False, u32(0), scale)
            source = u32(0)
            while source < u32(num_sources):
                place = u32(places + u32(source << u32(5)))
                entry = u32(table + u32(source << u32(5)))
                payload, at = two_addresses(place)
                after = u32(source + u32(1))
                if after < u32(num_sources):
                    other = u32(planes + u32(u32(after & u32(1)) * u32(4 * CODES)))
                    start_codes(u32(entry + u32(32)), other, codes, tile, lane)
                end_group()
                if at == u64(0):
                    add_plain(sums, payload + octet * u64(ITEM), False, flags, scale)
                else:
                    limit, word = two_addresses(u32(place + u32(16)))
                    wait_all_but_2()
                    cuda.syncwarp()
                    plane = u32(planes + u32(u32(source & u32(1)) * u32(4 * CODES)))
                    bad, lows = decode_tile(mine, plane, lane, u32(word), at, limit, halves)
                    load_rest(payload, residual, num_tiles, tile, lane, rest)
                    wait_all_but_1()
                    cuda.syncwarp()
                    if lows != u32(0):
                        add_tile(sums, mine, residuals, halves, lane, rest, True, flags, scale)
                    else:
                        add_tile(sums, mine, residuals, halves, lane, rest, False, flags, scale)
                    cuda.syncwarp()  # the residuals have been read
                    if bad != u32(0):
                        store_1(corrupt + u64(source) * corrupt_step, u32(1))
                if after < u32(num_sources):
                    start_residuals(u32(entry + u32(32)), residuals, residual, tile, lane)
                end_group()
                source = after
            if LOW or wide_target:
                store_sums(sums, target + octet * u64(4), True)
            else:
                store_sums(sums, target + octet * u64(ITEM), False)
        if cuda.blockIdx.x == cuda.gridDim.x - 1:
            k = u64(num_tiles * u64(TILE)) + u64(cuda.threadIdx.x)
            while k < numel:
                total = u32(MINUS_ZERO)
                if first != u64(0):
                    if u32(flags & u32(ACCUMULATE_WIDE)) != u32(0):
                        total = load_element(first, k, True)
                    else:
                        total = load_element(first, k, False)
                source = u32(0)
                while source < u32(num_sources):
                    at, size, _ = read_entry(table, source)
                    if size != u64(0):
                        at = at + tail - num_tiles * u64(TILE * ITEM)
                    value = load_element(at, k, False)
                    if u32(flags & u32(SCALED)) != u32(0):
                        value = multiply_f32(value, scale)
                        if not LOW:
                            value, _ = widen(narrow(value, u32(0)))
                    total = add_f32(total, value)
                    source = u32(source + u32(1))
                if LOW or wide_target:
                    store_1(target + k * u64(4), total)
                else:
                    store_half(target + k * u64(ITEM), narrow(total, u32(0)))
                k += u64(THREADS)

    return kernel
