"""What ``import torch`` calls at its end wherever zipccl_hooks is installed: ``ZIPCCL_AUTO_ENABLE=1``.

So programs that do not know of the package, and what they launch, are compressed. Beside the package, not in
it: without the variable nothing of the package is imported, which would cost every program in the
environment. An error here must not make ``import torch`` fail.
"""

from __future__ import annotations

import os
import warnings

VARIABLE = "ZIPCCL_AUTO_ENABLE"


def load() -> None:
    """Entry point of the group ``torch.backends``: ``zipccl_hooks.enable()`` if the variable says so."""
    if not os.environ.get(VARIABLE):
        return
    try:
        # From its modules: the package itself may be in the middle of importing torch.
        from zipccl_hooks.activation import enable
        from zipccl_hooks.config import auto_enable

        if auto_enable():
            enable()
    except Exception as error:
        warnings.warn(f"zipccl_hooks is not enabled: {error}", stacklevel=2)
