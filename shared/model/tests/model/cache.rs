//! What caches take of the memory that the planning and the bounds of prefixes count.

use crate::common::{PAGE_ROWS, backend, deepseek, demo, draft};
use eyrie_model::{CaptureSet, LatentCache, TargetModel};

#[test]
fn a_page_has_the_bytes_of_its_tokens() {
    let backend = backend(1);
    let numbers = backend.numbers();
    let model = deepseek(&demo("mini"), &backend);
    let cache = model.new_cache(2 * PAGE_ROWS, PAGE_ROWS).unwrap();
    let token = LatentCache::token_bytes(model.config(), numbers);
    assert_eq!(cache.page_bytes(), PAGE_ROWS as u64 * token);

    let capture = CaptureSet::new(&[2, 4, 5], model.config().num_hidden_layers).unwrap();
    let head = draft(&demo("mini-eagle3"), &capture, model.embed_and_head(), &backend);
    let keys = head.config().num_key_value_heads * head.config().head_dim;
    let cache = head.new_cache(2 * PAGE_ROWS, PAGE_ROWS).unwrap();
    assert_eq!(cache.page_bytes(), (PAGE_ROWS * 2 * keys * numbers.size()) as u64);
}
