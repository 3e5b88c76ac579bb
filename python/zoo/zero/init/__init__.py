"""Models that are partitioned while they are built.

Rajbhandari et al. 2021, "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning", section 7.2.
"""

from zoo.zero.init.context import Init
from zoo.zero.init.keeping import ParamSwapper
from zoo.zero.init.report import InitReport, Touch

__all__ = ["Init", "InitReport", "ParamSwapper", "Touch"]
