//! The coordinator of Shimmer.

pub mod chat_template;
pub mod detokenizer;
pub mod fence;
pub mod placement;
pub mod stop;
pub mod tokenizer;
