#!/usr/bin/env python3
"""What figures and traces cost, as shares of a decode step of the same run.

Two parts, because neither is enough alone:

* Instructions, counted by callgrind, so that the answer does not depend on what else the machine does: a coordinator and
  a worker are run under it with and without a collector, a dead one too, and the decode is the difference of a long answer
  and a short one. What cannot be turned off (counting) is found by the names of its functions, with everything they call;
  every name must match something. Counters of workers are single atomic additions beside their work and cannot be told
  from it.
* Time: a coordinator and two workers, whose pages are read once a second or not, and whose requests are traced or not, in
  turn and in reverse turn within the same processes; ratios within a round, their median, and an interval of it.

"Defaults" are pages that are read once a second and 1 % of the requests traced. What a traced request costs is measured
with all of them traced, and counts by a hundredth: a run of a few requests has none of the 1 %.

    tests/perf/metrics_cost.py --shimmer target/release/shimmer --container CONTAINER
"""

import argparse
import contextlib
import http.server
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

from race import Shimmer, free_port, run, wait_for

# Functions of the coordinator that do nothing but count; none of them is inlined. An upper bound: a duration that is
# observed by one that is on the list itself is added twice.
COUNTING = (r"StepLoop>?::publish", r"EngineStats>?::step", r"Active>?::token", r"Histogram>?::observe")
SAMPLED = 0.01
BAR = 0.01


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shimmer", required=True, help="the release binary, with symbols")
    parser.add_argument("--container", required=True, help="container directory")
    parser.add_argument("--tokens", type=int, nargs=2, default=(4, 20), help="length of the short and the long answer under callgrind")
    parser.add_argument("--isa", default="avx2", help="instruction set under callgrind; it knows no AVX-512")
    parser.add_argument("--rounds", type=int, default=30, help="rounds of the runs that are timed")
    parser.add_argument("--answer", type=int, default=160, help="tokens of an answer that is timed")
    parser.add_argument("--only", choices=("instructions", "time"), help="one part only")
    parser.add_argument("--counted", help="a file of --only instructions --out, instead of counting again")
    parser.add_argument("--out", help="file for the figures as JSON")
    return parser.parse_args()


class Sink(http.server.BaseHTTPRequestHandler):
    """A collector that takes everything and keeps nothing."""

    protocol_version = "HTTP/1.1"
    taken = 0

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        Sink.taken += 1
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def collector():
    """The address of a collector that answers."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Sink)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


def read_page(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read()
    if b"shimmer_" not in text:
        sys.exit(f"the page of port {port} has no figures:\n{text[:500]!r}")


class Cluster(Shimmer):
    """A coordinator and workers with pages of figures."""

    def __init__(self, arguments):
        super().__init__(arguments)
        self.pages, self.processes, self.endpoint = [], [], None

    @contextlib.contextmanager
    def started(self, workers, threads, endpoint, before=lambda _: [], flags=()):
        """`before` gives the words before each command, by the name of its role."""
        traces = ["--otlp-endpoint", endpoint, "--otlp-protocol", "http"] if endpoint else []
        with contextlib.ExitStack() as stack:
            def start(role, name, *more):
                listen, page = free_port(), free_port()
                command = [*before(name), self.binary, role, "--container", self.container, "--threads", str(threads)]
                command += ["--listen", f"127.0.0.1:{listen}", "--metrics-listen", f"127.0.0.1:{page}", *traces, *flags, *more]
                child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                stack.callback(child.wait, timeout=120)
                stack.callback(child.terminate)
                self.wait_ready(child, page)
                self.pages.append(page)
                self.processes.append(child)
                return f"127.0.0.1:{listen}"

            addresses = [start("worker", f"worker-{number}", "--id", f"w{number}") for number in range(workers)]
            sample = ["--trace-sample", "0"] if endpoint else []
            self.endpoint = start("serve", "serve", "--workers", ",".join(addresses), *sample)
            yield self

    @staticmethod
    def wait_ready(child, page):
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and child.poll() is None:
            with contextlib.suppress(OSError):
                read_page(page)
                return
            time.sleep(0.1)
        sys.exit(f"{' '.join(child.args)} does not serve")

    def answer(self, tokens, endpoint=None):
        """Seconds of a decode step of an answer. With an endpoint the caller says that its request is traced."""
        command = [self.binary, "generate", "--endpoint", self.endpoint, "--prompt-tokens", "16", "--max-tokens", str(tokens + 1)]
        command += ["--ignore-eos", "--temperature", "0", "--json", "--logits-digest=false"]
        if endpoint:
            command += ["--otlp-endpoint", endpoint, "--otlp-protocol", "http", "--trace-sample", "100"]
        return json.loads(run(command).splitlines()[-1])["timings"]["decode_ms"] / 1e3 / tokens


class Counted:
    """A coordinator and a worker of one thread each under callgrind."""

    def __init__(self, arguments, endpoint):
        self.arguments, self.endpoint = arguments, endpoint
        self.dumps = 0

    def counts(self):
        """Instructions of a decode step, of reading both pages, and by counting function."""
        short, long = self.arguments.tokens
        with tempfile.TemporaryDirectory() as self.directory:
            before = lambda name: ["valgrind", "--tool=callgrind", f"--callgrind-out-file={self.directory}/{name}"]
            flags = ["--isa", self.arguments.isa]
            with Cluster(self.arguments).started(1, 1, self.endpoint, before, flags) as cluster:
                cluster.answer(short, self.endpoint)
                self.dump(cluster)
                profiles = {}
                for name, act in {
                    "short": lambda: cluster.answer(short, self.endpoint),
                    "long": lambda: cluster.answer(long, self.endpoint),
                    "idle": lambda: None,
                    "pages": lambda: [read_page(page) for page in cluster.pages],
                }.items():
                    act()
                    # The last spans are on their way.
                    time.sleep(5)
                    profiles[name] = self.dump(cluster)
            steps = long - short
            step = {name: (sum_of(profiles["long"], name) - sum_of(profiles["short"], name)) / steps for name in ["total", *COUNTING]}
            for pattern in COUNTING:
                if step[pattern] <= 0:
                    sys.exit(f"no function is named {pattern}: it was inlined, or the binary has no symbols")
            step["pages"] = sum_of(profiles["pages"], "total") - sum_of(profiles["idle"], "total")
            return step

    def dump(self, cluster):
        """The profiles since the last call, of each process."""
        self.dumps += 1
        profiles = []
        for child, name in zip(cluster.processes, ["worker-0", "serve"]):
            run(["callgrind_control", "-d", str(child.pid)])
            file = f"{self.directory}/{name}.{self.dumps}"
            deadline = time.monotonic() + 60
            while not os.path.exists(file) and time.monotonic() < deadline:
                time.sleep(0.2)
            profiles.append(profile(file))
        return profiles


def profile(file):
    """Instructions by function, with what they call, and of everything."""
    text = run(["callgrind_annotate", "--inclusive=yes", "--threshold=100", file])
    counts = {}
    for count, name in re.findall(r"^\s*([\d,]+) \([^)]*\)\s+(.*)$", text, re.MULTILINE):
        name = re.sub(r"'\d+", "", name)
        counts[name] = max(counts.get(name, 0), int(count.replace(",", "")))
    total = next((count for name, count in counts.items() if "PROGRAM TOTALS" in name), None)
    if total is None:
        sys.exit(f"callgrind_annotate has no total:\n{text[:2000]}")
    found = {pattern: sum(count for name, count in counts.items() if re.search(pattern, name)) for pattern in COUNTING}
    return {"total": total, **found}


def sum_of(profiles, name):
    return sum(profile[name] for profile in profiles)


def instructions(arguments, live, dead):
    """Counts, and says the shares. Returns the figures."""
    found = {}
    for name, endpoint in {"no collector": None, "a collector": live, "a dead collector": dead}.items():
        found[name] = Counted(arguments, endpoint).counts()
        print(f"callgrind: {name}: {found[name]}", file=sys.stderr, flush=True)
    plain = found["no collector"]
    step = plain["total"]
    print("| instructions, of a decode step | | share |\n|---|---|---|")
    print(f"| all of it, coordinator and worker | {step:,.0f} | 1 |")
    for pattern in COUNTING:
        name = pattern.replace(">?", "")
        print(f"| `{name}` | {plain[pattern]:,.0f} | {plain[pattern] / step:.4%} |")
    for name in ["a collector", "a dead collector"]:
        more = found[name]["total"] - step
        print(f"| the request is traced, {name} | {more:,.0f} | {more / step:.2%} |")
    print(f"| reading both pages once | {plain['pages']:,.0f} | {plain['pages'] / step:.2%} |", flush=True)
    return found


def timed(arguments, live, dead):
    """Seconds of a decode step by side and round."""
    figures = {}
    with contextlib.ExitStack() as stack:
        clusters = {endpoint: stack.enter_context(Cluster(arguments).started(2, 1, endpoint)) for endpoint in (live, dead)}

        def reading(cluster, endpoint=None):
            # Half a second after the start, and once a second from then on.
            ended = threading.Event()

            def read():
                wait = 0.5
                while not ended.wait(wait):
                    wait = 1
                    for page in cluster.pages:
                        read_page(page)

            thread = threading.Thread(target=read)
            thread.start()
            try:
                return cluster.answer(arguments.answer, endpoint)
            finally:
                ended.set()
                thread.join()

        sides = {
            "nothing": lambda: clusters[live].answer(arguments.answer),
            "pages read": lambda: reading(clusters[live]),
            "all requests traced": lambda: clusters[live].answer(arguments.answer, live),
            "dead collector, none traced": lambda: clusters[dead].answer(arguments.answer),
            "dead collector, all requests traced": lambda: clusters[dead].answer(arguments.answer, dead),
        }
        for round_number in range(arguments.rounds + 1):
            order = list(sides) if round_number % 2 else list(reversed(sides))
            for name in order:
                value = sides[name]()
                # The first round warms up.
                if round_number > 0:
                    figures.setdefault(name, []).append(value)
    return figures


def interval(ratios):
    """The middle 95 % of medians of as many rounds, drawn from them."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[-51]


def main():
    arguments = parse_arguments()
    figures, shares = {}, {}
    dead = f"http://127.0.0.1:{free_port()}"
    with collector() as live:
        if arguments.counted:
            with open(arguments.counted, encoding="utf-8") as file:
                figures["instructions"] = json.load(file)["instructions"]
        elif arguments.only != "time":
            figures["instructions"] = instructions(arguments, live, dead)
        if arguments.only != "instructions":
            figures["seconds"] = timed(arguments, live, dead)
            if Sink.taken == 0:
                sys.exit("the collector got nothing: no request was traced")
    if "seconds" in figures:
        seconds = figures["seconds"]
        print("| time of a decode step | ms | against | ratio | 95 % of the median | rounds |\n|---|---|---|---|---|---|")
        for name, base in [("pages read", "nothing"), ("all requests traced", "nothing"),
                           ("dead collector, all requests traced", "dead collector, none traced")]:
            ratios = [ours / theirs for ours, theirs in zip(seconds[name], seconds[base])]
            shares[name] = statistics.median(ratios) - 1
            low, high = interval(ratios)
            print(f"| {name} | {statistics.median(seconds[name]) * 1e3:.2f} | {base}, {statistics.median(seconds[base]) * 1e3:.2f} "
                  f"| {1 + shares[name]:.3f} | {low:.3f} to {high:.3f} | {min(ratios):.2f} to {max(ratios):.2f} |")
    missed = False
    if len(figures) == 2:
        plain = figures["instructions"]["no collector"]
        counting = sum(plain[pattern] for pattern in COUNTING) / plain["total"]
        # Pages are read once a second: by instructions of a second, which the timed part has the steps of.
        pages = plain["pages"] * statistics.median(seconds["nothing"]) / plain["total"]
        for name in ["a collector", "a dead collector"]:
            traced = (figures["instructions"][name]["total"] - plain["total"]) / plain["total"] * SAMPLED
            all_of_it = counting + pages + traced
            missed |= all_of_it > BAR
            print(f"at defaults with {name}, by instructions: counting {counting:.4%} + pages {pages:.4%} + traces {traced:.4%} = {all_of_it:.3%}")
        for name in ["all requests traced", "dead collector, all requests traced"]:
            all_of_it = counting + max(shares["pages read"], 0) + max(shares[name], 0) * SAMPLED
            print(f"at defaults, by time ({name}): counting {counting:.4%} + pages {shares['pages read']:.2%} + traces {shares[name] * SAMPLED:.4%} = {all_of_it:.2%}")
        print(f"the bar is {BAR:.0%}")
    if arguments.out:
        with open(arguments.out, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
