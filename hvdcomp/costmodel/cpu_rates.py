"""What methods cost one CPU thread where nobody has probed: of one small machine, whose copies make 19 GB/s.

Elements and bytes: `hvdcomp bench kernels` as in docs/compressors.md, on a quiet machine, of 25 million elements; a sum
begins with zeros (0.216 ns an element), the rest of decoding is for the payloads of eight workers. A byte of a sparse
payload: the index code's at 10 and at 1 %. Tensors: the fastest of 40 steps of 4,096 elements.
"""

from hvdcomp.costmodel.rates import Cost, Rates

RATES = {
    "none": Rates(Cost(1.01e-05, 0, 0), Cost(1.46e-05, 0, 0)),
    "fp16": Rates(Cost(3.41e-05, 3.98e-10, 0), Cost(3.05e-05, 3.01e-10, 0)),
    "bf16": Rates(Cost(0.000101, 7.16e-10, 0), Cost(4.66e-05, 2.16e-10, 9e-11)),
    "topk": Rates(Cost(0.000161, 4.24e-10, 4.6e-10), Cost(0.000111, 2.16e-10, 8.85e-10)),
    "dgc": Rates(Cost(0.000237, 9.84e-10, 4.6e-10), Cost(0.00012, 2.16e-10, 1.02e-09)),
    "redsync": Rates(Cost(0.000193, 5.2e-10, 4.6e-10), Cost(0.000113, 2.16e-10, 1.82e-09)),
    "mstopk": Rates(Cost(0.000347, 5.04e-10, 4.6e-10), Cost(0.00011, 2.16e-10, 8.85e-10)),
    "gaussiank": Rates(Cost(0.000203, 4.36e-10, 4.6e-10), Cost(0.000106, 2.16e-10, 5e-10)),
    "sidcoe": Rates(Cost(0.000198, 6.76e-10, 4.6e-10), Cost(0.000105, 2.16e-10, 3.77e-10)),
    "sidcogp": Rates(Cost(0.000497, 6.2e-10, 4.6e-10), Cost(0.000121, 2.16e-10, 7.12e-10)),
    "sidcop": Rates(Cost(0.000209, 5.64e-10, 4.6e-10), Cost(0.000111, 2.16e-10, 6.06e-10)),
    "randomk": Rates(Cost(0.000102, 7.72e-10, 0), Cost(4.5e-05, 2.17e-10, 0)),
    "artopk": Rates(Cost(0.00011, 6.16e-10, 0), Cost(4.48e-05, 2.09e-10, 0)),
    "oktopk": Rates(Cost(0.000669, 7.28e-10, 4.6e-10), Cost(0.000237, 2.16e-10, 2.85e-09)),
    "gradiveq": Rates(Cost(6.46e-05, 3.64e-09, 0), Cost(5.25e-05, 9.52e-10, 0)),
    "signsgd": Rates(Cost(6.54e-05, 3.13e-10, 0), Cost(6.09e-05, 2.16e-10, 1.24e-09)),
    "signum": Rates(Cost(7.63e-05, 6.32e-10, 0), Cost(6.48e-05, 2.16e-10, 1.14e-09)),
    "efsignsgd": Rates(Cost(0.000109, 5.68e-10, 0), Cost(9.22e-05, 2.16e-10, 1.05e-09)),
    "onebit": Rates(Cost(0.000113, 5.68e-10, 0), Cost(9.76e-05, 2.16e-10, 1.04e-09)),
    "qsgd": Rates(Cost(7.46e-05, 4.72e-10, 0), Cost(7.49e-05, 2.16e-10, 1.69e-10)),
    "terngrad": Rates(Cost(8.31e-05, 3.69e-10, 0), Cost(0.000116, 2.16e-10, 8.46e-10)),
    "natural": Rates(Cost(8.06e-05, 4.36e-10, 0), Cost(0.000105, 2.16e-10, 3.62e-10)),
    "int8": Rates(Cost(0.000131, 9.32e-10, 0), Cost(0.000127, 2.16e-10, 3.62e-10)),
    "atomo": Rates(Cost(0.000685, 1.54e-07, 0), Cost(9.9e-05, 2.16e-10, 1.53e-08)),
    "powersgd:rank=4": Rates(Cost(0.000121, 1.35e-09, 0), Cost(4.61e-05, 4.92e-10, 0)),
}
"""By :func:`hvdcomp.costmodel.rates.key_of`."""
