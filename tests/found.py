"""All that was found of coordinates compared: levels, kernel maps, and the forms that maps were laid out in."""

import torch

from pumice.coords.segments import RUNS


def agree(got, want, exact=True):
    """Geometries that have the same coordinates, maps, storages of maps and levels; how many forms were compared.

    exact: otherwise what was found in a buffer may be laid out for the buffer's size (few taps sorted or not, rows of a
    tile, pairs of a group), and such forms are not compared.
    """
    assert torch.equal(got.coords, want.coords) and got.coords.dtype == torch.int32
    assert got.site == want.site
    assert set(got.maps) == set(want.maps) and set(got.levels) == set(want.levels)
    compared = 0
    for key, (there, outputs) in want.maps.items():
        here, found = got.maps[key]
        compared += maps_agree(here, there, exact)
        assert (found is None) == (outputs is None)
        for place, level in want.levels.items():
            assert (got.levels[place] is found) == (level is outputs)
        if outputs is not None:
            compared += agree(found, outputs, exact)
    return compared


def maps_agree(got, want, exact=True):
    assert torch.equal(got.table, want.table) and (got.relation, got.flipped) == (want.relation, want.flipped)
    assert (got.num_inputs, got.num_outputs) == (want.num_inputs, want.num_outputs)
    assert got.buffered is None and got.inputs is None
    here, there = forms_of(got), forms_of(want)
    assert here.keys() == there.keys() if exact else want.volume <= 8 or there.keys() <= here.keys()
    compared = 0
    for name, (tokens, arrays) in there.items():
        if not exact and (name not in here or _widths(here[name][1]) != _widths(arrays)):
            continue
        compared += 1
        assert here[name][0] == tokens
        for token, array, expected in zip(tokens, here[name][1], arrays, strict=True):
            assert array.dtype == expected.dtype and torch.equal(array, expected), (name, token)
        parts = dict(zip(tokens, zip(here[name][1], arrays, strict=True), strict=True))
        for token in (t for t in tokens if t.endswith("@tile")):
            tiles = len(parts[token.removesuffix("tile") + "rows"][1])
            assert torch.equal(*(RUNS.get(array, tiles).ends for array in parts[token])), (name, token)
    if ("totals", False) in want._storages:
        assert got._storages["totals", False] == want._storages["totals", False]
    return compared


def _widths(arrays):
    return [array.shape[1:] for array in arrays]


def forms_of(found):
    """What calls are passed holds the arrays of the forms, no others."""
    sides = {found.flipped: found, not found.flipped: found.transpose()}
    named = {key: sides[key[1]].get_cached(key[0]) for key in list(found._storages) if isinstance(key[0], tuple)}
    forms = {key: value for key, value in named.items() if key[0][0] == "form"}
    own = {id(array) for _, arrays in forms.values() for array in arrays}
    calls = {key: value for key, value in named.items() if key[0][0] == "default forms"}
    assert all(id(array) in own for _, arrays in calls.values() for array in arrays)
    return {**forms, **calls}
