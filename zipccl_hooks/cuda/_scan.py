"""Device functions of the encoder's scan over groups: single-pass, with look-back over published sizes.

Scratch: u32 epoch, blocks that are done, next group, unused; then one u64 a group. A state word is
valid in this launch only if its upper 30 bits are the epoch, which the last block to end moves on:
nothing needs clearing between launches, also when a CUDA graph replays one.
"""

from __future__ import annotations

from . import SCAN_HEAD
from ._jit import ballot, cuda, device, load_state, lowest, store_state, u32, u64, warp_sum

WINDOWS = 4
AGGREGATE, INCLUSIVE = 1, 2  # what a group's state word holds: its own size, or the end of its chunks


@device
def load_epoch(scratch):
    """This launch's epoch, as it stands in a state word."""
    return u64(u64(load_state(scratch) & u64(0x3FFFFFFF)) << u64(34))


@device
def publish(scratch, epoch, group, kind, value):
    """Sets a group's state word; one lane calls it."""
    store_state(scratch + u64(SCAN_HEAD) + group * u64(8), u64(epoch | u64(kind << 32) | u64(value)))


@device
def look_back(lane, scratch, epoch, group):
    """Sum of the sizes of all groups before, once they are all published. A whole warp calls it.

    It asks for 32 * WINDOWS groups at a time: a wave of blocks publishes their ends one after the other, and
    who comes after them has a hundred groups of unknown ends before it.
    """
    states, before, window = scratch + u64(SCAN_HEAD), u32(0), group
    found = cuda.local.array(WINDOWS, u64)
    done = group == u64(0)
    while not done:
        for w in range(WINDOWS):
            back = u64(lane) + u64(32 * w)
            found[w] = u64(epoch | u64(INCLUSIVE << 32))  # before the first group: 0 bytes
            if back < window:
                found[w] = load_state(states + u64(window - u64(1) - back) * u64(8))
        ready, total = True, u32(0)
        for w in range(WINDOWS):
            if not done:
                status = u32(0)
                if u64(found[w] & u64(0xFFFFFFFC00000000)) == epoch:
                    status = u32(u32(found[w] >> u64(32)) & u32(3))
                value = u32(found[w])
                ends = ballot(u32(status & u32(INCLUSIVE)))
                missing = ballot(u32(status == u32(0)))
                if ends != u32(0):
                    done = True
                    missing = u32(missing & u32(u32(ends & u32(-ends & 0xFFFFFFFF)) - u32(1)))
                    if lane > lowest(ends):
                        value = u32(0)
                if missing != u32(0):
                    ready = False
                total = u32(total + value)
        if ready:
            before = u32(before + warp_sum(total))
            window = u64(window - u64(32 * WINDOWS))
        else:
            done = False
    return before
