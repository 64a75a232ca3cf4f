"""Does it pay? What steps would take: formulas of collectives, of the paper's model, and of ours."""

from hvdcomp.costmodel.cluster import Cluster
from hvdcomp.costmodel.collectives import Network
from hvdcomp.costmodel.model import Method, Prediction, Workload, predict
from hvdcomp.costmodel.rates import Cost, Rates

__all__ = ["Cluster", "Cost", "Method", "Network", "Prediction", "Rates", "Workload", "predict"]
