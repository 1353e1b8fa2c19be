"""Waiting for a word in memory without the GIL.

The thread of rests.py does so while exchanges are under way. If it took the GIL every millisecond, the
program's threads would hand it over and wait for it back, two changes of threads each time: DDP's hooks most
of all, which take and leave the GIL once a bucket.
"""

from __future__ import annotations

import ctypes

from numba import njit

_sleep = ctypes.CDLL(None).usleep
_sleep.argtypes, _sleep.restype = [ctypes.c_uint32], ctypes.c_int


@njit("boolean(int64[::1], int64, int64, int64, uint32)", nogil=True)
def changes(words, index, known, turns, microseconds):
    """Whether ``words[index]`` is something else than ``known``, within so many turns of so long a sleep."""
    for _ in range(turns):
        if words[index] != known:
            return True
        _sleep(microseconds)
    return words[index] != known
