"""The kernel between exchange and decoding: notes how much room was needed, fetches what found none."""

from __future__ import annotations

from typing import Any

from ..format import DType, Mode
from . import ENTRY_BYTES, MOVED, STAMP, THREADS
from ._jit import (
    cuda,
    fence_system,
    load_1,
    load_1_ordered,
    load_system,
    load_system_1,
    nanosleep,
    shared_address,
    shared_load,
    shared_max,
    shared_store,
    store_1,
    store_system,
    u32,
    u64,
)  # fmt: skip
from .stamp import rate_of

ANY = 1 << 40  # bytes: more than any payload


def make(dtype: DType, mode: Mode) -> Any:
    """The kernel, the same for every dtype and mode.

    Launch: one block of THREADS, behind the exchange. Arguments, all 64 bits: address of the table of the
    exchange and its number of entries; of the channel's control words (done, request, reply, corrupt); of
    the word for the rate; of the list of wants (two words an entry); of the staging areas (``stage``
    bytes to send, then as many to receive, for each entry); ``stage``; the number of the exchange; address
    of the device's corrupt flag; 1 if the payloads are stamped. All but the payloads, their spill areas
    and the flag is pinned host memory (channel.py says what stands there).

    Usually every payload fits in the bytes that were exchanged: the kernel writes the largest rate, then
    ``done``, and ends after a few microseconds, and no host has a part in it. Where a payload to or
    from an entry was longer, the dynamic part received is moved to the entry's spill area, which holds the
    longest, and in rounds the kernel lays the missing bytes into staging, sets ``request``, waits for
    ``reply``, which the channel's thread sets once it has exchanged them over gloo, and appends what came.
    The header's word MOVED then sends the decoder to the spill area. While it waits it holds one block of
    one multiprocessor, and the thread calls nothing of CUDA, so that no lock and no queue can join the two.

    Invariant: when it ends every payload is complete, or ``reply`` was negative (the peer failed) and the
    corrupt flag is set.

    Example: 4096 bytes of a payload of 128 + 4000 were exchanged: 32 are missing; one round sends and
    receives them.
    """

    @cuda.jit(device=True, inline="always")
    def missing(payload, static, exchanged, longest, tiles):
        """(bytes of a payload that were not exchanged, its rate, 1 if its size is impossible)."""
        size, rate = rate_of(payload, tiles)
        if size > longest:
            return u64(0), u32(0), u32(1)
        total = static + size
        if total <= exchanged:
            return u64(0), rate, u32(0)
        return u64(total - exchanged), rate, u32(0)

    @cuda.jit(device=True, inline="always")
    def wait_for_reply(control, request):
        """1 once the reply is there, 0 if it is negative."""
        answer = u64(0)
        while answer != request and u64(answer >> u64(63)) == u64(0):
            nanosleep(u32(2000))
            answer = load_system(control + u64(16))
        return u32(answer == request)

    @cuda.jit(device=True, inline="always")
    def copy(source, target, num_bytes):
        """Copies words, the whole block; not through L1, which keeps what staging held a round ago."""
        at = u64(cuda.threadIdx.x) * u64(4)
        while at < num_bytes:
            store_1(target + at, load_system_1(source + at))
            at += u64(4 * THREADS)

    @cuda.jit(device=True, inline="always")
    def part(total, start, stage):
        """Bytes of a round."""
        if total <= start:
            return u64(0)
        if total - start < stage:
            return u64(total - start)
        return stage

    def kernel(table, entries, control, rate_word, wants, staging, stage, number, corrupt, stamped):
        thread = u64(cuda.threadIdx.x)
        shared = cuda.shared.array(4, u32)
        start = shared_address(shared)
        rate_at, rounds_at, good_at = start, u32(start + u32(4)), u32(start + u32(8))
        if thread == u64(0):
            shared_store(rate_at, u32(0))
            shared_store(rounds_at, u32(0))
            shared_store(good_at, u32(1))
        cuda.syncthreads()
        k = thread
        while k < entries:
            # All loads of a row at once: each crosses the bus to the host, one after the other 10 us in all.
            entry = table + k * u64(ENTRY_BYTES)
            sent, sent_static = load_system(entry), load_system(entry + u64(8))
            sent_bytes, sent_tiles = load_system(entry + u64(16)), load_system(entry + u64(24))
            received, received_static = load_system(entry + u64(32)), load_system(entry + u64(40))
            received_bytes, received_tiles = load_system(entry + u64(48)), load_system(entry + u64(56))
            longest = load_system(entry + u64(72))
            out, back = u64(0), u64(0)
            if sent != u64(0):
                out, rate, _ = missing(sent, sent_static, sent_bytes, u64(ANY), sent_tiles)
                if stamped != u64(0):
                    rate = load_1(sent + u64(STAMP))
                shared_max(rate_at, rate)
            if received != u64(0):
                back, rate, bad = missing(received, received_static, received_bytes, longest, received_tiles)
                if stamped != u64(0):
                    rate = load_1(received + u64(STAMP))
                shared_max(rate_at, rate)
                if bad != u32(0):
                    store_1(corrupt, u32(1))
            store_system(wants + k * u64(16), out)
            store_system(wants + k * u64(16) + u64(8), back)
            if out < back:
                out = back
            shared_max(rounds_at, u32((out + stage - u64(1)) // stage))
            k += u64(THREADS)
        cuda.syncthreads()
        rounds = u64(shared_load(rounds_at))
        if rounds != u64(0):
            fence_system()
            cuda.syncthreads()
            k = u64(0)
            while k < entries:
                entry = table + k * u64(ENTRY_BYTES)
                if load_system(wants + k * u64(16) + u64(8)) != u64(0):
                    static = load_system(entry + u64(40))
                    received = load_system(entry + u64(32))
                    copy(
                        received + static,
                        load_system(entry + u64(64)),
                        load_system(entry + u64(48)) - static,
                    )
                    if thread == u64(0):
                        store_1(received + u64(MOVED), u32(1))
                k += u64(1)
            turn = u64(0)
            while turn < rounds:
                done = turn * stage
                k = u64(0)
                while k < entries:
                    out = part(load_system(wants + k * u64(16)), done, stage)
                    if out != u64(0):
                        entry = table + k * u64(ENTRY_BYTES)
                        source = load_system(entry) + load_system(entry + u64(16)) + done
                        copy(source, staging + k * u64(2) * stage, out)
                    k += u64(1)
                fence_system()
                cuda.syncthreads()
                if thread == u64(0):
                    request = u64(u64(number << u64(16)) | u64(turn + u64(1)))
                    store_system(control + u64(8), request)
                    shared_store(good_at, wait_for_reply(control, request))
                cuda.syncthreads()
                fence_system()
                if shared_load(good_at) == u32(0):
                    store_1(corrupt, u32(1))
                    turn = rounds
                else:
                    k = u64(0)
                    while k < entries:
                        back = part(load_system(wants + k * u64(16) + u64(8)), done, stage)
                        if back != u64(0):
                            entry = table + k * u64(ENTRY_BYTES)
                            had = load_system(entry + u64(48)) - load_system(entry + u64(40))
                            target = load_system(entry + u64(64)) + had + done
                            copy(staging + (k * u64(2) + u64(1)) * stage, target, back)
                        k += u64(1)
                    cuda.syncthreads()
                    turn += u64(1)
        if thread == u64(0):
            store_system(rate_word, u64(shared_load(rate_at)))
            store_system(control + u64(24), u64(load_1_ordered(corrupt)))
            fence_system()
            store_system(control, number)

    return kernel
