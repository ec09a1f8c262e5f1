"""PyTorch's answer chooses the lowest of equal scores, as compiled code does."""

from __future__ import annotations

import torch

from bessemer.importer.reference import LowestFirst


def test_the_lowest_of_equal_scores_is_chosen() -> None:
    scores = torch.zeros(3, 400)
    scores[:, 390] = 1
    scores[1, 7] = 2
    wanted = [[390, 0, 1], [7, 390, 0], [390, 0, 1]]
    with LowestFirst():
        calls = [
            torch.topk(scores, 3),
            torch.topk(scores, k=3, dim=-1, sorted=False),
            scores.topk(3, dim=1),
            scores.T.topk(3, 0),
        ]
    for found in calls[:3]:
        assert found.indices.tolist() == wanted
        assert torch.equal(found.values, scores.gather(1, found.indices))
    assert calls[3].indices.T.tolist() == wanted
    least = torch.tensor([3.0, 1.0, 1.0, 2.0])
    with LowestFirst():  # the least ones are left to PyTorch
        assert least.topk(1, largest=False).values.item() == 1
