"""Modules of linen inside of NNX ones, and the other way round: what a state would not hold."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
from flax import nnx
from flax.nnx import bridge


def check_one_library(call: str, model: nn.Module | nnx.Module) -> None:
    """Raises TypeError where a module holds one of the other library that is not bridged.

    A linen module's parameters come from its calls of `init`, an NNX module's lie in it: those of
    the other kind would be constants, or an error in the middle of a step.
    """
    if isinstance(model, nn.Module):
        found, kinds, remedy = _in_linen(model), ("linen", "NNX"), "ToLinen"
    else:
        found, kinds, remedy = _in_nnx(model), ("NNX", "linen"), "ToNNX"
    for path, inner in found:
        raise _refused(call, path, inner, kinds, remedy)


@contextlib.contextmanager
def checked_as_it_runs(call: str, model: nn.Module) -> Iterator[None]:
    """Does what `check_one_library` does of a linen module's inner ones while they run.

    Many are made, and all are set up, no earlier. What a method makes and keeps nowhere is not
    seen: Flax does not tell of it.
    """

    def check(method: Any, args: Any, kwargs: Any, context: Any) -> Any:
        results = method(*args, **kwargs)
        for name, value in vars(context.module).items():
            for inner in _modules(value):
                if isinstance(inner, nnx.Module):
                    path = ".".join((type(model).__name__, *context.module.path, name))
                    raise _refused(call, path, inner, ("linen", "NNX"), "ToLinen")
        return results

    with nn.intercept_methods(check):
        yield


def _refused(call: str, path: str, inner: Any, kinds: tuple[str, str], remedy: str) -> TypeError:
    return TypeError(
        f"{call}: model: {path}: expected what a {kinds[0]} module can hold, got the {kinds[1]} "
        f"module {type(inner).__name__}, whose parameters would not be trained. Wrap it in "
        f"flax.nnx.bridge.{remedy}, or write the model in one library."
    )


def _in_linen(module: nn.Module, path: str = "") -> Iterator[tuple[str, nnx.Module]]:
    path = path or type(module).__name__
    for field in dataclasses.fields(module):
        for inner in _modules(getattr(module, field.name, None)):
            if isinstance(inner, nnx.Module):
                yield f"{path}.{field.name}", inner
            elif field.name != "parent":
                yield from _in_linen(inner, f"{path}.{field.name}")


def _in_nnx(model: nnx.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in nnx.iter_modules(model):
        if not isinstance(module, bridge.ToNNX):
            for name, value in vars(module).items():
                for inner in _modules(value):
                    if isinstance(inner, nn.Module):
                        yield ".".join(map(str, (type(model).__name__, *path, name))), inner


def _modules(value: Any) -> list[Any]:
    def is_module(leaf: Any) -> bool:
        return isinstance(leaf, nn.Module | nnx.Module)

    return [leaf for leaf in jax.tree.leaves(value, is_leaf=is_module) if is_module(leaf)]
