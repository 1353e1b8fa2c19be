"""``env``: versions, devices, variables, and what would be compressed here; to be pasted into a report."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

import zipccl_hooks

from ..config import Policy, peer_to_peer, relevant_variables, variables
from ..cuda import launch
from ..eligible import BACKEND_NAME
from ..format import VERSION
from ..operators import OPERATORS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has none."""


def run(args: argparse.Namespace) -> int:
    print(report())
    return 0


def report() -> str:
    """The report, of several lines."""
    lines = [f"{name:<12} {text}" for name, text in (*_versions(), *_devices())]
    lines += ["", "variables"]
    lines += [f"  {name}={text}" for name, text in relevant_variables().items()] or ["  none set"]
    lines += [f"  {_policy()}", "", "what works here"]
    for name, why in _integrations():
        lines.append(f"  {name:<28} {'yes' if why is None else f'no: {why}'}")
    return "\n".join(lines)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _versions() -> Iterator[tuple[str, str]]:
    yield "zipccl_hooks", f"{zipccl_hooks.__version__}, wire format {VERSION}"
    yield "torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    for package in ("numba", "numba-cuda", "numpy"):
        yield package, _version(package)
    yield "Python", platform.python_version()
    yield "OS", f"{platform.platform()}, {torch.get_num_threads()} threads"


def _devices() -> Iterator[tuple[str, str]]:
    built = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    yield "backends", ", ".join(name for name, found in built.items() if found) or "none"
    count = torch.cuda.device_count()
    if count == 0:
        yield "GPUs", "none"
        return
    if built["nccl"]:
        yield "NCCL", ".".join(map(str, torch.cuda.nccl.version()))
    yield "driver", _driver()
    for index in range(count):
        found = torch.cuda.get_device_properties(index)
        peers = [str(k) for k in range(count) if k != index and torch.cuda.can_device_access_peer(index, k)]
        memory = f"{found.total_memory / 2**30:.0f} GiB, reaches GPUs {' '.join(peers) or 'none'}"
        yield f"GPU {index}", f"{found.name}, compute capability {found.major}.{found.minor}, {memory}"


def _driver() -> str:
    """On Linux, from "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06 ..."."""
    try:
        found = re.search(r"\d+(\.\d+)+", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        found = None
    return found.group() if found else "unknown"


def _policy() -> str:
    try:
        return str(Policy())
    except ValueError as error:
        return f"no policy can be made of {', '.join(variables())}: {error}"


def _integrations() -> Iterator[tuple[str, str | None]]:
    """(what, why not or None)."""
    cpu_codec = None if importlib.util.find_spec("numba") else "package numba is not installed"
    gloo = cpu_codec if dist.is_gloo_available() else "this torch has no gloo"
    cuda_codec = _cuda_codec()
    # Compressed collectives on GPUs keep a gloo connection as well.
    nccl = cuda_codec or gloo if dist.is_nccl_available() else "this torch has no NCCL"
    either = None if gloo is None or nccl is None else f"gloo: {gloo}; NCCL: {nccl}"
    yield "codec on CPUs", cpu_codec
    yield "codec on GPUs", cuda_codec
    yield "collectives over gloo", gloo
    yield "collectives over NCCL", nccl
    yield "copies among GPUs", nccl or _peers()
    yield "DDP: zipccl_hook", either
    yield "FSDP2: apply(model)", either or _fsdp()
    yield "enable(), compressed()", either or _operators()
    known = BACKEND_NAME in dist.Backend.backend_list
    yield f'backend "{BACKEND_NAME}"', either if known else "it is not registered"


def _cuda_codec() -> str | None:
    if (why := launch.missing()) is not None:
        return why
    capabilities = [torch.cuda.get_device_capability(k) for k in range(torch.cuda.device_count())]
    old = [f"GPU {k} has {a}.{b}" for k, (a, b) in enumerate(capabilities) if (a, b) < launch.MIN_CAPABILITY]
    return f"needs compute capability {launch.MIN_CAPABILITY[0]}.0, {', '.join(old)}" if old else None


def _peers() -> str | None:
    if not peer_to_peer():
        return "NCCL_P2P_DISABLE or NCCL_P2P_LEVEL forbids it"
    count = torch.cuda.device_count()
    if count < 2:
        return "one GPU"
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    apart = [f"{a} and {b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    return f"GPUs {apart[0]} cannot write into each other's memory" if apart else None


def _fsdp() -> str | None:
    try:
        from .. import fsdp  # noqa: F401  half a second
    except ImportError as error:
        return f"this torch has another FSDP2: {error}"
    return None


def _operators() -> str | None:
    """Calls of operators whose schema this torch has changed stay plain."""
    other = [one.name for one in OPERATORS if one.found_schema != one.schema]
    return f"other schemas of {', '.join(other)}, which stay plain" if other else None
