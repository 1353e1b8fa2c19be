"""The encoding kernel: one warp a tile, one block a group of 8 tiles, one launch a payload."""

from __future__ import annotations

from typing import Any

from ..format import (
    GROUP,
    LOW_ESCAPES_FLAG,
    MODE_SPECS,
    RAW_FLAG,
    TILE,
    WIDTH_SHIFT,
    ZERO_FLAG,
    DType,
    Mode,
    planes,
)
from ._device import (
    K0F,
    K01,
    K7F,
    K80,
    below,
    eight_bits,
    inclusive_sum,
    nibbles,
    nonzero_flags,
    plane_word,
    subtract,
)  # fmt: skip
from ._frame import kind_word, write_frame
from ._jit import (
    ballot,
    cuda,
    divide,
    dp4a,
    increment,
    load_state,
    lowest,
    popc,
    prefetch,
    prmt,
    select_bits,
    shared_address,
    shared_load,
    shared_load_byte,
    shared_or,
    shared_store,
    shared_store_byte,
    shuffle,
    store_1,
    store_byte,
    take,
    u32,
    u64,
    warp_sum,
)  # fmt: skip
from ._low_bits import choose_width, write_low
from ._planes import quads_of_field
from ._scan import AGGREGATE, INCLUSIVE, load_epoch, look_back, publish
from ._split import make_loader

LINE = 128  # bytes that a prefetch fetches
STRIDE = 9  # words between the exponents of two lanes in shared memory: odd, so that no banks collide
# Shared memory of a warp, in words: exponents, list of escapes, then, for two turns, the dynamic bytes.
LIST, CHUNK, CHUNK_WORDS = 32 * STRIDE, 32 * STRIDE + 260, 196
SHARED = CHUNK + 2 * CHUNK_WORDS
# Behind those of eight warps: sizes of the group's chunks, for two turns; what a warp's next turn must know
# of this one (flags, low bytes, chunk bytes, offset); size of the group before; next group; base of a group;
# the launch's epoch.
SIZES = SHARED * GROUP
NOTES, OLD_SIZE = SIZES + 2 * GROUP, SIZES + 2 * GROUP + 4 * GROUP
TICKET, BASE, EPOCH = OLD_SIZE + 1, OLD_SIZE + 2, OLD_SIZE + 3
SHARED_WORDS = OLD_SIZE + 4

# Rank of exponent (top + 2 - u), u = 0..15, in mode dense: bytes of four registers; 15 where it has none.
_RANK_OF = {d + 2: r for r, d in enumerate(MODE_SPECS[Mode.DENSE].order)}
RANKS = tuple(sum(_RANK_OF.get(4 * k + j, 15) << (8 * j) for j in range(4)) for k in range(4))


def make(dtype: DType, mode: Mode) -> Any:
    """The kernel for a dtype and mode.

    Launch: as many blocks of THREADS as the device holds at a time, at most one a group. Arguments, all
    64 bits: addresses of x (on 16 bytes), of the payload, offsets of its sections in bytes (meta, bases,
    codes, residual, tail, dynamic), address of the scan's scratch, numel. Reads x once, writes the
    payload once.

    Invariant between blocks: a group's chunks stand behind those of all groups before it, whoever ends
    first (single-pass scan with look-back; Merrill and Garland 2016). Blocks take groups in order, so a
    block waits only for blocks that run. A block publishes a group's size, encodes its next group, and
    only then looks back for the first: by then the others have published. Waiting at once instead
    costs a third of the speed (H200, bf16 fast, 1 GiB: 1397 GB/s, and 2126 with no scan at all).

    Example, fast: a tile of 1.0 but for one 2**-7 at element 300 (lane 5, group 1, j = 4) has mean
    exponent 126.99, top = 129, codes 2; 2**-7 is top - 9, code 7, rank 9, symbol 9 - 7 = 2: its chunk
    is the byte 0x02.
    """
    spec = MODE_SPECS[mode]
    ITEM, EXPONENT_BITS, RESIDUAL_BITS, LOW = (
        dtype.itemsize,
        dtype.exponent_bits,
        dtype.residual_bits,
        dtype.low_bits,
    )
    CODE_BITS, LEVEL_BITS, LEVELS = spec.code_bits, spec.level_bits, spec.levels
    CODE_MASK, LEVEL_ESCAPE = (1 << CODE_BITS) - 1, (1 << LEVEL_BITS) - 1
    CODE_QUAD = CODE_MASK * 0x01010101
    REST_BITS = EXPONENT_BITS - CODE_BITS
    REST_PLANES = planes(REST_BITS)
    REST_0, REST_1 = REST_PLANES[0], (REST_PLANES[1] if len(REST_PLANES) > 1 else 0)
    TOP, ZERO_MIN = spec.top_16ths, spec.zero_min
    FAST = mode == Mode.FAST
    KIND = kind_word(dtype, mode)
    UNIT = 4 if LOW else 1
    load_tile = make_loader(dtype)
    # The tile that this warp takes next, or another then, comes to L2 while this one is coded. H200, 1 GiB,
    # GB/s without and with: bf16 fast 2081, 2195, dense 1343, 1304; fp16 1870, 1836; fp32 2685, 2184.
    PREFETCHED = FAST and dtype.name == "bfloat16"

    @cuda.jit(device=True, inline="always")
    def level_1(tops, quad):
        """(codes, 1 where it is the escape code) of a quad: min(top - exponent, CODE_MASK) in each byte."""
        d = subtract(tops, quad)
        f = u32(u32(u32(u32(u32(d & K7F) + u32((0x80 - CODE_MASK) * 0x01010101)) | d) & K80) >> u32(7))
        return u32(u32(d & u32(CODE_QUAD)) | u32(f * u32(CODE_MASK))), f

    @cuda.jit(device=True, inline="always")
    def level_1_zero(tops, quad):
        """The same where exponent 0 comes first and the others one rank down."""
        d = subtract(tops, quad)
        f = u32(u32(u32(u32(u32(d & K7F) + u32((0x81 - CODE_MASK) * 0x01010101)) | d) & K80) >> u32(7))
        code = u32(u32(u32(d & u32(CODE_QUAD)) + K01) | u32(f * u32(CODE_MASK)))
        other = u32(nonzero_flags(quad) >> u32(7))
        return u32(code & u32(other * u32(CODE_MASK))), u32(f & other)

    @cuda.jit(device=True, inline="always")
    def symbols_of(top, quad, zero, rank_base):
        """(symbols, 1 where it is the level's escape) of a quad of exponents that are escapes so far."""
        if FAST:
            # Symbols 0 to 12 are top - 7 and below, then top + 1, top + 2; with zero, 0 to 13, then top + 1.
            d = subtract(u32(u32(u32(u32(top + zero) - u32(7)) & u32(255)) * K01), quad)
            inside = below(d, u32(13) + zero)
            upper = subtract(quad, u32(u32(u32(top + u32(1)) & u32(255)) * K01))
            near = u32(below(upper, u32(2) - zero) & u32(~inside))
            symbol = u32(u32(d & u32(inside * u32(255))) | u32(upper & u32(near * u32(255))))
            symbol = u32(symbol + u32(u32(u32(13) + zero) * near))
            f = u32(K01 ^ u32(inside | near))
            return u32(symbol | u32(f * u32(15))), f
        u = subtract(u32(u32(u32(top + u32(2)) & u32(255)) * K01), quad)
        known = below(u, u32(16))
        v = u32(u & K0F)
        selectors = u32(prmt(u32(v | u32(v >> u32(4))), u32(0), u32(0x4420)) & u32(0x7777))
        low = prmt(u32(RANKS[0]), u32(RANKS[1]), selectors)
        high = prmt(u32(RANKS[2]), u32(RANKS[3]), selectors)
        rank = select_bits(u32(u32(u32(u >> u32(3)) & K01) * u32(255)), high, low)
        rank = u32(u32(rank | u32(u32(K01 ^ known) * u32(15))) + u32(zero * K01))
        symbol = u32(rank - u32(rank_base * K01))
        f = u32(K01 ^ below(symbol, u32(3)))
        return u32(u32(symbol & u32(0x03030303)) | u32(f * u32(3))), f

    @cuda.jit(device=True, inline="always")
    def find_top(exponents):
        """(top, 1 if exponent 0 comes first else 0), as format.py defines them."""
        total = u32(0)
        for q in range(8):
            total = dp4a(exponents[q], K01, total)
        # Zeros are rare: look whether there is any before they are counted.
        borrows = u32(0)
        for q in range(8):
            borrows = u32(borrows | u32(u32(exponents[q] - K01) & u32(~exponents[q])))
        count = u32(32)
        if ballot(u32(borrows & K80)) != u32(0):
            count = u32(0)
            for q in range(8):
                count = dp4a(u32(nonzero_flags(exponents[q]) >> u32(7)), K01, count)
        packed = warp_sum(u32(total + u32(count << u32(18))))
        total, nonzero = u32(packed & u32(0x3FFFF)), u32(packed >> u32(18))
        top = u32(0)
        if nonzero == u32(TILE):
            top = u32(u32(u32(total << u32(4)) + u32(TOP * TILE)) >> u32(14))
        elif nonzero != u32(0):
            top = divide(u32(u32(total << u32(4)) + u32(u32(TOP) * nonzero)), u32(nonzero << u32(4)))
        zero = u32(0)
        if u32(u32(TILE) - nonzero) >= u32(ZERO_MIN):
            zero = u32(1)
        return u32(top & u32(255)), zero

    @cuda.jit(device=True, inline="always")
    def next_level(base, chunk, lane, top, zero, length, symbol_base, rank_base):
        """One level: packs the symbols of the list and leaves those that go further; their number."""
        kept = u32(0)
        start = u32(0)
        while start < length:
            mine = u32(start + u32(lane << u32(2)))
            quad = shared_load(u32(base + u32(4 * LIST) + mine))
            symbols, flags = symbols_of(top, quad, zero, rank_base)
            valid = u32(0)
            if mine < length:
                valid = u32(0x01010101)
                if u32(length - mine) < u32(4):
                    valid = u32(valid & u32(u32(u32(1) << u32(u32(length - mine) << u32(3))) - u32(1)))
            symbols = u32(symbols & u32(valid * u32(LEVEL_ESCAPE)))
            further = dp4a(u32(flags & valid), u32(0x08040201), u32(0))
            if FAST:
                symbols = prmt(u32(symbols | u32(symbols >> u32(4))), u32(0), u32(0x4420))
            else:
                symbols = dp4a(symbols, u32(0x40100401), u32(0))
            if mine < length:
                bit = u32(u32(symbol_base + mine) * u32(LEVEL_BITS))
                word = u32(chunk + u32(u32(bit >> u32(5)) << u32(2)))
                shift = u32(bit & u32(31))
                shared_or(word, u32(symbols << shift))
                if shift > u32(32 - 4 * LEVEL_BITS):
                    shared_or(u32(word + u32(4)), u32(symbols >> u32(u32(32) - shift)))
            if ballot(further) != u32(0):
                cuda.syncwarp()  # the list is compacted in place: everyone has read before anyone writes
                number = popc(further)
                sums = inclusive_sum(number)
                at = u32(u32(base + u32(4 * LIST)) + u32(u32(kept + sums) - number))
                for k in range(4):
                    if u32(u32(further >> u32(k)) & u32(1)) != u32(0):
                        shared_store_byte(at, u32(u32(quad >> u32(8 * k)) & u32(255)))
                        at = u32(at + u32(1))
                kept = u32(kept + shuffle(sums, u32(31)))
            start = u32(start + u32(128))
            cuda.syncwarp()
        return kept

    @cuda.jit(device=True, inline="always")
    def encode_exponents(base, chunk, lane, exponents, codes):
        """Stores a tile's code plane, leaves its dynamic bytes in ``chunk``; (top, flags, their number)."""
        top, zero = find_top(exponents)
        tops = u32(top * K01)
        words = cuda.local.array(4, u32)
        escapes = u32(0)
        if zero == u32(0):
            for g in range(4):
                low, low_flags = level_1(tops, exponents[2 * g])
                high, high_flags = level_1(tops, exponents[2 * g + 1])
                words[g] = nibbles(low, high)
                escapes = u32(escapes | u32(eight_bits(low_flags, high_flags) << u32(8 * g)))
        else:
            for g in range(4):
                low, low_flags = level_1_zero(tops, exponents[2 * g])
                high, high_flags = level_1_zero(tops, exponents[2 * g + 1])
                words[g] = nibbles(low, high)
                escapes = u32(escapes | u32(eight_bits(low_flags, high_flags) << u32(8 * g)))
        for w in range(CODE_BITS):
            store_1(codes + u64(128 * w) + u64(lane) * u64(4), plane_word(words, CODE_BITS, w))

        number = popc(escapes)
        sums = inclusive_sum(number)
        length = shuffle(sums, u32(31))
        mine = u32(base + u32(lane * u32(4 * STRIDE)))
        for q in range(8):
            shared_store(u32(mine + u32(4 * q)), exponents[q])
        w = lane
        limit = u32(u32(u32(length * u32(LEVEL_BITS * (LEVELS - 1))) + u32(31)) >> u32(5))
        while w <= limit:
            shared_store(u32(chunk + u32(w << u32(2))), u32(0))
            w = u32(w + u32(32))
        at = u32(u32(base + u32(4 * LIST)) + u32(sums - number))
        while escapes != u32(0):
            k = lowest(escapes)
            escapes = u32(escapes & u32(escapes - u32(1)))
            shared_store_byte(at, shared_load_byte(u32(mine + k)))
            at = u32(at + u32(1))
        cuda.syncwarp()
        symbols = u32(0)
        base_rank = u32(CODE_MASK)
        for _ in range(1, LEVELS):
            if length != u32(0):
                further = next_level(base, chunk, lane, top, zero, length, symbols, base_rank)
                symbols = u32(symbols + length)
                base_rank = u32(base_rank + u32(LEVEL_ESCAPE))
                length = further
        symbol_bytes = u32(u32(u32(symbols * u32(LEVEL_BITS)) + u32(7)) >> u32(3))
        flags = u32(ZERO_FLAG) if zero != u32(0) else u32(0)
        num_bytes = u32(symbol_bytes + length)
        if num_bytes > u32(TILE // 8 * REST_BITS):
            flags, num_bytes = u32(RAW_FLAG), u32(TILE // 8 * REST_BITS)
            quads_of_field(exponents, 0, CODE_BITS, words)
            for w in range(CODE_BITS):
                store_1(codes + u64(128 * w) + u64(lane) * u64(4), plane_word(words, CODE_BITS, w))
            mine = u32(chunk + u32(lane << u32(2)))
            quads_of_field(exponents, CODE_BITS, REST_0, words)
            for w in range(REST_0):
                shared_store(u32(mine + u32(128 * w)), plane_word(words, REST_0, w))
            if REST_1:
                quads_of_field(exponents, CODE_BITS + REST_0, REST_1, words)
                for w in range(REST_1):
                    shared_store(u32(mine + u32(128 * (REST_0 + w))), plane_word(words, REST_1, w))
        else:
            k = lane
            while k < length:
                byte = shared_load_byte(u32(u32(base + u32(4 * LIST)) + k))
                shared_store_byte(u32(u32(chunk + symbol_bytes) + k), byte)
                k = u32(k + u32(32))
        return top, flags, num_bytes

    @cuda.jit(device=True, inline="always")
    def write_chunk(chunk, lane, num_bytes, at):
        """Copies the dynamic bytes of a tile's exponents."""
        k = lane
        while k < num_bytes:
            store_byte(at + u64(k), shared_load_byte(u32(chunk + k)))
            k = u32(k + u32(32))

    def kernel(x, payload, meta, bases, codes, residual, tail, dynamic, scratch, numel):
        lane = u32(cuda.threadIdx.x & 31)
        warp = u32(cuda.threadIdx.x >> 5)
        num_tiles = u64(numel >> u64(10))
        num_groups = u64(num_tiles + u64(GROUP - 1)) >> u64(3)
        if num_groups == u64(0):
            num_groups = u64(1)
        shared = cuda.shared.array(SHARED_WORDS, u32)
        start = shared_address(shared)
        base = u32(start + u32(warp * u32(4 * SHARED)))
        notes = u32(start + u32(u32(4 * NOTES) + u32(warp << u32(4))))
        exponents, lows = cuda.local.array(8, u32), cuda.local.array(16, u32)
        # What is left to do for the group before: where its dynamic bytes go was not known then.
        waiting, had, turn = u64(0), u32(0), u32(0)
        if cuda.threadIdx.x == 0:
            shared_store(u32(start + u32(4 * EPOCH)), load_epoch(scratch))
            shared_store(u32(start + u32(4 * TICKET)), take(scratch + u64(8), u32(1)))
        cuda.syncthreads()
        group = u64(shared_load(u32(start + u32(4 * TICKET))))
        running = u32(1)
        while running != u32(0):
            chunk = u32(base + u32(4 * CHUNK) + u32(turn * u32(4 * CHUNK_WORDS)))
            sizes = u32(start + u32(4 * SIZES) + u32(turn * u32(4 * GROUP)))
            tile = u64(group * u64(GROUP) + u64(warp))
            here = group < num_groups
            active = tile < num_tiles
            # Asked for here, the next ticket is there when it is needed.
            after = u32(0)
            if here and cuda.threadIdx.x == 0:
                after = take(scratch + u64(8), u32(1))
            if PREFETCHED:
                ahead = tile + u64(cuda.gridDim.x) * u64(GROUP)
                if ahead < num_tiles and lane < u32(TILE * ITEM // LINE):
                    prefetch(x + ahead * u64(TILE * ITEM) + u64(lane) * u64(LINE))
            top, flags, num_bytes, low_bytes, size = u32(0), u32(0), u32(0), u32(0), u32(0)
            if active:
                first_plane = payload + residual + tile * u64(TILE)
                second_plane = payload + residual + tile * u64(TILE // 8 * RESIDUAL_BITS)
                if ITEM == 2:
                    second_plane = payload + residual + num_tiles * u64(TILE) + tile * u64(TILE // 8 * 3)
                load_tile(x + tile * u64(TILE * ITEM), lane, first_plane, second_plane, exponents, lows)
                at = payload + codes + tile * u64(TILE // 8 * CODE_BITS)
                top, flags, num_bytes = encode_exponents(base, chunk, lane, exponents, at)
                if LOW:
                    width, escapes = choose_width(lows)
                    low_bytes = u32(width << u32(7))
                    if escapes != u32(0):
                        low_bytes = u32(low_bytes + u32(u32(escapes + u32(1)) << u32(2)))
                        flags = u32(flags | u32(LOW_ESCAPES_FLAG))
                    flags = u32(flags | u32(width << u32(WIDTH_SHIFT)))
                size = u32(low_bytes + num_bytes)
                size = u32(u32(size + u32(UNIT - 1)) & u32(0xFFFFFFFF - (UNIT - 1)))
            if lane == u32(0):
                shared_store(u32(sizes + u32(warp << u32(2))), size)
            cuda.syncthreads()
            one = u32(0)
            if lane < u32(GROUP):
                one = shared_load(u32(sizes + u32(lane << u32(2))))
            total = warp_sum(one)
            if lane >= warp:
                one = u32(0)
            offset = warp_sum(one)
            padded = u32(u32(total + u32(3)) & u32(0xFFFFFFFC))
            if active and lane == u32(0):
                store_1(
                    payload + meta + tile * u64(4),
                    u32(offset | u32(u32(top << u32(16)) | u32(flags << u32(24)))),
                )
            old_size = shared_load(u32(start + u32(4 * OLD_SIZE)))
            if warp == u32(0):
                epoch = shared_load(u32(start + u32(4 * EPOCH)))
                if here and lane == u32(0):
                    kind = AGGREGATE
                    if group == u64(0):
                        kind = INCLUSIVE
                    publish(scratch, epoch, group, kind, u32(padded >> u32(2)))
                    shared_store(u32(start + u32(4 * TICKET)), after)
                if had != u32(0):
                    before = look_back(lane, scratch, epoch, waiting)
                    if lane == u32(0):
                        if waiting != u64(0):
                            publish(scratch, epoch, waiting, INCLUSIVE, u32(before + u32(old_size >> u32(2))))
                        shared_store(u32(start + u32(4 * BASE)), before)
                        if num_tiles != u64(0):
                            store_1(payload + bases + waiting * u64(4), before)
            cuda.syncthreads()
            if had != u32(0):
                chunks = payload + dynamic + u64(shared_load(u32(start + u32(4 * BASE)))) * u64(4)
                old_tile = u64(waiting * u64(GROUP) + u64(warp))
                if old_tile < num_tiles:
                    old_flags, old_low = shared_load(notes), shared_load(u32(notes + u32(4)))
                    old_bytes, old_offset = (
                        shared_load(u32(notes + u32(8))),
                        shared_load(u32(notes + u32(12))),
                    )
                    at = chunks + u64(old_offset)
                    if LOW:
                        write_low(
                            lane,
                            x + old_tile * u64(TILE * ITEM),
                            u32(old_flags >> u32(WIDTH_SHIFT)),
                            old_low,
                            at,
                        )
                        at += u64(old_low)
                    old_chunk = u32(base + u32(4 * CHUNK) + u32(u32(u32(1) - turn) * u32(4 * CHUNK_WORDS)))
                    write_chunk(old_chunk, lane, old_bytes, at)
                    # Zeros between this chunk and the next, or the end of the group.
                    end = u32(old_low + old_bytes)
                    pad = u32(u32(u32(0) - end) & u32(UNIT - 1))
                    if warp == u32(GROUP - 1) or old_tile == num_tiles - u64(1):
                        pad = u32(u32(old_size - old_offset) - end)
                    if lane < pad:
                        store_byte(at + u64(u32(old_bytes + lane)), u32(0))
                if waiting == num_groups - u64(1):
                    written = chunks + u64(old_size) - payload - dynamic
                    write_frame(
                        x, payload, meta, bases, codes, tail, dynamic, num_tiles, numel, written, KIND, ITEM
                    )
            if here:
                cuda.syncwarp()
                if lane == u32(0):
                    shared_store(notes, flags)
                    shared_store(u32(notes + u32(4)), low_bytes)
                    shared_store(u32(notes + u32(8)), num_bytes)
                    shared_store(u32(notes + u32(12)), offset)
                if cuda.threadIdx.x == 0:
                    shared_store(u32(start + u32(4 * OLD_SIZE)), padded)
                cuda.syncwarp()
                waiting, had = group, u32(1)
                group = u64(shared_load(u32(start + u32(4 * TICKET))))
                turn = u32(u32(1) - turn)
            else:
                running = u32(0)
        if cuda.threadIdx.x == 0:
            last = u32(cuda.gridDim.x - 1)
            if increment(scratch + u64(4), last) == last:
                store_1(scratch + u64(8), u32(0))
                store_1(scratch, u32(u32(load_state(scratch) & u64(0x3FFFFFFF)) + u32(1)))

    return kernel
