"""The codec on CUDA devices: Numba-CUDA kernels that write and read the bytes of format.py."""
