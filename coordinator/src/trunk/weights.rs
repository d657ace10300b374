//! Every weight of the trunk, found once by name.

use shimmer_kernels::{Expert, Matrix};
use shimmer_model::{Error, ModelConfig, QkNorm, Trunk};

/// The whole trunk.
#[derive(Debug)]
pub(super) struct Weights<'w> {
    embed: Matrix<'w>,
    pub(super) layers: Vec<Layer<'w>>,
    pub(super) norm: &'w [f32],
    pub(super) head: Matrix<'w>,
}

/// One decoder layer.
#[derive(Debug)]
pub(super) struct Layer<'w> {
    pub(super) attention: Attention<'w>,
    pub(super) ffn_norm: &'w [f32],
    pub(super) ffn: Ffn<'w>,
}

/// Attention of one layer. A bias or norm that the family lacks is absent.
#[derive(Debug)]
pub(super) struct Attention<'w> {
    pub(super) norm: &'w [f32],
    pub(super) q: Matrix<'w>,
    pub(super) k: Matrix<'w>,
    pub(super) v: Matrix<'w>,
    pub(super) o: Matrix<'w>,
    pub(super) q_bias: Option<&'w [f32]>,
    pub(super) k_bias: Option<&'w [f32]>,
    pub(super) v_bias: Option<&'w [f32]>,
    pub(super) o_bias: Option<&'w [f32]>,
    /// As long as a head, or as the whole projection.
    pub(super) q_norm: Option<&'w [f32]>,
    pub(super) k_norm: Option<&'w [f32]>,
}

/// The feed-forward part of one layer.
#[derive(Debug)]
pub(super) enum Ffn<'w> {
    Dense(Expert<'w>),
    Moe(Moe<'w>),
}

/// What the coordinator holds of a layer with routed experts.
#[derive(Debug)]
pub(super) struct Moe<'w> {
    pub(super) experts: usize,
    /// `[experts, hidden]` in f32.
    pub(super) router: Matrix<'w>,
    /// Correction of the scores for the choice.
    pub(super) bias: Option<&'w [f32]>,
    pub(super) shared: Option<Expert<'w>>,
}

impl<'w> Weights<'w> {
    pub(super) fn find(config: &ModelConfig, trunk: &'w Trunk) -> Result<Self, Error> {
        let embed = trunk.matrix("embed")?;
        let head = if config.tie_word_embeddings { embed } else { trunk.matrix("head")? };
        let layers = config.layers.iter().enumerate().map(|(index, layer)| {
            let at = At { trunk, layer: index };
            Ok(Layer {
                attention: at.attention(config)?,
                ffn_norm: at.vector("ffn_norm")?,
                ffn: at.ffn(&layer.ffn)?,
            })
        });
        Ok(Self {
            embed,
            layers: layers.collect::<Result<_, Error>>()?,
            norm: trunk.vector("norm")?,
            head,
        })
    }

    /// Writes the embedding of every token to `x`.
    pub(super) fn embed(&self, tokens: &[u32], x: &mut [f32]) {
        for (&token, out) in tokens.iter().zip(x.chunks_exact_mut(self.embed.cols())) {
            self.embed.row(token as usize, out);
        }
    }
}

/// The tensors of one layer.
struct At<'w> {
    trunk: &'w Trunk,
    layer: usize,
}

impl<'w> At<'w> {
    fn name(&self, part: &str) -> String {
        format!("layers.{}.{part}", self.layer)
    }

    fn matrix(&self, part: &str) -> Result<Matrix<'w>, Error> {
        self.trunk.matrix(&self.name(part))
    }

    fn vector(&self, part: &str) -> Result<&'w [f32], Error> {
        self.trunk.vector(&self.name(part))
    }

    fn vector_if(&self, present: bool, part: &str) -> Result<Option<&'w [f32]>, Error> {
        present.then(|| self.vector(part)).transpose()
    }

    fn attention(&self, config: &ModelConfig) -> Result<Attention<'w>, Error> {
        let attention = &config.attention;
        let norms = attention.qk_norm != QkNorm::None;
        Ok(Attention {
            norm: self.vector("attn_norm")?,
            q: self.matrix("q")?,
            k: self.matrix("k")?,
            v: self.matrix("v")?,
            o: self.matrix("o")?,
            q_bias: self.vector_if(attention.qkv_bias, "q_bias")?,
            k_bias: self.vector_if(attention.qkv_bias, "k_bias")?,
            v_bias: self.vector_if(attention.qkv_bias, "v_bias")?,
            o_bias: self.vector_if(attention.o_bias, "o_bias")?,
            q_norm: self.vector_if(norms, "q_norm")?,
            k_norm: self.vector_if(norms, "k_norm")?,
        })
    }

    fn ffn(&self, ffn: &shimmer_model::Ffn) -> Result<Ffn<'w>, Error> {
        match *ffn {
            shimmer_model::Ffn::Dense { .. } => Ok(Ffn::Dense(self.mlp(["gate", "up", "down"])?)),
            shimmer_model::Ffn::Moe { experts, shared_intermediate, correction_bias, .. } => {
                let shared = shared_intermediate
                    .map(|_| self.mlp(["shared_gate", "shared_up", "shared_down"]));
                Ok(Ffn::Moe(Moe {
                    experts,
                    router: self.matrix("router")?,
                    bias: self.vector_if(correction_bias, "router_bias")?,
                    shared: shared.transpose()?,
                }))
            }
        }
    }

    fn mlp(&self, [gate, up, down]: [&str; 3]) -> Result<Expert<'w>, Error> {
        let expert =
            Expert::from_matrices(self.matrix(gate)?, self.matrix(up)?, self.matrix(down)?);
        expert.map_err(|source| Error::Layout { what: self.name(gate), source })
    }
}
