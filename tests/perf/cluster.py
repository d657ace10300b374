#!/usr/bin/env python3
"""What workers in processes of their own cost, as shares of one process on the same machine.

All sides of a cell run in turn, round by round, because the speed of a shared machine drifts; each share is taken within
its round, and the median of the rounds counts. Needs only Python.

    tests/perf/cluster.py --shimmer target/release/shimmer --wire target/release/wire --container CONTAINER --rounds 10
"""

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import sys

from race import Shimmer

# Round trips that are put between coordinator and workers, milliseconds.
ROUND_TRIPS = [0.1, 0.3, 1, 5]


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shimmer", required=True, help="the release binary")
    parser.add_argument("--wire", required=True, help="the release build of tests/src/bin/wire.rs")
    parser.add_argument("--container", required=True, help="container directory, q8g64 experts and trunk")
    parser.add_argument("--threads", type=int, default=2, help="threads of the single process and of the coordinator")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", default="", help="run only cells whose name contains this text")
    parser.add_argument("--out", help="file for the figures as JSON")
    return parser.parse_args()


class Cluster(Shimmer):
    """Clusters on loopback."""

    def __init__(self, arguments):
        super().__init__(arguments)
        self.wire, self.threads = arguments.wire, arguments.threads

    @contextlib.contextmanager
    def delayed(self, address, round_trip_ms):
        """A proxy before a worker; gives its address."""
        command = [self.wire, address, str(round(round_trip_ms * 500))]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            found = re.search(r"listening on (\S+)", child.stdout.readline())
            if not found:
                sys.exit(f"{' '.join(command)} did not start")
            yield found.group(1)
        finally:
            child.kill()
            child.wait(timeout=30)

    @contextlib.contextmanager
    def workers(self, count, *flags, round_trip_ms=0):
        """A coordinator and workers of one thread each; gives what measures them."""
        with contextlib.ExitStack() as stack:
            addresses = []
            for number in range(count):
                own = ["--id", f"w{number}", "--threads", "1"]
                address = stack.enter_context(self.process("worker", *own))
                if round_trip_ms:
                    address = stack.enter_context(self.delayed(address, round_trip_ms))
                addresses.append(address)
            threads = ["--threads", str(self.threads)]
            serve = ["--workers", ",".join(addresses), *threads, *flags]
            endpoint = stack.enter_context(self.process("serve", *serve))
            yield lambda kind: self.generate(kind, ["--endpoint", endpoint])


def compare(name, kind, rounds, sides):
    """Runs every side once per round, in turn and in reverse turn; one warm-up round is not counted."""
    figures = {label: [] for label in sides}
    for round_number in range(rounds + 1):
        order = list(sides) if round_number % 2 else list(reversed(sides))
        for label in order:
            value = sides[label](kind)
            if round_number > 0:
                figures[label].append(value)
    first = next(iter(figures))
    rows = []
    for label, values in figures.items():
        shares = [ours / theirs for ours, theirs in zip(values, figures[first])]
        low, high = min(shares), max(shares)
        rows.append({"side": label, "tokens_per_s": statistics.median(values), "share": statistics.median(shares),
                     "from": low, "to": high, "all": values})
        print(f"| {name} | {label} | {statistics.median(values):.1f} | {statistics.median(shares):.3f} | {low:.2f} to {high:.2f} |",
              flush=True)
    return {"name": name, "rows": rows}


def main():
    arguments = parse_arguments()
    cluster = Cluster(arguments)
    results = []
    print("| cell | side | tokens/s | share of the first | shares of the rounds |\n|---|---|---|---|---|", flush=True)
    for kind in ("decode", "prefill"):
        in_process = {"in process": lambda kind: cluster.in_process(kind, arguments.threads)}
        if arguments.only in f"{kind}, processes":
            with cluster.workers(2) as two, cluster.workers(3) as three:
                sides = in_process | {"two workers": two, "three workers": three}
                results.append(compare(f"{kind}, processes", kind, arguments.rounds, sides))
        if arguments.only in f"{kind}, round trips":
            with contextlib.ExitStack() as stack:
                sides = {"two workers": stack.enter_context(cluster.workers(2))}
                for ms in ROUND_TRIPS:
                    sides[f"+ {ms} ms"] = stack.enter_context(cluster.workers(2, round_trip_ms=ms))
                results.append(compare(f"{kind}, round trips", kind, arguments.rounds, sides))
        if arguments.only in f"{kind}, audit":
            copies = ["--replicas", "2"]
            with cluster.workers(2, *copies) as plain, cluster.workers(2, *copies, "--audit", "1") as audited:
                sides = {"two workers, two copies": plain, "audit of 1 %": audited}
                results.append(compare(f"{kind}, audit", kind, arguments.rounds, sides))
    if arguments.out:
        with open(arguments.out, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
