"""What a user can choose, and the only place that reads the environment.

The environment sets defaults and code wins: ``Policy()`` takes every field that is not given from its
variable. All ranks of a group must use equal policies, as they must call equal collectives.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

MODES = ("auto", "fast", "dense", "raw")
REDUCES = ("fp32", "native")
# Of variables that change what collectives do, or how fast.
PREFIXES = ("ZIPCCL_", "NCCL_", "GLOO_", "TORCH_NCCL_", "NUMBA_", "OMP_", "CUDA_VISIBLE_DEVICES")


def _variable(name: str, default: Any, parse: Callable[[str], Any] = str) -> Any:
    """A dataclass field whose default is the environment variable ``name``, read when a Policy is made."""

    def read() -> Any:
        text = os.environ.get(name)
        if text is None:
            return default
        try:
            return parse(text)
        except ValueError as error:
            raise ValueError(f"environment variable {name}: {error}") from None

    return field(default_factory=read, metadata={"variable": name, "default": default})


def _switch(text: str) -> bool:
    switches = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
    if text.lower() not in switches:
        raise ValueError(f"expected one of {', '.join(switches)}, got {text!r}")
    return switches[text.lower()]


@dataclass(frozen=True)
class Policy:
    """How collectives are carried out.

    ========== ======================= ======= ==========================================================
    field      variable                default meaning
    ========== ======================= ======= ==========================================================
    enabled    ``ZIPCCL_ENABLED``      True    False: every call goes to the plain collective
    mode       ``ZIPCCL_MODE``         auto    exponent code: fast, dense, or auto (on GPUs the fastest)
    min_bytes  ``ZIPCCL_MIN_BYTES``    2097152 calls whose tensor is smaller go native; see collectives.py
    reduce     ``ZIPCCL_REDUCE``       fp32    fp32: compressed exchange, sum in rank order in fp32;
                                               native: reductions are left to the plain collective
    adaptive   ``ZIPCCL_ADAPTIVE``     True    CUDA tensors: compress only what switch.py expects to be faster
                                               so; False: whatever can be compressed
    verify     ``ZIPCCL_VERIFY``       False   CPU tensors: check the checksums of all payloads, and
                                               repeat some calls uncompressed; see exchange.py
    ========== ======================= ======= ==========================================================

    Raises ValueError, naming the field, for a value that is none of its choices.
    """

    enabled: bool = _variable("ZIPCCL_ENABLED", True, _switch)
    mode: str = _variable("ZIPCCL_MODE", "auto")
    # Two processes, gloo, 1 Gbit/s: at 1 MiB most kinds of call lose time, at 2 MiB four of eight gain
    # more than a quarter and two lose one, at 8 MiB one loses a tenth (README, make bench-slow-link).
    min_bytes: int = _variable("ZIPCCL_MIN_BYTES", 2 * 1024 * 1024, int)
    reduce: str = _variable("ZIPCCL_REDUCE", "fp32")
    adaptive: bool = _variable("ZIPCCL_ADAPTIVE", True, _switch)
    verify: bool = _variable("ZIPCCL_VERIFY", False, _switch)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode: expected one of {MODES}, got {self.mode!r}")
        if self.reduce not in REDUCES:
            raise ValueError(f"reduce: expected one of {REDUCES}, got {self.reduce!r}")
        if not isinstance(self.min_bytes, int) or self.min_bytes < 0:
            raise ValueError(f"min_bytes: expected an integer of at least 0, got {self.min_bytes!r}")


@cache
def default_policy() -> Policy:
    """``Policy()``, made once: reading the environment in every call would cost as much as a small call."""
    return Policy()


def auto_enable() -> bool:
    """Whether ``import torch`` enables compression, as ZIPCCL_AUTO_ENABLE says: see zipccl_autoload.py."""
    return _switch(os.environ.get("ZIPCCL_AUTO_ENABLE", "0"))


def node_name() -> str:
    """What ranks of one node have in common: the host's name, or the variable ZIPCCL_NODE."""
    return os.environ.get("ZIPCCL_NODE") or socket.gethostname()


def peer_to_peer() -> bool:
    """Whether GPUs may write into each other's memory: unless NCCL is told that they may not."""
    disabled, level = os.environ.get("NCCL_P2P_DISABLE", "0"), os.environ.get("NCCL_P2P_LEVEL", "")
    return disabled in ("", "0") and level.upper() not in ("LOC", "0")


def cache_directory() -> Path:
    """Where compiled CUDA kernels are kept: the user's cache, as the XDG convention has it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zipccl_hooks"


def variables() -> dict[str, Any]:
    """The environment variables of a Policy, with their defaults."""
    return {f.metadata["variable"]: f.metadata["default"] for f in fields(Policy)}


def relevant_variables() -> dict[str, str]:
    """The variables of PREFIXES that are set: ours, and others that change what collectives do."""
    return {name: text for name, text in sorted(os.environ.items()) if name.startswith(PREFIXES)}


def is_rank() -> bool:
    """Whether torchrun, or what sets the same variables, started this process as one of several ranks."""
    return "RANK" in os.environ


def local_rank() -> int:
    """This rank's number on its host: which GPU it takes."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def num_threads() -> int:
    """Threads of a rank: OMP_NUM_THREADS, else one, as torchrun has it, where several share a host."""
    return int(os.environ.get("OMP_NUM_THREADS", "1"))


def rank_variables(rank: int, size: int, port: int, others: Mapping[str, str]) -> dict[str, str]:
    """The environment of a rank on this host, as torchrun would set it, and ``others``."""
    threads = max(1, (os.cpu_count() or 1) // size)
    return {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **others,
    }
