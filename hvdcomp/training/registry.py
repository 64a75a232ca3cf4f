"""Things that a configuration names and gives parameters: built in, or the user's own `package.module:factory`."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hvdcomp.config import ConfigError, did_you_mean

T = TypeVar("T")


@dataclass(frozen=True)
class Entry(Generic[T]):
    """A factory under its name; `dataset` is the data set that a model was made for."""

    name: str
    factory: Callable[..., T]
    dataset: str | None = None

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.factory) or "").split("\n")[0]

    @property
    def parameters(self) -> dict[str, Any]:
        """Name -> default (`inspect.Parameter.empty` where there is none), what `**kwargs` takes left out."""
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        arguments = inspect.signature(self.factory).parameters.values()
        return {a.name: a.default for a in arguments if a.kind in named}

    def resolve(self, params: dict[str, Any]) -> dict[str, Any]:
        """`params` with the defaults filled in, as far as YAML can hold them. Raises ConfigError for an unknown one."""
        known = self.parameters
        kinds = {a.kind for a in inspect.signature(self.factory).parameters.values()}
        for given in params:
            if given not in known and inspect.Parameter.VAR_KEYWORD not in kinds:
                hint = did_you_mean(given, known)
                raise ConfigError(
                    f"{self.name} has no parameter {given!r}{hint}; it takes: {', '.join(known) or 'none'}"
                )
            if not _fits(params[given], known.get(given)):
                kind = type(known[given]).__name__
                raise ConfigError(f"{self.name}: {given} must be of type {kind}, given {params[given]!r}")
        missing = [name for name, default in known.items() if default is inspect.Parameter.empty and name not in params]
        if missing:
            raise ConfigError(f"{self.name} needs a value for {', '.join(missing)}")
        return {name: default for name, default in known.items() if _is_plain(default)} | params


class Registry(Generic[T]):
    """Factories by name; `kind` ("model") stands in messages."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Entry[T]] = {}
        self._sources: dict[str, Callable[[str], Callable[..., T]]] = {}

    def register(
        self, name: str, dataset: str | None = None, **defaults: Any
    ) -> Callable[[Callable[..., T]], Callable[..., T]]:
        """Decorator: put a function or class under `name`, with other `defaults` than its own where given.

        Raises ValueError when the name is taken.
        """

        def add(factory: Callable[..., T]) -> Callable[..., T]:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            named: Callable[..., T] = factory
            if defaults:
                named = functools.partial(factory, **defaults)
                named.__doc__ = factory.__doc__
            self._entries[name] = Entry(name, named, dataset)
            return factory

        return add

    def source(self, prefix: str) -> Callable[[Callable[[str], Callable[..., T]]], Callable[[str], Callable[..., T]]]:
        """Decorator: let a function make the factories of all names `prefix:REST`; it is given REST."""

        def add(find: Callable[[str], Callable[..., T]]) -> Callable[[str], Callable[..., T]]:
            self._sources[prefix] = find
            return find

        return add

    def __iter__(self) -> Iterator[Entry[T]]:
        return iter(self._entries.values())

    def find(self, name: str) -> Entry[T]:
        """The entry of that name, of a `source`, or of a `package.module:factory`. Raises ConfigError without one."""
        prefix, colon, rest = name.partition(":")
        if prefix in self._sources and colon:
            return Entry(name, self._sources[prefix](rest))
        if colon:
            return Entry(name, self._import(name))
        if name not in self._entries:
            hint = did_you_mean(name, self._entries)
            known = ", ".join(self._entries)
            raise ConfigError(f"unknown {self.kind} {name!r}{hint}; known: {known}; your own: package.module:factory")
        return self._entries[name]

    def _import(self, name: str) -> Callable[..., T]:
        module_name, _, attribute = name.partition(":")
        try:
            factory = getattr(importlib.import_module(module_name), attribute)
        except ImportError as error:
            raise ConfigError(f"{self.kind} {name!r}: {module_name} cannot be imported: {error}") from error
        except AttributeError:
            hint = did_you_mean(attribute, dir(sys.modules[module_name]))
            raise ConfigError(f"{self.kind} {name!r}: {module_name} has no {attribute!r}{hint}") from None
        if not callable(factory):
            raise ConfigError(f"{self.kind} {name!r} must be a function or class, it is {factory!r}")
        return factory


def _fits(value: Any, default: Any) -> bool:
    """Whether a value may stand in for a plain default; an int may for a float, a bool for nothing but a bool."""
    if not isinstance(default, (bool, int, float, str)):
        return True
    allowed = (int, float) if isinstance(default, float) else type(default)
    return isinstance(value, allowed) and isinstance(value, bool) == isinstance(default, bool)


def _is_plain(value: Any) -> bool:
    """Whether a YAML file can hold the value and give it back equal."""
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, (bool, int, float, str))
