"""The command line: ``python -m zipccl_hooks COMMAND``.

    env       what is installed, and what would be compressed here
    check     whether codec and collectives deliver the very bits on this machine's devices
    bench     collectives, plain against compressed: a table of times, ratios and wrong bits
    profile   what link and codec cost here, and what compression is expected to gain
    inspect   how far the tensors of a file would shrink, and in which mode

Exit status: 0; 1 where something is wrong or cannot be done; 2 for arguments that are none; 130 for Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .cli import Failure, bench, check, env, inspect, profile

COMMANDS = {"env": env, "check": check, "bench": bench, "profile": profile, "inspect": inspect}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m zipccl_hooks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        sub = commands.add_parser(
            name, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Carries out a command; its exit status."""
    parser = make_parser()
    args = parser.parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)  # for ranks that carry out the same command
    try:
        return COMMANDS[args.command].run(args)
    except Failure as failure:
        print(f"{parser.prog} {args.command}: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # who reads has seen enough, as head does
        sys.stdout = None  # or Python would complain when it flushes
        return 1


if __name__ == "__main__":
    sys.exit(main())
