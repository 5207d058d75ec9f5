"""Reward functions of the user's, `package.module:function`: found, part of the stage key, imported, and checked at every call."""

import asyncio
import copy
import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
import sysconfig
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from modulefinder import ModuleFinder
from numbers import Real
from pathlib import Path
from typing import Any

from configs.errors import ConfigError, RatchetError, StageFailed


def digest(spec: str) -> str:
    """SHA-256 of the function's module and of the user's modules that it imports. Runs none of it: it may import torch, and the caller must not.

    For a module in a folder of the user's these are the modules of that folder that it imports, directly or not; for an installed package all its
    files. Data that the function reads goes unseen. Raises ConfigError for a module that is not there.
    """
    origin, root = _origin(spec)
    if root in (Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))):
        files = sorted((root / spec.partition(":")[0].split(".")[0]).rglob("*.py")) or [origin]
    else:
        finder = ModuleFinder(path=[str(root)])
        try:
            finder.run_script(str(origin))
        except SyntaxError as error:
            raise _not_importable(spec, error) from error
        files = sorted({Path(m.__file__).resolve() for m in finder.modules.values() if m.__file__})
    total = hashlib.sha256()
    for file in files:
        total.update(f"{file.relative_to(root)} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def function(spec: str) -> Callable[..., list[float | None]]:
    """The user's function in the form that TRL wants: given the arguments that it names, with what it returns checked.

    Raises ConfigError for a function that cannot be used, and when called for a value that is no reward; StageFailed for what the function raises.
    """
    inner = _imported(spec)
    parameters = inspect.signature(inner).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    accepted = {p.name for p in parameters}
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]

    def reward(prompts, completions, completion_ids=None, gold=None, **columns):
        """Calls the user's function with the arguments that it names."""
        given = {
            "prompts": prompts,
            "completions": completions,
            "completion_ids": completion_ids,
            "gold": gold,
            **columns,
        }
        # Which columns there are, the data decides. (More, such as TRL's `trainer_state`, is there while GRPO trains alone, and needs a default.)
        if unknown := [name for name in needed if name not in given]:
            raise ConfigError(
                f"the reward {spec} asks for {', '.join(unknown)}, and what there is are {', '.join(given)}: name these, "
                "add to data.columns, or write **columns"
            )
        # Copies: the caller goes on with its lists, whatever the function does to what it gets.
        given = {name: _copied(value) for name, value in given.items()}
        try:
            values = inner(**(given if takes_all else {k: v for k, v in given.items() if k in accepted}))
            if inspect.iscoroutinefunction(inner):
                values = _awaited(values)
        except RatchetError:
            raise
        except (Exception, SystemExit) as error:  # whatever the user's function does
            last = traceback.extract_tb(error.__traceback__)[-1]
            raise StageFailed(
                f"the reward {spec} raised {type(error).__name__}: {error} ({Path(last.filename).name} line {last.lineno})"
            ) from error
        return _checked(spec, values, len(completions), columns.get("id"))

    # By the name it was asked for, which is the metric's: one function may have two.
    reward.__name__ = spec.partition(":")[2]
    reward.needs_gold = "gold" in needed
    return reward


def _awaited(coroutine: Coroutine) -> Any:
    """What an async function returns, wherever it is called: a loop that runs in this thread already cannot run it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as elsewhere:
        return elsewhere.submit(asyncio.run, coroutine).result()


def _copied(value: Any) -> Any:
    """A list with all that is in it anew; anything else (TRL's trainer state, say) as it is."""
    return copy.deepcopy(value) if isinstance(value, list) else value


def _origin(spec: str) -> tuple[Path, Path]:
    """File of the module, and the folder that its top-level package or module lies in."""
    module = spec.partition(":")[0]
    _look_here_too()
    try:
        found = importlib.util.find_spec(module)
    except (Exception, SystemExit) as error:  # whatever the user's package does while it is found
        raise _not_importable(spec, error) from error
    if found is None or not found.has_location:
        raise _not_importable(spec, ModuleNotFoundError(f"No module named {module!r}"))
    origin = Path(found.origin).resolve()
    depth = module.count(".") + (1 if found.submodule_search_locations else 0)
    return origin, origin.parents[depth]


def _look_here_too() -> None:
    """A user's module lies in the folder of the run, which a worker's process enters only after it has started."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def _not_importable(spec: str, error: BaseException) -> ConfigError:
    why = " ".join(f"{type(error).__name__}: {error}".split())
    return ConfigError(
        f"the reward {spec} cannot be imported ({why}): correct {spec.partition(':')[0]}, "
        f"run in the folder that holds it (this one is {Path.cwd()}), or install it where Ratchet runs"
    )


def _imported(spec: str) -> Callable:
    """The function that `package.module:function` names."""
    module, _, name = spec.partition(":")
    _look_here_too()
    try:
        found = getattr(importlib.import_module(module), name, None)
    except (Exception, SystemExit) as error:  # whatever the user's module does while it is imported
        raise _not_importable(spec, error) from error
    if found is None:
        raise ConfigError(f"the reward {spec} does not exist: {module} has no {name}, check the spelling")
    remedy = f"write it as `def {name}(completions, gold, **columns)`"
    if not inspect.isfunction(found):
        raise ConfigError(f"the reward {spec} is {type(found).__name__} and must be a function: {remedy}")
    if not found.__name__.isidentifier():
        raise ConfigError(
            f"the reward {spec} is a lambda, whose name {found.__name__} is none that a metric could have: {remedy}"
        )
    if name == "total":
        raise ConfigError(
            f"the reward {spec} is named total, which is the name of the weighted sum of all rewards: give the function another name"
        )
    if inspect.isgeneratorfunction(found) or inspect.isasyncgenfunction(found):
        raise ConfigError(f"the reward {spec} yields its values and must return them in a list: {remedy}")
    return found


def _checked(spec: str, values: Any, count: int, ids: list[str] | None) -> list[float | None]:
    """Raises ConfigError unless `values` holds one finite number or None per completion; `ids` are the names of their rows, where there are any."""
    if not isinstance(values, list):
        raise ConfigError(
            f"the reward {spec} returned {type(values).__name__} and must return a list with one number or None per completion"
        )
    if len(values) != count:
        raise ConfigError(
            f"the reward {spec} returned {len(values)} values for {count} completions: return one per completion"
        )
    for row, value in enumerate(values):
        if value is not None and not (isinstance(value, Real) and _is_finite(value)):
            named = f" (row {ids[row]})" if ids and len(ids) == count else ""
            raise ConfigError(
                f"the reward {spec} returned {value!r:.100} for completion {row}{named}: return a finite number, or None for no opinion"
            )
    return [None if v is None else float(v) for v in values]


def _is_finite(value: Real) -> bool:
    """Whether a float can hold the value: a whole number of 400 digits is finite, and no reward."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
