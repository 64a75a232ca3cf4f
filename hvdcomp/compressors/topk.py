"""Top-k: the elements of largest magnitude."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from hvdcomp.compressors.requests import Allgather, Rounds, Sparse, Unit, Volume
from hvdcomp.compressors.sparsifier import Sparsifier, kept_elements
from hvdcomp.kernels import largest
from hvdcomp.wire import decode_sparse, encode_sparse, sparse_nbytes


class TopK(Sparsifier):
    """Exactly k = max(1, floor(numel / cf)) elements by magnitude travel as values and int32 indices, by allgather.

    Args:
        cf: compression factor >= 1 by the papers' definition, original floats / sent floats; 1 sends all, by allreduce.
        error_feedback: keep what was not sent for the next step.
    """

    name: ClassVar[str] = "topk"
    collective: ClassVar[str] = "allgather"
    source: ClassVar[str] = "Aji and Heafield 2017; Stich et al. 2018 (with memory)"

    def select(self, values: Tensor, k: int, unit: Unit, level: int) -> Tensor:
        return largest(values, k)

    def send(self, acc: Tensor, indices: Tensor, unit: Unit) -> Rounds:
        payloads = yield Allgather(encode_sparse(indices, acc[indices], unit.numel))
        return Sparse([decode_sparse(payload, unit.numel) for payload in payloads], indices)

    def sparse_requests(self, kept: int) -> list[Volume]:
        return [Volume(0, "allgather", sparse_nbytes(kept))]

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        flat = tensor.detach().reshape(-1)
        flat = flat if flat.dtype.itemsize >= 4 else flat.float()
        indices = largest(flat, kept_elements(flat.numel(), self.cf))
        return encode_sparse(indices, flat[indices], flat.numel()), (tensor.shape, tensor.dtype)

    def decompress(self, payload: Tensor, ctx: Any) -> Tensor:
        shape, dtype = ctx
        indices, values = decode_sparse(payload, shape.numel())
        dense = values.new_zeros(shape.numel())
        dense[indices.long()] = values
        return dense.view(shape).to(dtype)
