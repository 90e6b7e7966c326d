"""Filtering, drawing and the random numbers of a request."""

import torch
from torch import Tensor

from duetts.kernels.reference import candidates, draw, penalise, uniforms
from duetts.models.sampling import PENALTY_WINDOW, RowSampler, SamplingRows
from duetts.types import Sampling

CPU = torch.device("cpu")
NEVER = torch.full((1, PENALTY_WINDOW), -1)


def rows(*values: Sampling, seeds: tuple[int, ...] | None = None) -> SamplingRows:
    return SamplingRows.of(values, seeds or tuple(range(len(values))), CPU)


def kept(logits: Tensor, top_p: float, top_k: int) -> set[int]:
    ordered, ids = candidates(logits[None], torch.tensor([top_p]), torch.tensor([top_k]), len(logits))
    return set(ids[0][ordered[0] > -torch.inf].tolist())


def test_the_token_that_crosses_top_p_is_dropped_but_never_the_first() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert kept(logits, 0.81, 0) == {0, 1}
    assert kept(logits, 0.79, 0) == {0}
    assert kept(logits, 0.1, 0) == {0}
    assert kept(logits, 1.0, 3) == {0, 1, 2}
    assert kept(logits, 1.0, 0) == {0, 1, 2, 3}


def test_temperature_does_not_change_who_is_a_candidate() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    ordered, ids = candidates(logits, torch.tensor([0.9]), torch.tensor([0]), 4)
    noise = uniforms(torch.arange(2000), torch.zeros(2000, dtype=torch.int64), 0, 4)
    hot = draw(ordered.expand(2000, -1), ids.expand(2000, -1), torch.full((2000,), 50.0), noise)
    assert set(hot.tolist()) == {0, 1}


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    ordered, ids = candidates(probabilities.log()[None], torch.tensor([1.0]), torch.tensor([0]), 4)
    count = 20000
    noise = uniforms(torch.full((count,), 9), torch.arange(count), 0, 4)
    drawn = draw(ordered.expand(count, -1), ids.expand(count, -1), torch.ones(count), noise)
    shares = torch.bincount(drawn, minlength=4) / count
    assert (shares - probabilities).abs().max() < 0.015


def test_temperature_zero_takes_the_likeliest_and_ignores_repeats() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    recent = torch.full((1, PENALTY_WINDOW), 1)
    sampler = RowSampler(rows(Sampling(temperature=0.0)), torch.tensor([20]), recent, 3)
    assert sampler.main(logits).tolist() == [1]
    assert sampler.residual(1, logits).tolist() == [1]


def test_uniforms_are_even_and_unlike_each_other() -> None:
    seeds, frames = torch.tensor([1, 2, -(2**63), 2**63 - 1]), torch.tensor([0, 0, 5, 5])
    table = torch.stack([uniforms(seeds, frames, index, 64) for index in range(11)], dim=1)
    assert table.shape == (4, 11, 64)
    assert ((table > 0) & (table < 1)).all()
    assert abs(table.mean().item() - 0.5) < 0.02
    assert len(set(table.flatten().tolist())) > 0.99 * table.numel()
    neighbours = uniforms(torch.arange(1000), torch.zeros(1000, dtype=torch.int64), 0, 1)[:, 0]
    assert abs(torch.corrcoef(torch.stack((neighbours[:-1], neighbours[1:])))[0, 1].item()) < 0.1
    frames = uniforms(torch.zeros(1000, dtype=torch.int64), torch.arange(1000), 0, 1)[:, 0]
    assert abs(torch.corrcoef(torch.stack((frames[:-1], frames[1:])))[0, 1].item()) < 0.1


def test_no_uniform_rounds_to_one() -> None:
    """With 24 bits this one did: its logarithm was 0, and a draw of a dropped candidate 0 / 0, which won."""
    largest = uniforms(torch.tensor([16]), torch.tensor([734]), 2, 57)[0, 56]
    assert 0.999999 < largest < 1
    ordered, ids = candidates(torch.tensor([[2.0, 1.0]]), torch.tensor([0.5]), torch.tensor([1]), 2)
    assert draw(ordered, ids, torch.ones(1), torch.stack((largest / 2, largest))[None]).item() == 0


def test_uniforms_stay_what_they_are() -> None:
    """The numbers are part of the promise that a seed sounds the same in the next version."""
    table = torch.cat([uniforms(torch.tensor([42]), torch.tensor([7]), index, 2) for index in range(2)])
    expected = [[0.47451287508010864, 0.8884482979774475], [0.3425366282463074, 0.8508010506629944]]
    assert table.tolist() == expected


def test_a_draw_does_not_depend_on_the_rows_beside_it() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 300, generator=generator)
    values = [Sampling(0.7), Sampling(1.3, top_p=0.5, top_k=5), Sampling(1.0, top_k=0)]
    frame, recent = torch.tensor([3, 4, 5]), NEVER.expand(3, -1)
    together = RowSampler(rows(*values, seeds=(5, 6, 7)), frame, recent, 299).main(logits)
    for row, value in enumerate(values):
        alone = RowSampler(rows(value, seeds=(5 + row,)), frame[row : row + 1], NEVER, 299)
        assert alone.main(logits[row : row + 1]) == together[row]


def test_repetition_is_redrawn_once_but_not_for_the_first_frame_or_the_end() -> None:
    sharp = torch.tensor([[0.0, 8.0, 7.9, 7.8]])
    repeats = {}
    for frame in (1, 2):
        recent = NEVER.clone()
        recent[0, -1] = 1  # choice 1 was the frame before: at frame 1 that is the first frame, which does not count
        second = []
        for seed in range(200):
            row = rows(Sampling(temperature=0.01), seeds=(seed,))
            second.append(RowSampler(row, torch.tensor([frame]), recent, 3).main(sharp).item())
        repeats[frame] = second.count(1)
    assert repeats[1] == 200
    assert 40 < repeats[2] < 160  # the second draw is at temperature 1 and may repeat too
    end = torch.tensor([[0.0, 0.0, 0.0, 9.0]])
    recent = torch.full((1, PENALTY_WINDOW), 3)
    assert RowSampler(rows(Sampling()), torch.tensor([20]), recent, 3).main(end).item() == 3


def test_penalty_lowers_recent_choices_whatever_their_sign() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0]])
    recent = torch.tensor([[-1, 0, 1]])
    assert penalise(logits, recent, torch.tensor([2.0])).tolist() == [[1.0, -4.0, 1.0]]
    assert penalise(logits, torch.tensor([[-1, -1]]), torch.tensor([2.0])).tolist() == logits.tolist()
