"""Python that torch.compile must not look into, though frames that it runs call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """Keeps Dynamo from compiling a function, and what that calls, when torch.compile's frames call it.

    As torch.compiler.disable does, but at no cost a call and without importing Dynamo, which takes seconds.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function
