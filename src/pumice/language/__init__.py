"""Einsum statements, storage formats of sparse tensors, and rewrites of both. Symbolic: no torch here."""
