"""What both benchmarks read from the command line."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from hvdcomp.config import ConfigError, read_yaml

NEVER_SLOWER = "never_slower"
"""A parameter of every method in an exchange: the optimizer's honest switch."""
HIERARCHICAL = "hierarchical"
"""A parameter of every method in an exchange: dense inside a host, compressed between hosts."""
GRAVAC = "gravac"
"""A parameter of methods with a factor in an exchange: GraVAC from CF 10 to 1000, where it soon stays."""
GRAVAC_WAYS = ("paper", "once")
"""With multi-level compression, or with one selection a step."""


def own_parameters(params: dict[str, Any]) -> dict[str, Any]:
    """Those of the method itself."""
    return {key: value for key, value in params.items() if key not in (NEVER_SLOWER, HIERARCHICAL, GRAVAC)}


def split_methods(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Names and parameters from "topk:cf=100:values=fp16,topk:levels=[10,100]".

    Raises:
        ConfigError: the text has another form.
    """
    methods = []
    for item in re.split(r",(?![^\[]*\])", text):
        name, *pairs = item.split(":")
        params = {}
        for pair in pairs:
            key, equals, value = pair.partition("=")
            if not equals:
                raise ConfigError(f"method {item!r}: write NAME:KEY=VALUE, for example topk:cf=100")
            params[key.strip()] = read_yaml(value, f"method {item!r}: {value!r}")
        methods.append((name.strip(), params))
    return methods


def check_writable(path: Path, option: str = "--json") -> None:
    """Raises ConfigError now rather than after minutes."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"{option} {path} cannot be written: {error.strerror}; give a file in a folder that exists"
        ) from error
