//! What the lock-free parts are made of: the standard library's, and loom's where a model explores every interleaving.

#[cfg(not(feature = "loom"))]
pub(crate) use std::{
    hint::spin_loop,
    sync::atomic::{AtomicU64, Ordering},
};

#[cfg(feature = "loom")]
pub(crate) use loom::{
    hint::spin_loop,
    sync::atomic::{AtomicU64, Ordering},
};
