#!/usr/bin/env python3
"""Says which share of a decode's instructions goes into counting.

Counts instructions with callgrind, so that the answer does not depend on what else the machine does: what the functions
that count and publish figures take, with everything they call, by what the whole decode takes. The decode is the
difference of a long answer and a short one. An upper bound for the coordinator: a duration that is observed by a function
that is on the list itself is added twice. Counters of workers are single atomic additions beside their work and cannot be
told from it.

    tests/perf/metrics_cost.py --shimmer target/release/shimmer --container CONTAINER
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile

# Functions of the coordinator that do nothing but count; none of them is inlined.
COUNTING = (
    r"StepLoop>::publish",
    r"EngineStats>::step",
    r"Active>::token",
    r"Histogram>::observe",
)
BAR = 0.01


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shimmer", required=True, help="the release binary, with symbols")
    parser.add_argument("--container", required=True, help="container directory")
    parser.add_argument("--tokens", type=int, nargs=2, default=(4, 12), help="length of the short and the long answer")
    parser.add_argument("--isa", default="avx2", help="instruction set; valgrind knows no AVX-512")
    return parser.parse_args()


def profile(arguments, tokens, directory):
    """Instructions by function, with what they call, and of the whole program."""
    out = os.path.join(directory, f"{tokens}.callgrind")
    command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", arguments.shimmer, "generate", "--in-process",
               "--container", arguments.container, "--isa", arguments.isa, "--threads", "1", "--prompt", "The",
               "--max-tokens", str(tokens), "--ignore-eos", "--temperature", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    command = ["callgrind_annotate", "--inclusive=yes", "--threshold=100", out]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = re.findall(r"^\s*([\d,]+) \([^)]*\)\s+(.*)$", text, re.MULTILINE)
    counts = {}
    for count, name in rows:
        name = re.sub(r"'\d+", "", name)
        counts[name] = max(counts.get(name, 0), int(count.replace(",", "")))
    total = next((count for name, count in counts.items() if "PROGRAM TOTALS" in name), None)
    if total is None:
        sys.exit(f"callgrind_annotate has no total:\n{text[:2000]}")
    found = {}
    for pattern in COUNTING:
        found[pattern] = sum(count for name, count in counts.items() if re.search(pattern, name))
        if not found[pattern]:
            sys.exit(f"no function is named {pattern}: it was inlined, or the binary has no symbols")
    return found, total


def main():
    arguments = parse_arguments()
    short, long = arguments.tokens
    with tempfile.TemporaryDirectory() as directory:
        (before, all_before), (after, all_after) = (profile(arguments, n, directory) for n in (short, long))
    steps, decode = long - short, all_after - all_before
    counting = 0
    for pattern in COUNTING:
        spent = after[pattern] - before[pattern]
        counting += spent
        print(f"{pattern:24} {spent / steps:12.0f} instructions per step")
    share = counting / decode
    print(f"{'all of a decode step':24} {decode / steps:12.0f}")
    print(f"counting takes {share:.4%} of a decode step; the bar is {BAR:.0%}")
    sys.exit(0 if share <= BAR else 1)


if __name__ == "__main__":
    main()
