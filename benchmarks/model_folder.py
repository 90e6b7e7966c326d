"""A model folder for speed tests: S2 Pro's dimensions for `--load-format dummy`, or with `--tiny` a small model for trials.

    python benchmarks/model_folder.py FOLDER [--tiny]

The tokenizer is one of bytes, as the real one cannot be had without its licence: a text takes about four times as many
positions as with the real one. Everything else has the true shapes. The end of speech is never drawn from either model.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from duetts.text.byte_level import write_byte_tokenizer

ROOT = Path(__file__).parents[1]


def write_s2_pro(folder: Path) -> None:
    """Configuration and tokenizer. The codec's defaults are S2 Pro's."""
    config = json.loads((ROOT / "tests" / "data" / "s2_pro_config.json").read_text())
    tokens = write_byte_tokenizer(folder / "tokenizer.json", 4096)
    tokens.pop("vocab_size")  # all 155,776 rows are there, most of them never used
    (folder / "config.json").write_text(json.dumps(config | tokens, indent=1) + "\n")


def write_tiny(folder: Path) -> None:
    """Weights too."""
    sys.path.insert(0, str(ROOT))
    from tests.tiny import TINY

    from duetts.embedded import write_random_checkpoint

    write_random_checkpoint(folder, replace(TINY, text={**TINY.text, "max_seq_len": 4096}, end_scale=0.0, std=1.0))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--tiny", action="store_true")
    given = arguments.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    (write_tiny if given.tiny else write_s2_pro)(given.folder)


if __name__ == "__main__":
    main()
