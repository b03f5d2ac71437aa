"""pumice.compat.pointops against loops over points."""

import pytest
import torch

from pumice.compat import pointops
from pumice.errors import OptionError

NAMES = pointops.MODULES["pointops"]
torch.manual_seed(0)
XYZ, NEW = torch.randn(30, 3), torch.randn(9, 3)
OFFSET, NEW_OFFSET = torch.tensor([18, 30]), torch.tensor([5, 9], dtype=torch.int32)
BATCH, NEW_BATCH = torch.arange(30) >= 18, torch.arange(9) >= 5


def apart() -> torch.Tensor:
    return torch.cdist(NEW.double(), XYZ.double()).masked_fill(NEW_BATCH[:, None] != BATCH, torch.inf)


def test_offsets():
    assert NAMES["offset2batch"](OFFSET).tolist() == [0] * 18 + [1] * 12
    assert NAMES["batch2offset"](BATCH.long()).tolist() == [18, 30]


def test_knn_query():
    index, distance = NAMES["knn_query"](4, XYZ, OFFSET, NEW, NEW_OFFSET)
    wanted = apart().topk(4, largest=False)
    assert index.dtype == torch.int32 and torch.equal(index.long(), wanted.indices)
    torch.testing.assert_close(distance.double(), wanted.values, rtol=1e-5, atol=1e-6)
    index, distance = NAMES["knn_query"](14, XYZ, OFFSET)
    assert index[-1].tolist().count(-1) == 2 and distance[-1, -1] == 1e5


def test_ball_query():
    index, distance = NAMES["ball_query"](40, 1.5, 0.6, XYZ, OFFSET, NEW, NEW_OFFSET)
    few, _ = NAMES["ball_query"](3, 1.5, 0.6, XYZ, OFFSET, NEW, NEW_OFFSET)
    for n, far in enumerate(apart()):
        own = [p for p in far.argsort().tolist() if 0.6 <= far[p] < 1.5]
        assert index[n].tolist() == own + [-1] * (40 - len(own))
        torch.testing.assert_close(distance[n, : len(own)].double(), far[own], rtol=1e-5, atol=1e-6)
        # Evenly spaced by distance.
        wanted = own + [-1] * (3 - len(own)) if len(own) <= 3 else [own[int(len(own) / 3 * i)] for i in range(3)]
        assert few[n].tolist() == wanted
    # As in pointops, queries without offsets are not queries.
    assert torch.equal(
        NAMES["ball_query"](3, 1.5, 0.6, XYZ, OFFSET, NEW)[0], NAMES["ball_query"](3, 1.5, 0.6, XYZ, OFFSET)[0]
    )


def test_farthest_point_sampling():
    found = NAMES["farthest_point_sampling"](XYZ, OFFSET, torch.tensor([4, 7]))
    assert found.dtype == torch.int32 and found[0] == 0 and found[4] == 18
    assert BATCH[found.long()].tolist() == [False] * 4 + [True] * 3


def test_grouping():
    idx, feat = torch.tensor([[2, -1], [0, 1]], dtype=torch.int32), torch.randn(30, 4, requires_grad=True)
    found = NAMES["grouping"](idx, feat, XYZ, NEW[:2], with_xyz=True)
    assert found.shape == (2, 2, 7) and found[0, 1].tolist() == [0] * 7
    assert torch.equal(found[0, 0], torch.cat([XYZ[2] - NEW[0], feat[2]]))
    assert torch.equal(NAMES["grouping"](idx, feat, XYZ)[1, 1], feat[1])
    found.sum().backward()
    assert feat.grad[:4, 0].tolist() == [1, 1, 1, 0]
    grouped, idx = NAMES["knn_query_and_group"](feat, XYZ, OFFSET, NEW, NEW_OFFSET, None, 3, True)
    assert torch.equal(idx, NAMES["knn_query"](3, XYZ, OFFSET, NEW, NEW_OFFSET)[0])
    assert torch.equal(grouped, NAMES["grouping"](idx, feat, XYZ, NEW, True))


def test_interpolation():
    feat = torch.randn(30, 4, dtype=torch.float64)
    y = NAMES["interpolation"](XYZ.double(), NEW.double(), feat, OFFSET, NEW_OFFSET, 2)
    near = apart().topk(2, largest=False)
    weight = 1 / (near.values + 1e-8)
    weight = weight / weight.sum(1, keepdim=True)
    torch.testing.assert_close(y, (feat[near.indices] * weight[..., None]).sum(1))


def test_attention():
    n, m, h, c, entries = 6, 20, 2, 3, 4
    q, k, v, attn = (torch.randn(*s, requires_grad=True) for s in ((n, h, c), (n, h, c), (n, h, c), (m, h)))
    index0, index1 = torch.randint(0, n, (m,)).sort().values, torch.randint(0, n, (m,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(index0, minlength=n).cumsum(0)])
    tq, tk, rel = torch.randn(entries, h, c, 3), torch.randn(entries, h, c, 3), torch.randint(0, entries, (m, 3))
    scores = torch.stack([(q[i] * k[j]).sum(-1) for i, j in zip(index0, index1, strict=True)])
    torch.testing.assert_close(NAMES["attention_step1"](q, k, index0, index1), scores)
    torch.testing.assert_close(NAMES["attention_step1_v2"](q, k, index1, offsets, m), scores)
    entry = torch.stack([sum(tq[rel[i, a], :, :, a] for a in range(3)) for i in range(m)])
    placed = torch.stack([(q[i] * e).sum(-1) for i, e in zip(index0, entry, strict=True)])
    torch.testing.assert_close(NAMES["dot_prod_with_idx"](q, index0, tq, rel), placed)
    both = placed + NAMES["dot_prod_with_idx"](k, index1, tk, rel)
    torch.testing.assert_close(NAMES["dot_prod_with_idx_v2"](q, index0, k, index1, tq, tk, rel), both)
    torch.testing.assert_close(NAMES["dot_prod_with_idx_v3"](q, offsets, m, k, index1, tq, tk, rel), both)
    plain, relative = torch.zeros(n, h, c), torch.zeros(n, h, c)
    for i in range(m):
        plain[index0[i]] += attn[i, :, None] * v[index1[i]]
        relative[index0[i]] += attn[i, :, None] * (v[index1[i]] + entry[i])
    torch.testing.assert_close(NAMES["attention_step2"](attn, v, index0, index1), plain)
    step = NAMES["attention_step2_with_rel_pos_value"](attn, v, index0, index1, tq, rel)
    torch.testing.assert_close(step, relative)
    step = NAMES["attention_step2_with_rel_pos_value_v2"](attn, v, offsets, m, index1, tq, rel)
    torch.testing.assert_close(step, relative)
    step.sum().backward()
    assert v.grad is not None and attn.grad is not None


def test_what_is_not_there_is_told():
    with pytest.raises(OptionError, match="knn_query_and_group"):
        NAMES["query_and_group"]()
