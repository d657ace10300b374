"""Tiny seeded checkpoints: the same weights as `shimmer_model::tiny`, in numpy.

A value depends on the tensor's name, its shape and its index only (splitmix64), and is exactly representable
in bfloat16, so a checkpoint never has to be stored: both sides make it, and a SHA-256 over all tensors proves that they
made the same one.
"""

import hashlib
import json
import math
from pathlib import Path

import numpy as np

PRESET_DIR = Path(__file__).resolve().parents[2] / "model" / "src" / "tiny"
SEED = 0
PRESETS = ["glm4_moe", "glm4_moe_groups", "qwen3_moe", "qwen3_moe_tied", "mixtral", "olmoe"]


def fnv1a64(data: bytes) -> int:
    value = 0xCBF29CE484222325
    for byte in data:
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value


def uniform(name: str, seed: int, count: int) -> np.ndarray:
    """`count` values in [-1, 1), multiples of 2^-23."""
    with np.errstate(over="ignore"):
        z = np.uint64(fnv1a64(name.encode()) ^ seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return ((z >> np.uint64(40)).astype(np.int64) - (1 << 23)).astype(np.float64) * 2.0**-23


def round_to_bf16(x: np.ndarray) -> np.ndarray:
    """Rounds finite f32 values half to even to bfloat16, returned as f32."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def center_and_amplitude(name: str, cols: int, tied: bool) -> tuple[float, float]:
    """Norms around 1 and biases well away from 0, so that a dropped one is caught; logits of about 1.2."""
    if name.endswith("norm.weight"):
        return 1.0, 0.25
    if name.endswith((".bias", "e_score_correction_bias")):
        return 0.0, 0.25
    if name == "model.embed_tokens.weight":
        return 0.0, 2.0 / math.sqrt(cols) if tied else 1.0
    if name == "lm_head.weight":
        return 0.0, 2.0 / math.sqrt(cols)
    if name.endswith(".gate.weight"):
        return 0.0, 3.5 / math.sqrt(cols)
    return 0.0, 1.75 / math.sqrt(cols)


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every tensor of a checkpoint, as Hugging Face files have them."""
    family = config["model_type"]
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    q_rows, kv_rows = heads * head_dim, kv_heads * head_dim
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (vocab, hidden)

    def mlp(prefix: str, width: int, names=("gate_proj", "up_proj", "down_proj")) -> None:
        gate, up, down = names
        out[f"{prefix}.{gate}.weight"] = (width, hidden)
        out[f"{prefix}.{up}.weight"] = (width, hidden)
        out[f"{prefix}.{down}.weight"] = (hidden, width)

    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        out[f"{at}.input_layernorm.weight"] = (hidden,)
        out[f"{at}.post_attention_layernorm.weight"] = (hidden,)
        for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            out[f"{at}.self_attn.{name}_proj.weight"] = (rows, hidden)
            if config.get("attention_bias"):
                out[f"{at}.self_attn.{name}_proj.bias"] = (rows,)
        out[f"{at}.self_attn.o_proj.weight"] = (hidden, q_rows)
        if config.get("attention_bias") and family != "glm4_moe":
            out[f"{at}.self_attn.o_proj.bias"] = (hidden,)
        if family == "qwen3_moe" or config.get("use_qk_norm"):
            out[f"{at}.self_attn.q_norm.weight"] = (head_dim,)
            out[f"{at}.self_attn.k_norm.weight"] = (head_dim,)
        if family == "olmoe":
            out[f"{at}.self_attn.q_norm.weight"] = (q_rows,)
            out[f"{at}.self_attn.k_norm.weight"] = (kv_rows,)

        if layer < config.get("first_k_dense_replace", 0) or layer in config.get("mlp_only_layers", []):
            mlp(f"{at}.mlp", config["intermediate_size"])
            continue
        experts = config.get("n_routed_experts") or config.get("num_experts") or config["num_local_experts"]
        width = config["intermediate_size"] if family in ("mixtral", "olmoe") else config["moe_intermediate_size"]
        block = f"{at}.block_sparse_moe" if family == "mixtral" else f"{at}.mlp"
        out[f"{block}.gate.weight"] = (experts, hidden)
        for expert in range(experts):
            names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
            mlp(f"{block}.experts.{expert}", width, names)
        if family == "glm4_moe":
            out[f"{block}.gate.e_score_correction_bias"] = (experts,)
            mlp(f"{block}.shared_experts", config["n_shared_experts"] * width)
    return out


def load_config(preset: str) -> dict:
    return json.loads((PRESET_DIR / f"{preset}.json").read_text())


def weights(preset: str) -> dict[str, np.ndarray]:
    """All tensors of a preset as f32 arrays of bfloat16-representable values."""
    config, out = load_config(preset), {}
    for name, shape in shapes(config).items():
        center, amplitude = center_and_amplitude(name, shape[-1], config["tie_word_embeddings"])
        values = center + amplitude * uniform(name, SEED, int(np.prod(shape)))
        out[name] = round_to_bf16(values.astype(np.float32)).reshape(shape)
    return out


def weights_sha256(tensors: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + b"\0" + np.ascontiguousarray(tensors[name], dtype="<f4").tobytes())
    return digest.hexdigest()


def prompt_ids(count: int) -> list[int]:
    """Pseudo-random byte tokens: the teacher-forced prompt of every oracle."""
    values = uniform("prompt", 0, count)
    return [int((float(v) + 1.0) * 128.0) % 256 for v in values]
