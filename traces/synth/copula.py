"""Prompt and output lengths that depend on each other: a Gaussian copula with a given rank correlation."""

from math import erf, pi, sin, sqrt
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def correlated(first: Floats, second: Floats, spearman: float) -> Floats:
    """Uniform numbers whose rank correlation with `first` is `spearman`, made of `first` and an independent `second`.

    The normal correlation that gives a Spearman coefficient s is 2 sin(pi s / 6) (Kruskal 1958).
    """
    linear = 2 * sin(pi * spearman / 6)
    inverse = NormalDist().inv_cdf
    smallest = 2.0**-53
    normal_first = np.array([inverse(max(u, smallest)) for u in first.tolist()])
    normal_second = np.array([inverse(max(u, smallest)) for u in second.tolist()])
    mixed = linear * normal_first + sqrt(1 - linear**2) * normal_second
    return np.array([(1 + erf(z / sqrt(2))) / 2 for z in mixed.tolist()])
