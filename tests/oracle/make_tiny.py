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


def router_logits(model, ids: torch.Tensor) -> np.ndarray:
    """Raw router logits [moe layer][position][expert], caught at the linear map of each router."""
    caught = []

    def hook(module, inputs, _output):
        hidden = inputs[0].reshape(-1, inputs[0].shape[-1])
        caught.append(torch.nn.functional.linear(hidden.float(), module.weight.float()).numpy())

    handles = [
        module.register_forward_hook(hook)
        for name, module in model.named_modules()
        if name.endswith(".gate") and hasattr(module, "weight") and "expert" not in name
    ]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return np.stack(caught).astype(np.float32)


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
            assert margin > 1e-3, f"{preset}: greedy step with a margin of {margin}: choose another prompt"
            greedy.append(int(best.indices[0]))
    routed = router_logits(model, torch.tensor([ids]))
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
            }
        )
        + "\n"
    )
    print(f"{preset}: logit std {logits.std():.3f}, router logit std {routed.std():.3f}, greedy {greedy[PROMPT_TOKENS:PROMPT_TOKENS + 8]}")


if __name__ == "__main__":
    FIXTURES.mkdir(parents=True, exist_ok=True)
    for name in tiny.PRESETS:
        make(name)
