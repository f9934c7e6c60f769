"""KV memory: who holds which blocks.

`manager` is the interface that the scheduler uses. `paged`, `contiguous` and `grouped` implement it. `paged` is built
from `block_tables` and `prefix_cache`, which work on one `block_pool`. `eviction` orders the cached free blocks. For
readers of vLLM: `manager` and `paged` together are `kv_cache_manager.py`, and `block_pool` is `block_pool.py`.
"""
