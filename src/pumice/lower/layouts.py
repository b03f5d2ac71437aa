"""Operator that builds a form of a map in traced code: form(table, inputs, flipped, RELATION, name) -> arrays.

The arrays are those of the named form, part by part, with data-dependent sizes. It is a pure function of its arguments,
as the operators of pumice.coords are.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pumice.coords import KernelMap
from pumice.coords.traced_ops import RELATION, dynamic, own, register, relation_of
from pumice.lower import maps


def _form(table: Tensor, inputs: int, flipped: bool, *relation: Any) -> list[Tensor]:
    *fields, name = relation
    found = KernelMap(relation_of(*fields), table, inputs, table.shape[0])
    found = found.transpose() if flipped else found
    return own(maps.read(found, maps.preferred_form(found, name))[1], table)


def _form_fake(table: Tensor, inputs: int, flipped: bool, *relation: Any) -> list[Tensor]:
    form = maps.FORMS[relation[-1]]
    made = []
    for _ in range(form.stored.parts):
        sizes = {axis: dynamic() for axis in dict.fromkeys("".join(form.axes.values()))}
        made += [table.new_empty([sizes[axis] for axis in axes]) for axes in form.axes.values()]
    return made


register(f"form(Tensor table, SymInt inputs, bool flipped, {RELATION}, str name) -> Tensor[]", _form, _form_fake)
