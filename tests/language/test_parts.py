"""Products of many factors as several statements."""

import pytest

from pumice.language.nodes import Range, indices_of
from pumice.language.parse import parse
from pumice.language.parts import MOST_INDICES, in_parts


def parts(text, size=9, **sizes):
    statement = parse(text, {})
    found = in_parts(statement, {name: Range(0, sizes.get(name, size)) for name in indices_of(statement)})
    return [str(part).partition(" ;")[0] for part in found]


CHAIN = " * ".join(f"A{n}[{'abcdefghijk'[n]},{'abcdefghijk'[n + 1]}]" for n in range(9))


def test_a_chain_is_summed_from_its_end():
    found = parts(f"O[a] = 2 * {CHAIN}")
    assert found[0] == "part[i] = A8[i,j]" and found[1] == "part_[h] = A7[h,i] * part[i]"
    assert found[-1] == "O[a] = 2 * A0[a,b] * A1[b,c] * A2[c,d] * A3[d,e] * A4[e,f] * part___[f]"
    assert all(len(set("abcdefghij") & set(part)) <= MOST_INDICES for part in found)


def test_every_range_is_declared():
    statement = parse("O[p] = I[p+r-1,a] * F[r,a] * A[a,b] * B[b,c] * C[c,d] * D[d,e] ; p:9", {})
    found = in_parts(statement, {name: Range(0, 9) for name in indices_of(statement)})
    assert len(found) > 1 and all([name for name, _ in part.ranges] == [*indices_of(part)] for part in found)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("O[a] = A[a,b] * B[b,c] * C[c,d]", {}),  # few indices
        (f"O[a] = {CHAIN}", {"size": 1 << 25}),  # parts that are too large
        (f"O[a] max= sum(b, c, d, e, f, g, h, i, j, {CHAIN})", {}),
        (f"O[a] += {CHAIN}", {}),
        (f"O[a,j] = {CHAIN} ; O:pattern(*)", {}),
        (f"O[a] = {CHAIN} * x[K[j]]", {}),
    ],
)
def test_what_is_not_divided(text, sizes):
    assert len(parts(text, **sizes)) == 1
