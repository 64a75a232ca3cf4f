"""The networks that a configuration can name."""

from hvdcomp.training.models import branching, language, libraries, resnet, small, vgg  # noqa: F401 - they register theirs
from hvdcomp.training.models.base import MODELS, Recurrent, begin_text, digest, evaluating, parameter_count

__all__ = ["MODELS", "Recurrent", "begin_text", "digest", "evaluating", "parameter_count"]
