"""The loops over whole gradients, as plain functions on 1-D tensors; kernels know nothing of compressors."""

from hvdcomp.kernels.torch_ops import add_mean_, largest, orthogonalise, squared_norm

__all__ = ["add_mean_", "largest", "orthogonalise", "squared_norm"]
