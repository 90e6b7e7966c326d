"""The memories of both decoders as an engine on a GPU uses them: batches of every size up to the slots, in any order."""

import pytest
import torch

from duetts.model_config import ModelConfig
from duetts.models.dual_ar import DualAR
from duetts.models.kv_cache import CacheRows, DecodeRows, FrameCache, KVCache, SeparateRows
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

    def next_frames(batch: list[int], together: bool) -> torch.Tensor:
        cache = KVCache(config.slow, 12, 2, device=CPU, dtype=torch.float64)
        frame_cache = FrameCache(config.fast, 6, device=CPU, dtype=torch.float64)
        sampling = SamplingRows.of([Sampling()] * len(batch), batch, CPU)
        never = torch.full((len(batch), PENALTY_WINDOW), -1)
        tables = torch.tensor([[slot, 11 - slot] for slot in range(6)], dtype=torch.int32)
        frames = columns[batch]
        for frame in range(3):
            positions = torch.full((len(batch),), frame)
            sampler = RowSampler(sampling, positions, never, config.num_semantic)
            rows: CacheRows = SeparateRows(cache, tables[batch].tolist(), [frame] * len(batch), 1)
            if together:
                rows = DecodeRows(cache, tables, torch.tensor(batch), positions)
            frames = model.next_frame(frames, rows, frame_cache, sampler)
        return frames

    together = next_frames(slots, together=True)
    assert together.shape == (len(slots), 5)
    for row, slot in enumerate(slots):
        assert torch.equal(next_frames([slot], together=False)[0], together[row])
