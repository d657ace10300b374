"""Writes tests/fixtures/tiny/PRESET.{json,safetensors}: what transformers computes on the tiny checkpoints.

    python tests/oracle/make_tiny.py

See README.md for the versions used. Reference: float32, `attn_implementation="eager"`, experts one by one.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

import tiny

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "tiny"
PROMPT_TOKENS = 69
GREEDY_TOKENS = 32
# The second variant of a family stores every third position, so that a family stays below 100 KB.
VARIANT_STRIDE = {"glm4_moe_groups": 3, "qwen3_moe_tied": 3}


def load(preset: str):
    tensors = tiny.weights(preset)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(tiny.load_config(preset)))
        save_file(tensors, Path(directory) / "model.safetensors", metadata={"format": "pt"})
        model, info = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager", output_loading_info=True
        )
    problems = {key: value for key, value in info.items() if value}
    assert not problems, f"{preset}: transformers did not take every tensor: {problems}"
    return model.eval(), tensors


def routed_experts(model, ids: torch.Tensor) -> list[list[list[int]]]:
    """Chosen experts [moe layer][position], ascending, caught at the door of each layer's experts."""
    caught = []

    def hook(_module, inputs):
        caught.append(torch.sort(inputs[1].reshape(ids.shape[1], -1), dim=-1).values.tolist())

    handles = [module.register_forward_pre_hook(hook) for name, module in model.named_modules() if name.endswith(".experts")]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return caught


def make(preset: str) -> None:
    model, tensors = load(preset)
    ids = tiny.prompt_ids(PROMPT_TOKENS)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].numpy()
        greedy = list(ids)
        for _ in range(GREEDY_TOKENS):
            last = model(torch.tensor([greedy])).logits[0, -1]
            best = torch.topk(last, 2)
            margin = float(best.values[0] - best.values[1])
            assert margin > 2e-4, f"{preset}: greedy step with a margin of {margin}: choose another prompt"
            greedy.append(int(best.indices[0]))
    routed = routed_experts(model, torch.tensor([ids]))
    stride = VARIANT_STRIDE.get(preset, 1)
    positions = list(range(0, PROMPT_TOKENS, stride))
    save_file(
        {"logits": np.ascontiguousarray(logits[positions])},
        FIXTURES / f"{preset}.safetensors",
    )
    (FIXTURES / f"{preset}.json").write_text(
        json.dumps(
            {
                "transformers": transformers.__version__,
                "torch": torch.__version__,
                "weights_sha256": tiny.weights_sha256(tensors),
                "ids": ids,
                "positions": positions,
                "greedy": greedy[PROMPT_TOKENS:],
                "routed": routed,
            },
            separators=(",", ":"),
        )
        + "\n"
    )
    print(f"{preset}: logit std {logits.std():.3f}, greedy {greedy[PROMPT_TOKENS:PROMPT_TOKENS + 8]}")


if __name__ == "__main__":
    FIXTURES.mkdir(parents=True, exist_ok=True)
    for name in tiny.PRESETS:
        make(name)
