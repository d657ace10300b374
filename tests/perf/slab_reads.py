#!/usr/bin/env python3
"""Compares reads of experts with fio on the same files: same block size, same number of reads at a time.

Both sides run in turn, round by round, because the speed of a shared drive drifts; each ratio is taken within its round,
and the median of the rounds counts. Needs Python and fio. The container should be larger than the cache below a virtual
drive, or that is what is measured.

    cargo build --release -p shimmer-worker --example slab_bandwidth
    tests/perf/slab_reads.py --reader target/release/examples/slab_bandwidth --container CONTAINER
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

# Our way to read, fio's engine for it, reads at a time.
CELLS = [("pread", "psync", 4), ("pread", "psync", 8), ("uring", "io_uring", 8), ("uring", "io_uring", 64)]


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reader", required=True, help="the example slab_bandwidth")
    parser.add_argument("--container", required=True, type=pathlib.Path, help="container directory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=5, help="length of each measurement")
    parser.add_argument("--out", help="file for the figures as JSON")
    return parser.parse_args()


def run(command, environment=None):
    """Standard output of a command; its standard error is shown only if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(environment or {})})
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def ours(arguments, way, parallel):
    command = [arguments.reader, str(arguments.container), way, str(parallel), str(arguments.seconds)]
    found = json.loads(run(command))
    if found["used"] != way:
        sys.exit(f"{way} was asked for and {found['used']} used: nothing to compare")
    return found


def fio(arguments, engine, parallel, block, huge):
    """With `huge` its buffers lie in huge pages as our slots do: then a drive gets few large requests for a slab, not one
    for each megabyte of scattered pages."""
    environment = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if huge else {}
    files = ":".join(sorted(str(path) for path in arguments.container.glob("experts/*.safetensors")))
    threads, depth = (parallel, 1) if engine == "psync" else (1, parallel)
    command = ["fio", "--name=slabs", f"--filename={files}", "--readonly", "--rw=randread", "--direct=1", "--thread",
               f"--bs={block}", "--blockalign=4096", "--norandommap", f"--ioengine={engine}", f"--numjobs={threads}",
               f"--iodepth={depth}", "--time_based", f"--runtime={arguments.seconds}", "--group_reporting",
               "--iomem_align=2097152", "--output-format=json"]
    return json.loads(run(command, environment))["jobs"][0]["read"]["bw_bytes"] / 1e9


def main():
    arguments = parse_arguments()
    rounds = {cell: [] for cell in CELLS}
    for _ in range(arguments.rounds):
        for way, engine, parallel in CELLS:
            found = ours(arguments, way, parallel)
            beside, plain = (fio(arguments, engine, parallel, found["slab_bytes"], huge) for huge in (True, False))
            figures = {"fio_gb_s": beside, "fio_small_pages_gb_s": plain, "ratio": found["again_gb_s"] / beside}
            rounds[way, engine, parallel].append({**found, **figures})
    figures = []
    print(f"{'reads':30} {'shimmer':>8} {'fio':>8} {'ratio':>6}   {'ratios of the rounds':24} {'fio, 4 KiB pages':>16} "
          f"{'direct':>6} {'first reads':>11}")
    for (way, engine, parallel), found in rounds.items():
        middle = {key: statistics.median(one[key] for one in found)
                  for key in ("again_gb_s", "fio_gb_s", "ratio", "fio_small_pages_gb_s", "direct", "first_gb_s")}
        ratios = " ".join(f"{one['ratio']:.2f}" for one in found)
        name = f"{way} / {engine}, {parallel} at a time"
        print(f"{name:30} {middle['again_gb_s']:8.2f} {middle['fio_gb_s']:8.2f} {middle['ratio']:6.2f}   {ratios:24} "
              f"{middle['fio_small_pages_gb_s']:16.2f} {middle['direct']:6.2f} {middle['first_gb_s']:11.2f}")
        figures.append({"way": way, "engine": engine, "parallel": parallel, "median": middle, "rounds": found})
    if arguments.out:
        pathlib.Path(arguments.out).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
