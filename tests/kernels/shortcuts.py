"""Shortcuts in Triton's interpreter: what it makes anew at every step is made once, and no result changes."""

from __future__ import annotations

from functools import lru_cache, reduce, wraps
from typing import Any

import numpy as np


def take() -> None:
    """In a process that interprets kernels and does nothing else with Triton."""
    _patch_once()
    _find_dtypes_once()
    _make_blocks_once()
    _reduce_rows()


class _Kept:
    """In place of the patches of one launch, which it takes back: they stay, as nothing here is compiled."""

    @staticmethod
    def restore() -> None:
        pass


def _patch_once() -> None:
    """Triton's language becomes the interpreter's, by hundreds of patches at every call of a function in a kernel."""
    from triton import language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    patched: set[frozenset[int]] = set()

    def once(fn: Any) -> type[_Kept]:
        # The modules that the function knows the language by, and that are patched for it.
        modules = frozenset(id(value) for value in fn.__globals__.values() if value is tl or value is tl.core)
        if modules not in patched:
            patch(fn)
            patched.add(modules)
        return _Kept

    interpreter._patch_lang = once


def _find_dtypes_once() -> None:
    from triton import language as tl
    from triton.runtime import interpreter

    find = interpreter._get_np_dtype
    of_scalar = lru_cache(find)

    def once(kind: Any) -> Any:
        # Types of pointers and blocks have no hash; a block is what its scalar is.
        scalar = kind.scalar
        return of_scalar(scalar) if type(scalar) is tl.dtype else find(kind)

    interpreter._get_np_dtype = once


def _make_blocks_once() -> None:
    from triton import language as tl

    make = tl.block_type.with_element_ty
    made: dict[tuple[Any, ...], Any] = {}

    def once(block: Any, scalar: Any) -> Any:
        if type(scalar) is not tl.dtype:
            return make(block, scalar)
        key = (*block.shape, scalar)
        if key not in made:
            made[key] = make(block, scalar)
        return made[key]

    tl.block_type.with_element_ty = once


def _reduce_rows() -> None:
    """Reductions by a function of the kernel combine whole rows, in the same order, instead of single elements."""
    from triton.runtime import interpreter

    by_elements = interpreter.ReduceOps.generic_reduce

    @wraps(by_elements)
    def by_rows(ops: Any, inputs: Any) -> Any:
        (values, *others), axis = inputs, ops.axis
        if others or axis is None or values.handle.data.ndim < 2:
            return by_elements(ops, inputs)
        rows = [ops.to_tensor(row, values.dtype) for row in np.moveaxis(values.handle.data, axis, 0)]
        found = reduce(ops.combine_fn.fn, rows).handle.data
        return [ops.to_tensor(np.expand_dims(found, axis) if ops.keep_dims else found, values.dtype)]

    interpreter.ReduceOps.generic_reduce = by_rows
