"""Collectives, plain against compressed: ``python -m zipccl_hooks bench``, for what starts a file.

python benchmarks/bench_collectives.py                          # two GPUs, over each transport; else gloo
torchrun --nproc-per-node 2 benchmarks/bench_collectives.py     # NCCL if there are GPUs, else gloo
python examples/slow_link.py --rate 1gbit -- benchmarks/bench_collectives.py
"""

import sys

from zipccl_hooks.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
