"""The block manager of the lessons: where does token 34 of a sequence lie, and what does copy-on-write copy?

Run it with `python examples/block_manager.py`. It needs no GPU and no model.
"""

from engine.core import BlockManager


def worked_example() -> list[int]:
    """35 tokens in the blocks 5, 12 and 3 of 16 slots: the slots of tokens 0, 15, 16, 31, 32 and 34."""
    blocks = BlockManager(num_blocks=12, block_size=16)
    for name in range(1, 13):
        blocks.allocate(name, 16)  # each sequence has one block: 1, 2, ... 12
    for name in (3, 12, 5):
        blocks.free(name)  # the block that was freed last is taken first
    print("table", blocks.allocate("prompt", 35))
    return blocks.get_slot_mapping("prompt", [0, 15, 16, 31, 32, 34])


def copy_on_write() -> None:
    """Three answers to a prompt of 40 tokens: two full blocks are shared, the partial third is copied twice."""
    blocks = BlockManager(num_blocks=20, block_size=16)
    blocks.allocate("first", 40)
    for name in ("second", "third"):
        blocks.share("first", name)
    print("references", [blocks.references(block) for block in blocks.table("first")])
    for name in ("first", "second", "third"):
        print(f"{name:6} writes: copy {blocks.cow(name)}, table {blocks.allocate(name, 5)}")
    print(
        "blocks in use", blocks.usage().physical_blocks, "for", blocks.usage().logical_blocks, "table entries"
    )
    for name in ("first", "second", "third"):
        print(f"{name:6} ends: free again {blocks.free(name)}")


def main() -> None:
    """Print both."""
    print("slots", worked_example())
    copy_on_write()


if __name__ == "__main__":
    main()
