"""The memories of both decoders as an engine on a GPU uses them: batches of every size up to the slots, in any order."""

import pytest
import torch

from duetts.model_config import ModelConfig
from duetts.models.dual_ar import DualAR
from duetts.models.kv_cache import FrameCache, KVCache
from duetts.models.sampling import PENALTY_WINDOW, RowSampler, SamplingRows
from duetts.types import Sampling

from ..dimensions import CONFIG

CPU = torch.device("cpu")


@pytest.mark.parametrize("slots", [[0], [4, 1, 3], [0, 1, 2, 3, 4, 5]], ids=str)
@torch.inference_mode()
def test_a_frame_of_few_rows_equals_one_row_at_a_time(slots: list[int]) -> None:
    generator = torch.Generator().manual_seed(2)
    config = ModelConfig.from_dict(CONFIG)
    model = DualAR(config, 32).double()
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.2, generator=generator)
    model.prepare(64)
    columns = torch.randint(0, 32, (6, 5), generator=generator)
    columns[:, 0] = columns[:, 1] + config.semantic_start

    def next_frames(batch: list[int], row_by_row: bool) -> torch.Tensor:
        cache = KVCache(config.slow, 12, 2, device=CPU, dtype=torch.float64, row_by_row=row_by_row)
        frame_cache = FrameCache(config.fast, 6, device=CPU, dtype=torch.float64)
        sampling = SamplingRows.of([Sampling()] * len(batch), batch, CPU)
        never = torch.full((len(batch), PENALTY_WINDOW), -1)
        frames = columns[batch]
        for frame in range(3):
            sampler = RowSampler(sampling, torch.full((len(batch),), frame), never, 4, config.num_semantic + 1)
            rows = cache.rows([[slot, 11 - slot] for slot in batch], [frame] * len(batch), 1)
            frames = model.next_frame(frames, rows, frame_cache, sampler)
        return frames

    together = next_frames(slots, row_by_row=False)
    assert together.shape == (len(slots), 5)
    for row, slot in enumerate(slots):
        assert torch.equal(next_frames([slot], row_by_row=True)[0], together[row])
