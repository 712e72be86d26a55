"""Where the sampling budget goes: numbers in, counts out.

`contrast` holds the utilities, `solvers` the exact optima, `strategies` the named rules a run can choose
from, `predictor` the success predictor they read, `quality` the figures that say whether it deserves to be
read.
"""

from .contrast import (
    KAPPA_CAP,
    fit_kappa,
    prefix_contrast,
    prefix_marginal_gain,
    prefix_repeat_probability,
    root_contrast,
    root_marginal_gain,
)
from .predictor import PredictorUpdate, SuccessPredictor
from .quality import predictor_quality
from .solvers import PrefixAllocation, allocate_prefixes, allocate_roots
from .strategies import STRATEGIES, PrefixStage, RootStage, Strategy

__all__ = [
    "KAPPA_CAP",
    "STRATEGIES",
    "PredictorUpdate",
    "PrefixAllocation",
    "PrefixStage",
    "RootStage",
    "Strategy",
    "SuccessPredictor",
    "allocate_prefixes",
    "allocate_roots",
    "fit_kappa",
    "predictor_quality",
    "prefix_contrast",
    "prefix_marginal_gain",
    "prefix_repeat_probability",
    "root_contrast",
    "root_marginal_gain",
]
