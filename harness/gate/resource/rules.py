"""What counts as a regression of a compiled kernel. Each rule names the figure, so that a failure explains itself."""

from collections.abc import Iterator

from harness.gate.finding import Finding, Verdict
from harness.gate.resource.compiling import Resources

SHARED_LIMIT_BYTES = {80: 166_912, 90: 232_448}  # one program's; the compiler itself does not check it


def judge(case: str, capability: int, now: Resources, before: Resources, more: float) -> Finding:
    """Compare one compiled kernel with its baseline; its instructions may grow by the share `more`."""
    wrong = [*broken(capability, now), *worse(now, before, more)]
    if wrong:
        return Finding(case, Verdict.regressed, "; ".join(wrong))
    return Finding(
        case, Verdict.passed, f"{now.registers} registers, {now.shared_bytes:,} B shared, depth {now.depth}"
    )


def broken(capability: int, now: Resources) -> Iterator[str]:
    """What no baseline excuses."""
    if now.stack_bytes or now.local:
        yield f"spills: {now.stack_bytes} B of stack and {now.local} accesses to local memory"
    if now.shared_bytes > SHARED_LIMIT_BYTES[capability]:
        limit = SHARED_LIMIT_BYTES[capability]
        yield f"shared memory {now.shared_bytes:,} B does not fit sm_{capability} ({limit:,} B): it cannot launch"


def worse(now: Resources, before: Resources, more: float) -> Iterator[str]:
    """What is worse than the baseline."""
    if now.registers > before.registers:
        yield f"registers {before.registers} → {now.registers}"
    if now.shared_bytes > before.shared_bytes:
        yield f"shared memory {before.shared_bytes:,} → {now.shared_bytes:,} B"
    if now.wide_loads < before.wide_loads:
        narrow = f"{before.narrow_loads} → {now.narrow_loads}"
        yield f"16-byte loads {before.wide_loads} → {now.wide_loads} (narrow ones {narrow})"
    if now.instructions > (1 + more) * before.instructions:
        yield f"instructions {before.instructions} → {now.instructions}, more than {more:.0%} on top"
    if now.depth < before.depth:
        yield f"pipeline depth {before.depth} → {now.depth}"
    if before.hgmma and not now.hgmma:
        yield f"warp-group matrix instructions {before.hgmma} → 0"
