# SPDX-License-Identifier: Apache-2.0
"""Parts of a model that keep outliers away, and the measure that shows it (OSP, arXiv 2506.19697).

ssnorm.py     SSNorm: a root-mean-square norm with a single gain, so that no feature is privileged
embproj.py    EmbProj: a learned rotation after the embedding and before the output head, folded away for export
kurtosis.py   excess_kurtosis, and KurtosisProbe, which measures it inside a running model

The third part of OSP is the optimizer: `trimtab.optim.osp_optimizers`.
"""

from trimtab.nn.embproj import EmbProj
from trimtab.nn.kurtosis import Kurtosis, KurtosisProbe, excess_kurtosis
from trimtab.nn.ssnorm import SSNorm, to_rmsnorms_

__all__ = ["EmbProj", "Kurtosis", "KurtosisProbe", "SSNorm", "excess_kurtosis", "to_rmsnorms_"]
