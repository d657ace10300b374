//! Read access to one expert's slab.

use std::{fmt, ops::Deref, sync::Arc};

use super::layer::{Layer, SlotGrant};

/// The slab of an expert, which stays in memory as long as the lease lives.
pub struct Lease {
    /// Gone only while the lease is dropped.
    grant: Option<SlotGrant>,
    layer: Arc<Layer>,
}

impl Lease {
    pub(super) fn new(layer: &Arc<Layer>, grant: SlotGrant) -> Self {
        Self { grant: Some(grant), layer: Arc::clone(layer) }
    }
}

impl Deref for Lease {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.grant.as_ref().expect("a lease has its grant until it is dropped").memory
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(grant) = self.grant.take() {
            self.layer.release(grant);
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("layer", &self.layer.layer).finish_non_exhaustive()
    }
}
