//! Rules about the tree itself: which crate may see which, how long a file gets, what the source may not say, and that
//! the documents name only what exists.

mod arrows;
mod docs;
mod scripts;
mod source;
mod tree;
