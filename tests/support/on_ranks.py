"""Tests whose body runs on every rank of a job: the decorator :func:`on_ranks`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from tests.support.ranks import run_ranks

Test = Callable[..., None]


def on_ranks(
    size: int = 0,
    *,
    pool: str = "pool",
    env: Mapping[str, str] | None = None,
    start: Callable[..., list[Any]] | None = None,
    options: Sequence[str] = (),
) -> Callable[[Test], Callable[..., None]]:
    """Run a test's body on each rank of a job; an assertion or exception on a rank fails the test.

    The values of parameters, and of fixtures such as ``seed``, are pickled for the ranks; fixtures run in the test
    process. The body returns None. Not for methods.

    Args:
        size: number of ranks; 0: the parameter ``size`` of the test.
        pool: the fixture with the pools of ranks, which stay joined for all tests of a module.
        env: environment variables of a job for this test alone instead. A test with a parameter ``env`` has one, too,
            with these variables.
        start: runs the body in a job for this test alone, as :func:`run_ranks` does; for example a partial of
            :func:`tests.simulated_nccl.ranks.run`.
        options: names of the test's parameters that are also keywords of ``start``.
    """

    def decorate(test: Test) -> Callable[..., None]:
        own = inspect.signature(test)
        alone = start is not None or env is not None or "env" in own.parameters

        @wraps(test)
        def run(**values: Any) -> None:
            made = None if alone else values.pop(pool)
            given = [values[name] for name in own.parameters]
            call = (_call, test.__module__, test.__name__, *given)
            count = size or values["size"]
            if made is None:
                variables = {**(env or {}), **values.get("env", {})}
                more = {name: values[name] for name in options}
                results = (start or run_ranks)(count, *call, env=variables, **more)
            else:
                results = made(count).run(*call)
            assert results == [None] * count

        pools = [] if alone else [inspect.Parameter(pool, inspect.Parameter.KEYWORD_ONLY)]
        run.__signature__ = own.replace(parameters=[*own.parameters.values(), *pools])  # type: ignore[attr-defined]
        return run

    return decorate


def _call(module: str, name: str, *values: Any) -> Any:
    return getattr(importlib.import_module(module), name).__wrapped__(*values)
