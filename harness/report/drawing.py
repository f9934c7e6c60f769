"""What a figure module gives to the page: a drawing with its data, or the reason why there is none."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Drawing:
    """A figure, its file name without suffix, the sentence below it, and the data that it shows."""

    name: str
    caption: str
    figure: "Figure"
    data: "pd.DataFrame"


@dataclass(frozen=True)
class Missing:
    """A figure without data: the sentence says why."""

    name: str
    reason: str


Picture = Drawing | Missing
