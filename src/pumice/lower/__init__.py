"""Lowering of einsum statements and convolutions to kernels and library calls, per device."""
