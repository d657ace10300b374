//! Sampling parameters and their ranges.

/// How tokens are chosen. The defaults leave the model's distribution as it is.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// In [0, 100]; 0 is greedy.
    pub temperature: f32,
    /// Keeps this many most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// In (0, 1]; keeps the shortest run of most likely tokens that holds this share of the probability.
    pub top_p: f32,
    /// In [0, 1]; drops tokens less likely than this share of the most likely one.
    pub min_p: f32,
    /// In (0, 2]; divides positive and multiplies negative logits of tokens seen in prompt or output.
    pub repetition_penalty: f32,
    /// In [-2, 2]; taken off the logit of every generated token once.
    pub presence_penalty: f32,
    /// In [-2, 2]; taken off the logit of a generated token per occurrence.
    pub frequency_penalty: f32,
    /// Added to logits before everything else, each in [-100, 100].
    pub logit_bias: Vec<(u32, f32)>,
    /// Key of the random numbers.
    pub seed: u64,
    /// Number of this choice among the choices of one request; part of the key, so that choices differ.
    pub choice: u32,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
            choice: 0,
        }
    }
}

/// A parameter outside its range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {description}")]
pub struct InvalidParameter {
    /// Path of the field in the public request, for example `sampling.top_p`.
    pub field: String,
    /// The value, and what is allowed.
    pub description: String,
}

impl InvalidParameter {
    /// Names a field and what is wrong with it.
    pub fn new(field: impl Into<String>, description: impl Into<String>) -> Self {
        Self { field: field.into(), description: description.into() }
    }
}

impl Sampling {
    /// Checks every range. Zero is a value like any other; a NaN lies in no range.
    pub fn validate(&self, vocab_size: usize) -> Result<(), InvalidParameter> {
        let range = |field: &str, value: f32, ok: bool, allowed: &str| {
            if ok {
                Ok(())
            } else {
                Err(InvalidParameter::new(
                    format!("sampling.{field}"),
                    format!("{value} is not in {allowed}"),
                ))
            }
        };
        range(
            "temperature",
            self.temperature,
            (0.0..=100.0).contains(&self.temperature),
            "[0, 100]",
        )?;
        range("top_p", self.top_p, self.top_p > 0.0 && self.top_p <= 1.0, "(0, 1]")?;
        range("min_p", self.min_p, (0.0..=1.0).contains(&self.min_p), "[0, 1]")?;
        let repetition = self.repetition_penalty;
        range("repetition_penalty", repetition, repetition > 0.0 && repetition <= 2.0, "(0, 2]")?;
        range(
            "presence_penalty",
            self.presence_penalty,
            (-2.0..=2.0).contains(&self.presence_penalty),
            "[-2, 2]",
        )?;
        range(
            "frequency_penalty",
            self.frequency_penalty,
            (-2.0..=2.0).contains(&self.frequency_penalty),
            "[-2, 2]",
        )?;
        for &(token, bias) in &self.logit_bias {
            let field = || format!("sampling.logit_bias[{token}]");
            if usize::try_from(token).map_or(true, |id| id >= vocab_size) {
                return Err(InvalidParameter::new(
                    field(),
                    format!("the vocabulary has {vocab_size} tokens"),
                ));
            }
            if !(-100.0..=100.0).contains(&bias) {
                return Err(InvalidParameter::new(
                    field(),
                    format!("{bias} is not in [-100, 100]"),
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Applies one change to the defaults and compares the refused field; an empty name means accepted.
    fn check(change: impl FnOnce(&mut Sampling), refused: &str) {
        let mut sampling = Sampling::default();
        change(&mut sampling);
        let field = sampling.validate(100).err().map_or(String::new(), |error| error.field);
        assert_eq!(field, refused, "{sampling:?}");
    }

    #[test]
    fn zero_is_a_value_and_ranges_are_named() {
        check(|_| {}, "");
        check(|s| s.temperature = 0.0, "");
        check(|s| s.temperature = -0.1, "sampling.temperature");
        check(|s| s.temperature = f32::NAN, "sampling.temperature");
        check(|s| s.temperature = f32::INFINITY, "sampling.temperature");
        check(|s| s.top_p = 0.0, "sampling.top_p");
        check(|s| s.top_p = 1.0001, "sampling.top_p");
        check(|s| s.min_p = 0.0, "");
        check(|s| s.min_p = 1.0, "");
        check(|s| s.min_p = -0.5, "sampling.min_p");
        check(|s| s.repetition_penalty = 0.0, "sampling.repetition_penalty");
        check(|s| s.repetition_penalty = 2.0, "");
        check(|s| s.presence_penalty = -2.0, "");
        check(|s| s.presence_penalty = 2.5, "sampling.presence_penalty");
        check(|s| s.frequency_penalty = f32::NAN, "sampling.frequency_penalty");
        check(|s| s.logit_bias = vec![(99, 100.0)], "");
        check(|s| s.logit_bias = vec![(100, 1.0)], "sampling.logit_bias[100]");
        check(|s| s.logit_bias = vec![(1, f32::NAN)], "sampling.logit_bias[1]");
    }
}
