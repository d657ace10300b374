#!/usr/bin/env python3
"""Writes the bill of materials of an image as CycloneDX 1.5 JSON.

    scripts/sbom.py IMAGE > sbom.json               what is linked, and the Debian packages that the image carries
    scripts/sbom.py --packages DIR > sbom.json      the same from a directory of dpkg status records, without an engine

What is linked is what `cargo tree` says of the binary alone, without tests and build scripts; the rest comes from `cargo
metadata`, which joins the features of the whole workspace and so names more, and from Cargo.lock. Same input, same bytes: the time is that of SOURCE_DATE_EPOCH, or absent.
"""

import argparse
import datetime
import io
import json
import os
import pathlib
import subprocess
import sys
import tarfile
import tomllib
import uuid

ROOT = pathlib.Path(__file__).resolve().parent.parent
BINARY = "shimmer-cli"
STATUS = "/var/lib/dpkg/status.d"


def run(*command):
    """Standard output of a command; its own words are the error."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        sys.exit(f"error: {' '.join(command)} failed")
    return done.stdout


def crates(target):
    """Components and dependencies of what is linked."""
    metadata = json.loads(
        run("cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", target)
    )
    with open(ROOT / "Cargo.lock", "rb") as file:
        locked = tomllib.load(file)["package"]
    checksums = {(p["name"], p["version"]): p.get("checksum") for p in locked}
    packages = {package["id"]: package for package in metadata["packages"]}
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    ours = set(metadata["workspace_members"])
    root = next(i for i in ours if packages[i]["name"] == BINARY)

    def normal(node):
        # A kind of null is a dependency of the program; the others are "dev" and "build".
        return [
            dep["pkg"]
            for dep in node["deps"]
            if dep["pkg"] in reached
            and any(kind["kind"] is None for kind in dep["dep_kinds"])
        ]

    tree = run(
        *("cargo", "tree", "--locked", "--package", BINARY, "--target", target),
        *("--edges", "normal", "--prefix", "none", "--format", "{p}"),
    )
    linked = {tuple(line.split()[:2]) for line in tree.decode().splitlines() if line}
    key = lambda package: (package["name"], f"v{package['version']}")
    reached = {i for i, package in packages.items() if key(package) in linked}
    if len(reached) != len(linked):
        sys.exit("error: cargo tree and cargo metadata disagree about what is linked")

    def reference(package):
        package = packages[package]
        return f"pkg:cargo/{package['name']}@{package['version']}"

    components, edges = [], []
    for package in sorted(reached, key=reference):
        about = packages[package]
        component = {
            "type": "application" if package == root else "library",
            "bom-ref": reference(package),
            "name": about["name"],
            "version": about["version"],
            "purl": reference(package),
        }
        if about.get("license"):
            # Old crates write MIT/Apache-2.0, which is no expression any more.
            component["licenses"] = [{"expression": about["license"].replace("/", " OR ")}]
        checksum = checksums[(about["name"], about["version"])]
        if checksum:
            component["hashes"] = [{"alg": "SHA-256", "content": checksum}]
        components.append(component)
        depends = sorted({reference(dep) for dep in normal(nodes[package])})
        edges.append({"ref": reference(package), "dependsOn": depends})
    return components, edges, reference(root)


def records_of(image):
    """The dpkg status records that an image carries."""
    container = run("docker", "create", image).decode().strip()
    try:
        archive = run("docker", "cp", f"{container}:{STATUS}", "-")
    finally:
        run("docker", "rm", container)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return [tar.extractfile(m).read().decode() for m in tar.getmembers() if m.isfile()]


def debian(records):
    """Components of Debian packages."""
    components = []
    for record in records:
        lines = (line for line in record.splitlines() if not line.startswith(" "))
        fields = dict(line.split(": ", 1) for line in lines if ": " in line)
        name, version, arch = fields["Package"], fields["Version"], fields["Architecture"]
        purl = f"pkg:deb/debian/{name}@{version.replace('+', '%2B')}?arch={arch}"
        components.append(
            {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
        )
    return sorted(components, key=lambda component: component["bom-ref"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("image", nargs="?", help="an image of deploy/Dockerfile that the engine has")
    parser.add_argument("--packages", type=pathlib.Path, help="directory of dpkg status records")
    parser.add_argument("--target", default="x86_64-unknown-linux-gnu", help="what it is built for")
    args = parser.parse_args()
    if (args.image is None) == (args.packages is None):
        parser.error("give an image or --packages")
    if args.image:
        records = records_of(args.image)
    else:
        records = [path.read_text() for path in sorted(args.packages.iterdir())]
    if not records:
        sys.exit("error: no Debian package is recorded, but the program links some")
    components, edges, root = crates(args.target)
    program = next(c for c in components if c["bom-ref"] == root)
    components.remove(program)
    packages = debian(records)
    edges[[e["ref"] for e in edges].index(root)]["dependsOn"] += [p["bom-ref"] for p in packages]
    metadata = {"component": program}
    if "SOURCE_DATE_EPOCH" in os.environ:
        seconds = int(os.environ["SOURCE_DATE_EPOCH"])
        time = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
        metadata["timestamp"] = time.strftime("%Y-%m-%dT%H:%M:%SZ")
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": metadata,
        "components": components + packages,
        "dependencies": edges,
    }
    text = json.dumps(bill, sort_keys=True)
    bill["serialNumber"] = f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, text)}"
    print(json.dumps(bill, indent=1))


if __name__ == "__main__":
    main()
