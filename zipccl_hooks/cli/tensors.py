"""The tensors of a .safetensors file, of torch.save's, or of a distributed checkpoint, one by one."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import Failure

Named = tuple[str, Tensor]


def tensors(path: str) -> tuple[int, Iterator[Named]]:
    """(how many, (name, tensor) as they are read), on the CPU.

    Raises Failure, naming the file, also in the middle of it.
    """
    try:
        count, found = _opened(Path(path))
    except Failure:
        raise
    except Exception as error:  # each reader has errors of its own for a file that is none of its
        raise _unreadable(path, error) from None
    if count == 0:
        raise Failure(f"{path}: no tensors in it")
    return count, _guarded(path, found)


def _guarded(path: str, found: Iterator[Named]) -> Iterator[Named]:
    try:
        yield from found
    except Exception as error:
        raise _unreadable(path, error) from None


def _unreadable(path: str, error: Exception) -> Failure:
    if isinstance(error, OSError) and error.strerror:
        return Failure(f"{path}: {error.strerror}")
    return Failure(f"{path}: cannot be read, {type(error).__name__}: {str(error).partition(chr(10))[0]}")


def _opened(path: Path) -> tuple[int, Iterator[Named]]:
    if path.is_dir():
        return _of_checkpoint(path)
    with path.open("rb"):
        pass  # torch and safetensors have other words for a file that is missing or forbidden
    if path.suffix == ".safetensors":
        return _of_safetensors(path)
    if path.suffix in (".pt", ".pth", ".bin"):
        return _of_pickle(path)
    raise Failure(
        f"{path}: expected .safetensors, .pt, .pth, .bin or the directory of a distributed checkpoint"
    )


def _of_safetensors(path: Path) -> tuple[int, Iterator[Named]]:
    if importlib.util.find_spec("safetensors") is None:
        raise Failure(f"{path}: needs safetensors, pip install safetensors")
    from safetensors import safe_open

    file = safe_open(path, framework="pt")
    names = list(file.keys())
    return len(names), ((name, file.get_tensor(name)) for name in names)


def _of_pickle(path: Path) -> tuple[int, Iterator[Named]]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap can only be used" not in str(error):  # files of torch before 1.6 are no archives
            raise
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    found = [(name or path.stem, tensor) for name, tensor in _nested("", loaded)]
    return len(found), iter(found)


def _nested(name: str, value: Any) -> Iterator[Named]:
    """The plain tensors in dicts and lists, by path; others, such as sparse ones, are none that are sent."""
    if isinstance(value, Tensor):
        if value.layout is torch.strided:
            yield name, value
    elif isinstance(value, Mapping | Sequence) and not isinstance(value, str):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, inner in items:
            yield from _nested(f"{name}.{key}" if name else str(key), inner)


def _of_checkpoint(path: Path) -> tuple[int, Iterator[Named]]:
    from torch.distributed import checkpoint

    if not (path / ".metadata").exists():
        raise Failure(f"{path}: expected a distributed checkpoint, with a file .metadata")
    metadata = checkpoint.FileSystemReader(path).read_metadata().state_dict_metadata
    kind = checkpoint.metadata.TensorStorageMetadata
    described = {name: one for name, one in metadata.items() if isinstance(one, kind)}

    def read() -> Iterator[Named]:
        for name, one in described.items():
            into: dict[str, Any] = {name: torch.empty(one.size, dtype=one.properties.dtype)}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that there is one process, as is meant
                checkpoint.load(into, checkpoint_id=path, no_dist=True)
            yield name, into[name]

    return len(described), read()
