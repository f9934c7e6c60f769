"""KV memory: who holds which blocks.

`manager` is the interface that the scheduler uses. `paged` and `contiguous` implement it. `paged` is built from
`block_tables`, `prefix_cache` and `swap`, which all work on one `block_pool`. `eviction` orders the cached free blocks.
`contiguous` places its reservations with `placement`. For readers of vLLM: `manager` and `paged` together are
`kv_cache_manager.py`, and `block_pool` is `block_pool.py`.
"""
