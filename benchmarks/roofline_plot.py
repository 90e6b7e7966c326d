"""The plot of throughput and first audio beside floor and target, from files of `duetts bench`. Needs matplotlib.

    python benchmarks/roofline_plot.py duetts=benchmarks/results/h200.json [PEER=FILE] --output docs/roofline.svg

The lines of floor and target are S2 Pro's on one H200; `--no-floors` leaves them out for other models and machines.
"""

import argparse
import json
from pathlib import Path

from duetts.bench.plot import draw


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("files", nargs="+", metavar="NAME=FILE")
    arguments.add_argument("--output", type=Path, required=True)
    arguments.add_argument("--no-floors", action="store_true")
    given = arguments.parse_args()
    named = (one.partition("=") for one in given.files)
    draw({name: json.loads(Path(path).read_text()) for name, _, path in named}, given.output, floors=not given.no_floors)


if __name__ == "__main__":
    main()
