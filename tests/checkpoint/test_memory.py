"""Tensors stream to their place one by one: the peak beside the model stays under 1.2 times the largest file."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from duetts.checkpoint_files import INDEX_NAME
from duetts.embedded import write_random_checkpoint

from ..dimensions import TEXT
from ..tiny import TINY

LOAD = """
import sys, torch
from pathlib import Path
from duetts.checkpoint import load_model

def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

def load(folder):
    return load_model(Path(folder), device=torch.device("cpu"), dtype=torch.float32, codec_dtype=torch.float32)

load(sys.argv[2])  # a small one first, for the memory that the libraries take once
Path("/proc/self/clear_refs").write_text("5")
before = peak()
model = load(sys.argv[1])
own = sum(p.nbytes for part in (model.dual_ar, model.codec) for p in part.parameters())
own += model.dual_ar.slow.head.nbytes + model.dual_ar.slow.rope.nbytes
print(peak() - before - own)
"""


@pytest.mark.parametrize("form", ["shards", "pickle"])
def test_peak_host_memory(tmp_path: Path, tiny_folder: Path, form: str) -> None:
    text = {**TEXT, "dim": 512, "intermediate_size": 4096, "n_layer": 4}
    recipe = replace(TINY, text=text, audio={**TINY.audio, "text_dim": 512}, dtype="float32")
    write_random_checkpoint(tmp_path, recipe)
    whole = tmp_path / "model.safetensors"
    tensors = load_file(whole)
    if form == "shards":
        names = sorted(tensors)
        places = {name: f"shard-{index % 2}.safetensors" for index, name in enumerate(names)}
        for shard in sorted(set(places.values())):
            save_file({name: tensors[name] for name in names if places[name] == shard}, tmp_path / shard)
        (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": places}))
        largest = max((tmp_path / shard).stat().st_size for shard in places.values())
    else:
        torch.save(tensors, tmp_path / "model.pth")
        largest = (tmp_path / "model.pth").stat().st_size
    whole.unlink()
    assert largest > 45e6
    command = [sys.executable, "-c", LOAD, str(tmp_path), str(tiny_folder)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(run.stdout) < 1.2 * largest, f"{int(run.stdout) / 1e6:.0f} MB beside the model, shard {largest / 1e6:.0f} MB"
