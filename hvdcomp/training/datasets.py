"""The data sets that a configuration can name."""

from hvdcomp.training import images, text  # noqa: F401 - they register theirs
from hvdcomp.training.data import DATASETS

__all__ = ["DATASETS"]
