"""A section that another room adds to the report: what it says, draws, tabulates, and what must not be overlooked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from harness.report.drawing import Picture
from harness.report.study import Study
from harness.report.tables import Table


@dataclass(frozen=True)
class Addition:
    """One more section; `warnings` stand above everything else in it, as loud as a failed point.

    `key` is the section's anchor; names of pictures are file names and begin with `kernel_`.
    """

    key: str
    title: str
    warnings: Sequence[str] = ()
    text: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = field(default=())


Adds = Callable[[Study], Addition]
"""Makes the section for a sweep; called where figures can be drawn."""
