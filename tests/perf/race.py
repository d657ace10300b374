#!/usr/bin/env python3
"""Races shimmer against llama.cpp on the same weights and the same machine.

Both sides run in turn, round by round, because the speed of a shared machine drifts; each ratio is taken within its
round, and the median of the rounds counts. docs/perf/README.md says how to make the inputs. Needs only Python.

    tests/perf/race.py --shimmer target/release/shimmer --container CONTAINER --llama BUILD/bin --gguf MODEL-Q8_0.gguf
"""

import argparse
import contextlib
import json
import re
import socket
import statistics
import subprocess
import sys
import time

PREFILL, DECODE = 512, 128


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shimmer", required=True, help="the release binary")
    parser.add_argument("--container", required=True, help="container directory, q8g64 experts and trunk")
    parser.add_argument("--llama", required=True, help="directory of llama-bench and ggml-rpc-server")
    parser.add_argument("--gguf", required=True, help="the same checkpoint as Q8_0")
    parser.add_argument("--threads", default="1,2", help="thread counts of the in-process races")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="race only cells whose name contains this text")
    parser.add_argument("--out", help="file for the figures as JSON")
    return parser.parse_args()


def run(command):
    """Standard output of a command; its standard error is shown only if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Shimmer:
    def __init__(self, arguments):
        self.binary, self.container = arguments.shimmer, arguments.container

    def in_process(self, kind, threads):
        where = ["--container", self.container, "--in-process", "--threads", str(threads)]
        return self.generate(kind, where)

    def generate(self, kind, where):
        sizes = {
            "prefill": ["--prompt-tokens", str(PREFILL), "--max-tokens", "1"],
            "decode": ["--prompt-tokens", "1", "--max-tokens", str(DECODE + 1)],
        }[kind]
        # The first generation only warms up, as llama-bench does by itself.
        rest = ["--ignore-eos", "--temperature", "0", "--json", "--logits-digest=false", "--repeat", "2"]
        lines = run([self.binary, "generate", *where, *sizes, *rest]).splitlines()
        return json.loads(lines[-1])["timings"][f"{kind}_tokens_per_s"]

    @contextlib.contextmanager
    def cluster(self, workers, worker_threads, threads):
        """Processes on loopback; gives the flags that reach them."""
        with contextlib.ExitStack() as stack:
            addresses = []
            for number in range(workers):
                flags = ["--id", f"w{number}", "--threads", str(worker_threads)]
                addresses.append(stack.enter_context(self.process("worker", *flags)))
            flags = ["--workers", ",".join(addresses), "--threads", str(threads)]
            address = stack.enter_context(self.process("serve", *flags))
            yield ["--endpoint", address]

    @contextlib.contextmanager
    def process(self, role, *flags):
        command = [self.binary, role, "--container", self.container, "--listen", "127.0.0.1:0", *flags]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            first = child.stdout.readline()
            found = re.search(r"listening on (\S+)", first)
            if not found:
                sys.exit(f"{' '.join(command)} did not start: {first!r}")
            yield found.group(1)
        finally:
            child.terminate()
            child.wait(timeout=30)


class Llama:
    def __init__(self, arguments):
        self.directory, self.gguf = arguments.llama, arguments.gguf

    def in_process(self, kind, threads):
        return self.bench(kind, ["-t", str(threads)])

    def bench(self, kind, flags):
        sizes = {"prefill": ["-p", str(PREFILL), "-n", "0"], "decode": ["-p", "0", "-n", str(DECODE)]}[kind]
        command = [f"{self.directory}/llama-bench", "-m", self.gguf, *sizes, "-r", "1", "-o", "json", *flags]
        return json.loads(run(command))[0]["avg_ts"]

    @contextlib.contextmanager
    def rpc(self, servers):
        """Servers that hold the experts of a share of the layers each; gives the flags that use them."""
        ports = [free_port() for _ in range(servers)]
        children = []
        try:
            for port in ports:
                command = [f"{self.directory}/ggml-rpc-server", "-H", "127.0.0.1", "-p", str(port), "-t", "1"]
                children.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            for port in ports:
                wait_for(port)
            # Layers 0..14 on the first server, 15..29 on the second, as many more as there are servers.
            share = 30 // servers
            rules = []
            for number, port in enumerate(ports):
                layers = "|".join(str(layer) for layer in range(number * share, (number + 1) * share))
                rules.append(rf"blk\.({layers})\.ffn_.*_exps=RPC0[127.0.0.1:{port}]")
            addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
            yield ["-t", "1", "--rpc", addresses, "-ngl", "0", "-ot", ";".join(rules)]
        finally:
            for child in children:
                child.terminate()
                child.wait(timeout=30)


def wait_for(port):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    sys.exit(f"nothing listens on port {port}")


def race(name, rounds, sides):
    """Runs every side once per round; one warm-up round is not counted."""
    figures = {label: [] for label in sides}
    for round_number in range(rounds + 1):
        for label, measure in sides.items():
            value = measure()
            if round_number > 0:
                figures[label].append(value)
    first = next(iter(figures))
    medians = {label: statistics.median(values) for label, values in figures.items()}
    ratios = {
        label: statistics.median(ours / theirs for ours, theirs in zip(figures[first], values))
        for label, values in figures.items()
        if label != first
    }
    shown = ", ".join(f"{label} {medians[label]:.1f}" for label in figures)
    against = ", ".join(f"{ratio:.2f}x {label}" for label, ratio in ratios.items())
    print(f"{name}: {shown} tok/s; {first} is {against}", flush=True)
    return {"name": name, "tokens_per_s": figures, "median": medians, "ratio": ratios}


def main():
    arguments = parse_arguments()
    ours, theirs = Shimmer(arguments), Llama(arguments)
    results = []
    for threads in (int(text) for text in arguments.threads.split(",")):
        for kind in ("decode", "prefill"):
            name = f"{kind}, in process, {threads} thread{'s' if threads > 1 else ''}"
            if arguments.only in name:
                sides = {
                    "shimmer": lambda: ours.in_process(kind, threads),
                    "llama.cpp": lambda: theirs.in_process(kind, threads),
                }
                results.append(race(name, arguments.rounds, sides))
    name = "decode, two workers"
    if arguments.only in name:
        with ours.cluster(2, 1, 2) as endpoint, theirs.rpc(2) as rpc:
            sides = {
                "shimmer with two workers": lambda: ours.generate("decode", endpoint),
                "llama.cpp with experts on two rpc-servers": lambda: theirs.bench("decode", rpc),
                "shimmer in process": lambda: ours.in_process("decode", 2),
            }
            results.append(race(name, arguments.rounds, sides))
    if arguments.out:
        with open(arguments.out, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
