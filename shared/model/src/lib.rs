//! DeepSeek-V2/V3, Kimi-K2/K2.5 and EAGLE-3 heads over paged caches.
