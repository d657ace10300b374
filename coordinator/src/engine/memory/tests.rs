use shimmer_kernels::WeightFormat;
use shimmer_model::tiny::Preset;

use super::*;
use crate::test_support::{config, tiny_model};

#[test]
fn memory_is_what_is_loaded_and_reserved() {
    let tiny = tiny_model(Preset::Glm4Moe, WeightFormat::Q8G64, WeightFormat::Q8G64);
    let container = &tiny.container;
    let limits = EngineConfig { max_running: 1, ..config(64, 64, 1) };
    let memory = EngineMemory::of(container, &limits);
    assert_eq!(memory.trunk, container.trunk().unwrap().bytes_held() as u64);
    let layers = container.config().layers.len() as u64;
    let page = kv_layout(container).page_bytes() as u64 * layers;
    let positions = PAGE_POSITIONS as u64;
    // One sequence of the model's 1024 positions, however large the budget is.
    assert_eq!(memory.kv, page * 1024 / positions);
    let short = EngineConfig { context_length: Some(100), ..limits.clone() };
    assert_eq!(EngineMemory::of(container, &short).kv, page * 100_u64.div_ceil(positions));
    let small = EngineConfig { kv_budget_bytes: 3 * page + 1, ..limits };
    assert_eq!(EngineMemory::of(container, &small).kv, 3 * page);
}
