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
def publish(scratch, group, kind, value):
    """Sets a group's state word; one lane calls it."""
    epoch = u64(u64(load_state(scratch) & u64(0x3FFFFFFF)) << u64(34))
    store_state(scratch + u64(SCAN_HEAD) + group * u64(8), u64(epoch | u64(kind << 32) | u64(value)))


@device
def look_back(lane, scratch, group):
    """Sum of the sizes of all groups before, once they are all published. A whole warp calls it."""
    epoch = u64(u64(load_state(scratch) & u64(0x3FFFFFFF)) << u64(34))
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
                    value = u32(state & u64(0xFFFFFFFF))
                    status = u32(0)
                    if u64(state & u64(0xFFFFFFFC00000000)) == epoch:
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
