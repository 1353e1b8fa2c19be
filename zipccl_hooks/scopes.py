"""Whose traffic c10d.py compresses, and how: enable(), scopes inside it, and groups of our backend's name.

The innermost scope that covers a group decides. Scopes are the process's, not a thread's: DDP and FSDP
communicate from autograd's threads.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch.distributed as dist

from .config import Policy, default_policy
from .eligible import BACKEND_NAME

Group = dist.ProcessGroup


class Scope:
    """A policy for all groups, or for some."""

    def __init__(self, policy: Policy | None, groups: Iterable[Group] | None) -> None:
        if policy is not None and not isinstance(policy, Policy):
            raise TypeError(f"policy: expected a Policy or None, got {type(policy).__name__}")
        self.policy = policy or default_policy()
        self._groups: weakref.WeakSet[Group] | None = None
        if groups is not None:
            members = list(groups)
            for k, group in enumerate(members):
                # A rank outside a group holds this in its place.
                if group is not dist.GroupMember.NON_GROUP_MEMBER and not isinstance(group, Group):
                    raise TypeError(f"groups[{k}]: expected a ProcessGroup, got {type(group).__name__}")
            self._groups = weakref.WeakSet(group for group in members if isinstance(group, Group))

    def covers(self, group: Group) -> bool:
        return self._groups is None or group in self._groups


_scopes: list[Scope] = []  # the outermost first
_known: weakref.WeakKeyDictionary[Group, Policy | None] = weakref.WeakKeyDictionary()


def policy_of(group: Group) -> Policy | None:
    """How a group's traffic is compressed; None if it is left alone."""
    known = _known
    try:
        return known[group]
    except KeyError:
        found = known[group] = _find(group)
        return found


def _find(group: Group) -> Policy | None:
    for scope in reversed(_scopes):
        if scope.covers(group):
            return scope.policy
    backends = dist.distributed_c10d._world.pg_backend_config.get(group, "")
    return default_policy() if f":{BACKEND_NAME}" in backends else None


def add(scope: Scope, outermost: bool = False) -> None:
    _scopes.insert(0 if outermost else len(_scopes), scope)
    _forget()


def remove(scope: Scope) -> None:
    _scopes.remove(scope)
    _forget()


def _forget() -> None:
    global _known
    _known = weakref.WeakKeyDictionary()  # a new one: another thread may be about to fill the old one
