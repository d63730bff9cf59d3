"""The server's part of sums of features, by the number of uploads: checks, addition, memory, bytes, and the solve.

    python tests/bench/feature_scale.py --out docs/results/feature_scale.json

A process per row. Uploads are those of 64 examples, made once; the server reads, adds and drops one at a time. Checks
are measured for 2,000 examples too: the rank of sums of fewer examples than features takes longest to check.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measure import say
from torch import Tensor

from strategies.core.fingerprint import packed
from strategies.statistics.choice import choose_penalty
from strategies.statistics.heads import Ridge
from strategies.statistics.sums import Statistics, from_arrays, to_arrays
from strategies.statistics.uploaded import FeatureSums

CLASSES, EXAMPLES, MANY, KINDS, CHECKED = 10, 64, 2000, 4, 3
ROWS = ((512, 10), (512, 100), (512, 1000), (512, 10_000), (1280, 10), (1280, 100), (1280, 1000),
        (1280, 10_000))  # fmt: skip


def upload(features: int, seed: int, examples: int = EXAMPLES) -> dict[str, Tensor]:
    """Return the upload of some examples with random features of norm 1, not negative."""
    rng = torch.Generator().manual_seed(seed)
    rows = torch.nn.functional.normalize(torch.rand(examples, features, generator=rng).double())
    return to_arrays(Statistics.of([(rows, torch.arange(examples) % CLASSES)], CLASSES, features))


def checked(features: int, examples: int) -> float:
    """Return the CPU seconds of the checks of an upload."""
    checker = FeatureSums(CLASSES, features, packed({"backbone": "random"}), non_negative=True)
    rest = {key: checker.get_buffer(key) for key in ("noise", "fingerprint", "probe")}
    uploads = [{**upload(features, seed, examples), **rest} for seed in range(CHECKED)]
    begun = time.process_time()
    for state in uploads:
        checker.check_upload(state)
    return (time.process_time() - begun) / CHECKED


def measured(features: int, count: int) -> dict[str, Any]:
    """Return one row, measured in this process."""
    torch.set_num_threads(1)
    kinds = [upload(features, seed) for seed in range(KINDS)]

    def arriving() -> Iterator[Statistics]:
        return (from_arrays(kinds[number % KINDS]) for number in range(count))

    checks = {key: checked(features, examples) for key, examples in (("check", EXAMPLES), ("check_many", MANY))}
    begun = time.process_time()
    total = Statistics.total(arriving())
    adding = (time.process_time() - begun) / count
    begun = time.process_time()
    Ridge(total).head(0.1)
    solve = time.process_time() - begun
    begun = time.process_time()
    choose_penalty({f"c{number}": from_arrays(kinds[number % KINDS]) for number in range(10)}, seed=0)
    return {
        "features": features, "uploads": count, "kib": sum(v.nbytes for v in kinds[0].values()) / 1024,
        **{f"{key}_cpu_s": seconds for key, seconds in checks.items()}, "add_cpu_s": adding, "solve_cpu_s": solve,
        "choice_cpu_s": time.process_time() - begun,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }  # fmt: skip


def main(arguments: argparse.Namespace) -> None:
    if arguments.row:
        say(json.dumps(measured(*arguments.row)))
        return
    out = Path(arguments.out)
    found = json.loads(out.read_text()) if out.exists() else {"torch": torch.__version__, "rows": []}
    known = {(row["features"], row["uploads"]) for row in found["rows"]}
    for row in [row for row in ROWS if row not in known]:
        command = [sys.executable, __file__, "--row", *map(str, row)]
        found["rows"].append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        say(str(found["rows"][-1]))
        out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="docs/results/feature_scale.json")
    parser.add_argument("--row", type=int, nargs=2, help="features and uploads of one row, measured in this process")
    main(parser.parse_args())
