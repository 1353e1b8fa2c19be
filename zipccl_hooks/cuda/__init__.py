"""The codec on CUDA devices: Numba-CUDA kernels that write and read the bytes of format.py."""

from __future__ import annotations

from ..format import GROUP, MAGIC

# What kernels and launchers share; here, so that a launcher need not import Numba.
THREADS = 32 * GROUP  # a warp per tile, a block per group
SCAN_HEAD = 16  # bytes of the encoder's scratch before the state words, see _scan.py
MAGIC_WORD = int.from_bytes(MAGIC, "little")

# The summing kernel: how many sources a launch takes, and its flags.
MAX_SOURCES = 8
ACCUMULATE_WIDE, TARGET_WIDE, SCALED = 1, 2, 4

# Words of a payload's header that only live between the ranks of a collective: see stamp.py, rest.py.
STAMP, MOVED = 96, 100  # byte offsets
ENTRY_BYTES = 80  # of a table of exchange, see channel.py
