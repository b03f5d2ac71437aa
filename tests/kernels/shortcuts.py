"""Shortcuts in Triton's interpreter: what it makes anew at every step is made once, and no result changes."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, reduce, wraps
from typing import Any

import numpy as np


def take() -> None:
    """In a process that interprets kernels and does nothing else with Triton."""
    _patch_once()
    _find_dtypes_once()
    _make_blocks_once()
    _tell_shapes_once()
    _take_what_fits()
    _take_integers()
    _ask_for_no_overflow()
    _reduce_rows()
    _multiply_bfloat16()


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


def _tell_shapes_once() -> None:
    """Shapes of blocks and tensors are objects of objects, for each number one."""
    from triton.language import core

    known: dict[tuple[int, ...], tuple[Any, Any, Any]] = {}

    def told(shape: tuple[int, ...]) -> tuple[Any, Any, Any]:
        """Of a block, and of a tensor; and how many entries that has."""
        if shape not in known:
            of_tensor = core.tuple([core.constexpr(n) for n in shape])
            known[shape] = core.tuple([*shape]), of_tensor, core.constexpr(core.validate_block_shape([*shape]))
        return known[shape]

    def begin_block(block: Any, element: Any, shape: Any) -> None:
        plain = tuple(n.value if type(n) is core.constexpr else n for n in shape)
        if not plain:
            raise TypeError("0d block_type is forbidden")
        block.element_ty, (block.shape, _, numel) = element, told(plain)
        block.numel = numel.value

    def begin_tensor(tensor: Any, handle: Any, kind: Any) -> None:
        tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
        _, tensor.shape, tensor.numel = told(tuple(kind.shape.values) if kind.is_block() else ())

    core.block_type.__init__ = begin_block
    core.block_type.name = property(lambda block: f"<{block.shape}, {block.element_ty}>")
    core.tensor.__init__ = begin_tensor


def _take_what_fits() -> None:
    """Operands of one shape need no broadcast, and what two blocks are broadcast to is known from the first time."""
    from triton import language as tl
    from triton.language.semantic import TritonSemantic

    broadcast = TritonSemantic.broadcast_impl_value
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}

    @wraps(broadcast)
    def fitting(semantic: Any, left: Any, right: Any) -> Any:
        a, b = left.type, right.type
        if not (a.is_block() and b.is_block()):
            return broadcast(semantic, left, right)
        shapes = (*a.shape.values,), (*b.shape.values,)
        if shapes[0] == shapes[1]:
            return left, right
        if (to := known.get(shapes)) is None:
            left, right = broadcast(semantic, left, right)
            if len(shapes[0]) == len(shapes[1]):
                known[shapes] = left.type.shape.values
            return left, right
        make, build = semantic.tensor, semantic.builder.create_broadcast
        if (*to,) != shapes[0]:
            left = make(build(left.handle, to), tl.block_type(a.scalar, to))
        if (*to,) != shapes[1]:
            right = make(build(right.handle, to), tl.block_type(b.scalar, to))
        return left, right

    TritonSemantic.broadcast_impl_value = fitting


def _take_integers() -> None:
    """Signed integers of one type are cast to none, and a constant among them is made once."""
    from triton import language as tl
    from triton.language.semantic import TritonSemantic

    check = TritonSemantic.binary_op_type_checking_impl
    signed, small = ("int32", "int64"), range(-(1 << 31), 1 << 31)
    made: dict[tuple[int, str, Any], Any] = {}

    def constant(semantic: Any, value: int, like: Any) -> Any:
        shape = like.shape.values if like.is_block() else None
        key = (value, like.scalar.name, None if shape is None else (*shape,))
        if key not in made:
            scalar = semantic.scalar_constant(value, dtype=like.scalar)
            made[key] = scalar if shape is None else semantic.splat(scalar, shape)
        return made[key]

    @wraps(check)
    def taken(semantic: Any, left: Any, right: Any, *rules: Any, **more: Any) -> Any:
        if type(left) is tl.tensor and left.dtype.name in signed:
            if type(right) is int and right in small:
                return left, constant(semantic, right, left.type)
            if type(right) is tl.tensor and right.dtype.name == left.dtype.name:
                return semantic.broadcast_impl_value(left, right)
        return check(semantic, left, right, *rules, **more)

    bits = TritonSemantic.bitwise_op_type_checking_impl

    @wraps(bits)
    def bits_taken(semantic: Any, left: Any, right: Any) -> Any:
        if type(left) is type(right) is tl.tensor and right.dtype.name == left.dtype.name in ("int1", *signed):
            return semantic.broadcast_impl_value(left, right)
        return bits(semantic, left, right)

    TritonSemantic.binary_op_type_checking_impl = taken
    TritonSemantic.bitwise_op_type_checking_impl = bits_taken


def _ask_for_no_overflow() -> None:
    """That 32 bits have room for each sum is asserted for debugging alone: what would be asserted is not worked out."""
    from triton.runtime import interpreter

    interpreter.interpreter_semantic.builder.options = replace(
        interpreter.interpreter_semantic.builder.options, sanitize_overflow=False
    )


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


def _multiply_bfloat16() -> None:
    """The one result that changes: the interpreter keeps bfloat16 as integers of 16 bits, and multiplies these."""
    from triton import language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    multiply = builder.create_dot

    def widened(side: Any) -> Any:
        if side.dtype.scalar != tl.bfloat16:
            return side
        return interpreter.TensorHandle((side.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def multiplied(self: Any, a: Any, b: Any, *given: Any) -> Any:
        return multiply(self, widened(a), widened(b), *given)

    builder.create_dot = multiplied
