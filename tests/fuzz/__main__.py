"""Thousands of malformed inputs for every decoder: ``python tests/fuzz --examples 5000 --seed 1``.

Each decoder runs in a process of its own, with bounded address space and bounded time per input. Exit status 1 if one
raised another error than a refusal, took too long, or took too much memory. A seed gives the same inputs again.
"""

from __future__ import annotations

import argparse
import sys

import torch
from fuzz_all import DECODERS
from fuzz_runs import run_apart


def main() -> int:
    """Fuzz the decoders that the command line names, print a line for each, and return the exit status."""
    parser = argparse.ArgumentParser(description="Try malformed inputs on everything that reads from outside.")
    parser.add_argument("--examples", type=int, default=1000, help="inputs per decoder: 1000")
    parser.add_argument("--seed", type=int, default=0, help="other seeds give other inputs: 0")
    parser.add_argument("--only", choices=DECODERS, action="append", help="this decoder (may be given again)")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    sys.stdout.write(
        f"{'decoder':<22}{'tried':>8}{'accepted':>10}{'refused':>9}{'crashed':>9}{'slowest':>11}{'memory':>13}\n"
    )
    failures, tried = [], 0
    for name in asked.only or DECODERS:
        row = run_apart(name, DECODERS[name], examples=asked.examples, number=asked.seed)
        tried += row["tried"]
        sys.stdout.write(
            f"{name:<22}{row['tried']:>8}{row['accepted']:>10}{row['refused']:>9}{row['crashed']:>9}"
            f"{row['slowest_ms']:>8.1f} ms{row['peak_mib']:>9.1f} MiB\n"
        )
        sys.stdout.flush()
        if row["failure"]:
            failures.append(f"{name}: {row['failure']}")
    sys.stdout.write(f"{tried} inputs, {len(failures)} decoders failed\n")
    for failure in failures:
        sys.stdout.write(f"\n{failure}\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
