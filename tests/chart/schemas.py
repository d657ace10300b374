"""Answers questions about Kubernetes objects, one JSON object per line: what YAML means, and whether an object fits the
schema of a version. It reads schemas from the package kubernetes-validate and asks no network."""

import functools
import json
import sys

import yaml
from kubernetes_validate import utils

utils.schema_contents = functools.lru_cache(maxsize=None)(utils.schema_contents)


def parse(text):
    return [document for document in yaml.safe_load_all(text) if document is not None]


def validate(document, version):
    """The reasons why an object does not fit; nothing where it does, and null where there is no schema of its kind."""
    try:
        utils.validate(document, version, strict=True)
    except utils.SchemaNotFoundError:
        return None
    except utils.ValidationError as error:
        place = "/".join(str(part) for part in error.path)
        return [f"{place}: {error.message}"]
    return []


for line in sys.stdin:
    question = json.loads(line)
    try:
        if "yaml" in question:
            answer = {"documents": parse(question["yaml"])}
        else:
            answer = {"reasons": validate(question["document"], question["version"])}
    except Exception as error:  # noqa: BLE001: whatever it is, the test shows it
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer, default=str), flush=True)
