#!/usr/bin/env python3
"""Compares what `shimmer plan --hosts` predicts with what real processes on this machine take.

Each round measures every run between two calibrations; the prediction of a run is the mean of what both say, because the
speed of a shared machine drifts. Medians over the rounds are compared. What took the processors beside is told, as the
share of them that was neither ours nor idle. Calibration and runs are different requests:
the runs have one to three workers, caches of all experts and of eight slots, and prompts of 16 and 512 tokens. Routing is
recorded once, in one process: it does not depend on workers or caches. Needs only Python.

    tests/perf/prediction.py --shimmer target/release/shimmer --container CONTAINER --rounds 3
"""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import sys
import tempfile

from race import Shimmer, run

# The limit of docs/PLANNING.md, as a share of the measured figure.
LIMIT = 0.15
WORKERS = [1, 2, 3]
CAPS = [None, 8]
PROMPTS = [16, 512]
# Steps of decoding after the first token.
DECODE = 48
# Times that a run is measured in its cluster, behind a first time that warms up: a short prompt is one step of some ten
# milliseconds, of which a single one says little.
REPEATS = {16: 5, 512: 2}
FIGURES = ["first token", "decode"]


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shimmer", required=True, help="the release binary")
    parser.add_argument("--container", required=True, help="container directory whose experts fit into memory")
    parser.add_argument("--threads", type=int, default=2, help="threads of every process")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calibrations", type=int, default=1, help="rounds inside each calibration")
    parser.add_argument("--out", help="file for the figures as JSON")
    return parser.parse_args()


def request(prompt):
    sizes = ["--prompt-tokens", str(prompt), "--max-tokens", str(DECODE + 1)]
    return [*sizes, "--ignore-eos", "--temperature", "0", "--json"]


class Processors:
    """What the machine's processors do while our children run."""

    def __init__(self):
        self.begun = self.now()

    @staticmethod
    def now():
        with open("/proc/stat", encoding="utf-8") as file:
            fields = [int(word) / os.sysconf("SC_CLK_TCK") for word in file.readline().split()[1:9]]
        ours = os.times()
        return sum(fields), fields[3] + fields[4], ours.user + ours.system + ours.children_user + ours.children_system

    def foreign(self):
        """The share of processor time, stolen time included, that others took. Children count once they have ended."""
        every, idle, ours = (now - begun for now, begun in zip(self.now(), self.begun))
        return max(0.0, every - idle - ours) / every


class Runs(Shimmer):
    """Runs of real processes, and predictions of them."""

    def __init__(self, arguments, directory):
        super().__init__(arguments)
        self.threads, self.directory = str(arguments.threads), directory

    def path(self, name):
        return str(self.directory / name)

    def record(self, prompt):
        """Writes which experts a run wants."""
        where = ["--container", self.container, "--in-process", "--threads", self.threads]
        record = ["--record-routing", self.path(f"routing-{prompt}.jsonl")]
        run([self.binary, "generate", *where, *request(prompt), *record])

    def calibrate(self, round_number, rounds):
        file = self.path(f"calibration-{round_number}.toml")
        where = ["--container", self.container, "--threads", self.threads]
        run([self.binary, "bench", *where, "--calibrate", file, "--rounds", str(rounds)])
        return file

    def measure(self, workers, cap, prompt):
        """Seconds until the first token, and of each step after it, in a cluster of its own that is warm."""
        with contextlib.ExitStack() as stack:
            addresses = []
            for number in range(workers):
                flags = ["--id", f"w{number}", "--threads", self.threads]
                flags += ["--cap", str(cap)] if cap else []
                addresses.append(stack.enter_context(self.process("worker", *flags)))
            flags = ["--workers", ",".join(addresses), "--threads", self.threads]
            endpoint = stack.enter_context(self.process("serve", *flags))
            repeats = ["--repeat", str(1 + REPEATS[prompt])]
            answers = run([self.binary, "generate", "--endpoint", endpoint, *request(prompt), *repeats]).splitlines()
            timings = [json.loads(answer)["timings"] for answer in answers[1:]]
            median = {key: statistics.median(of[key] for of in timings) / 1e3 for key in ("prefill_ms", "decode_ms")}
            return median["prefill_ms"], median["decode_ms"] / DECODE

    def predict(self, workers, cap, prompt, calibration):
        """The same, from the plan."""
        hosts = ["[network]", "round-trip-ms = 0.05", "bandwidth-gb-per-s = 5.0"]
        hosts += ["[coordinator]", 'host = "here"', "[[host]]", 'name = "here"', f"threads = {self.threads}"]
        for number in range(workers):
            hosts += ["[[host.worker]]", f'id = "w{number}"', 'ram = "4GiB"']
            hosts += [f"cap = {cap}"] if cap else []
        file = self.directory / "hosts.toml"
        file.write_text("\n".join(hosts) + "\n", encoding="utf-8")
        command = [self.binary, "plan", "--container", self.container, "--hosts", str(file), "--json"]
        command += ["--calibration", calibration, "--simulate", self.path(f"routing-{prompt}.jsonl")]
        found = json.loads(run(command))
        return found["time_to_first_token_s"], 1 / found["decode_tokens_per_s"]


def main():
    arguments = parse_arguments()
    cells = [(workers, cap, prompt) for workers in WORKERS for cap in CAPS for prompt in PROMPTS]
    measured = {cell: [] for cell in cells}
    predicted = {cell: [] for cell in cells}
    with tempfile.TemporaryDirectory() as name:
        runs = Runs(arguments, pathlib.Path(name))
        for prompt in PROMPTS:
            runs.record(prompt)
        calibrations, foreign = [], []
        # What is interrupted shows the rounds that are complete.
        with contextlib.suppress(KeyboardInterrupt):
            before = runs.calibrate(0, arguments.calibrations)
            for round_number in range(arguments.rounds):
                watch = Processors()
                # In reverse every other time, so that a drift does not favour one end.
                order = cells if round_number % 2 == 0 else list(reversed(cells))
                found = {cell: runs.measure(*cell) for cell in order}
                after = runs.calibrate(round_number + 1, arguments.calibrations)
                foreign.append(watch.foreign())
                for cell, times in found.items():
                    told = [runs.predict(*cell, calibration) for calibration in (before, after)]
                    measured[cell].append(times)
                    predicted[cell].append(tuple(statistics.mean(both) for both in zip(*told)))
                calibrations += [pathlib.Path(file).read_text(encoding="utf-8") for file in (before, after)]
                before = after
                print(f"round {round_number + 1}/{arguments.rounds} is done", file=sys.stderr, flush=True)
    if not calibrations:
        sys.exit("no round is complete")
    rows, within = [], 0
    print("| workers | cap | prompt | figure | measured ms | predicted ms | error |")
    print("|---|---|---|---|---|---|---|")
    for cell in cells:
        errors = []
        for index, figure in enumerate(FIGURES):
            found = statistics.median(times[index] for times in measured[cell])
            told = statistics.median(times[index] for times in predicted[cell])
            errors.append(told / found - 1)
            workers, cap, prompt = cell
            print(
                f"| {workers} | {cap or 'all'} | {prompt} | {figure} | {found * 1e3:.2f} | {told * 1e3:.2f} "
                f"| {errors[-1] * 100:+.1f} % |"
            )
            each = [[times[index] for times in of[cell]] for of in (measured, predicted)]
            rows.append({"workers": workers, "cap": cap, "prompt": prompt, "figure": figure, "measured_s": each[0], "predicted_s": each[1], "error": errors[-1]})
        within += all(abs(error) <= LIMIT for error in errors)
    print("processor time that others took, by round: " + ", ".join(f"{share:.0%}" for share in foreign))
    print(f"{within} of {len(cells)} runs have both figures within {LIMIT:.0%}")
    if arguments.out:
        figures = {"rows": rows, "calibrations": calibrations, "foreign": foreign}
        pathlib.Path(arguments.out).write_text(json.dumps(figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
