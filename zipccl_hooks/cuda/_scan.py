"""Device functions of the encoder's scan over groups: single-pass, with look-back over published sizes.

Scratch: u32 epoch, blocks that are done, next group, unused; then one u64 a group. A state word is
valid in this launch only if its upper 30 bits are the epoch, which the last block to end moves on:
nothing needs clearing between launches, also when a CUDA graph replays one.
"""

from __future__ import annotations

from . import SCAN_HEAD
from ._jit import ballot, device, load_state, lowest, store_state, u32, u64, warp_sum

AGGREGATE, INCLUSIVE = 1, 2  # what a group's state word holds: its own size, or the end of its chunks


@device
def load_epoch(scratch):
    """This launch's epoch."""
    return u32(u32(load_state(scratch)) & u32(0x3FFFFFFF))


@device
def publish(scratch, epoch, group, kind, value):
    """Sets a group's state word; one lane calls it."""
    state = u64(u64(u32(u32(epoch << u32(2)) | u32(kind))) << u64(32)) | u64(value)
    store_state(scratch + u64(SCAN_HEAD) + group * u64(8), state)


@device
def look_back(lane, scratch, epoch, group):
    """Sum of the sizes of all groups before, once they are all published. A whole warp calls it.

    32 groups at a time: with 128 or 256, one round trip to L2 in place of three, the warps that ask slow down
    all others (H200, bf16 fast, 1 GiB: 1994 GB/s, so 1738 and 1597).
    """
    states = scratch + u64(SCAN_HEAD)
    before = u32(0)
    if group != u64(0):
        window = group
        done = u32(0)
        while done == u32(0):
            ready = u32(0)
            status, value = u32(0), u32(0)
            while ready == u32(0):
                status, value = u32(INCLUSIVE), u32(0)
                if u64(lane) < window:
                    state = load_state(states + u64(window - u64(1) - u64(lane)) * u64(8))
                    value = u32(state)
                    status = u32(0)
                    if u32(state >> u64(34)) == epoch:
                        status = u32(u32(state >> u64(32)) & u32(3))
                ends = ballot(u32(status & u32(INCLUSIVE)))
                missing = ballot(u32(status == u32(0)))
                if ends != u32(0):
                    missing = u32(missing & u32(u32(ends & u32(-ends & 0xFFFFFFFF)) - u32(1)))
                if missing == u32(0):
                    ready = u32(1)
            if ends != u32(0):
                if lane > lowest(ends):
                    value = u32(0)
                done = u32(1)
            before = u32(before + warp_sum(value))
            window = u64(window - u64(32))
    return before
