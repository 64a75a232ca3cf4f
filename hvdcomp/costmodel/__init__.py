"""Does it pay? What steps would take: formulas of collectives, of the paper's model, and of ours."""

from hvdcomp.costmodel.collectives import Network

__all__ = ["Network"]
