"""Makes a RunConfig from a preset, a YAML file or a mapping, and overrides.

Every mistake is a ConfigError whose message names field, value, limit and remedy.
"""

import difflib
import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from configs.errors import ConfigError
from configs.schema import RunConfig

FOLDER = Path(__file__).parent


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key that is given twice; YAML would silently take the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key} is given twice: remove one", node.start_mark
                )
        return super().construct_mapping(node, deep)


def presets() -> list[str]:
    """Names of the configurations that Ratchet ships."""
    return sorted(p.stem for p in FOLDER.glob("*.yaml"))


def load(source: str | Path | dict[str, Any], overrides: dict[str, Any] | None = None) -> RunConfig:
    """The configuration of a preset, a YAML file or a mapping, with overrides applied.

    Overrides are `{"grpo.max_steps": 40}` or `{"grpo": {"max_steps": 40}}`. Raises ConfigError.
    """
    values = source if isinstance(source, dict) else _read(str(source))
    for key, value in (overrides or {}).items():
        values = _merge(values, _nested(key, value))
    return validate(values)


def validate(values: dict[str, Any]) -> RunConfig:
    """The configuration that a mapping describes. Raises ConfigError."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError("; ".join(dict.fromkeys(_sentence(e) for e in error.errors()))) from None


def parse_set(assignment: str) -> tuple[str, Any]:
    """Splits `a.b=c` into the key and the YAML value. Raises ConfigError."""
    key, equals, text = assignment.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {assignment!r} must have the form section.field=value")
    if not text:
        return key, ""
    try:
        value = _numbers(yaml.load(text, _UniqueKeyLoader))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--set {key} has the value {text!r}, which is not YAML: {reason}") from None
    return key, value


def _numbers(value: Any) -> Any:
    """Converts texts such as 1e-5 to numbers: YAML 1.1 reads them as strings."""
    if isinstance(value, dict):
        return {k: _numbers(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_numbers(v) for v in value]
    is_number = isinstance(value, str) and re.fullmatch(r"[-+]?[0-9]+[eE][-+]?[0-9]+", value)
    return float(value) if is_number else value


def _read(source: str) -> dict[str, Any]:
    path = FOLDER / f"{source}.yaml" if source in presets() else Path(source)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the configuration {source!r} cannot be read ({error}): "
            f"name a YAML file or a preset ({', '.join(presets())})"
        ) from None
    try:
        values = _numbers(yaml.load(text, _UniqueKeyLoader))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"the configuration {source!r} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"the configuration {source!r} is a {type(values).__name__} "
            "and must be a mapping of sections such as `sft:` and `grpo:`"
        )
    return values


def _nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _merge(under: Any, over: Any) -> Any:
    if not (isinstance(under, dict) and isinstance(over, dict)):
        return over
    return {**under, **{k: _merge(under[k], v) if k in under else v for k, v in over.items()}}


def _sentence(error: dict[str, Any]) -> str:
    """One of pydantic's errors as a sentence."""
    field = ".".join(str(part) for part in error["loc"])
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] == "extra_forbidden":
        known = _fields_at(error["loc"][:-1])
        close = difflib.get_close_matches(str(error["loc"][-1]), known, 1)
        hint = f"did you mean {close[0]}?" if close else f"the fields there are {', '.join(known)}"
        return f"{field} is not a field of the configuration: {hint}"
    return f"{field} is {error['input']!r} and is refused: {error['msg'][0].lower()}{error['msg'][1:]}"


def _fields_at(loc: tuple) -> list[str]:
    """Names of the fields of the section at a path in the configuration."""
    model: Any = RunConfig
    for part in loc:
        field = getattr(model, "model_fields", {}).get(part)
        # In a mapping or list of sections, the part is the name of an entry. The entry's section is the last argument
        # of the annotation.
        model = field.annotation if field else model
        while not isinstance(model, type) or not issubclass(model, BaseModel):
            arguments = [a for a in getattr(model, "__args__", ()) if a is not type(None) and a is not str]
            if not arguments:
                return []
            model = arguments[-1]
    return list(model.model_fields)
