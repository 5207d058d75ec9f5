"""Writes docs/configuration.md from the schema: `python -m configs.document > docs/configuration.md`.

A test fails if the page differs from the schema.
"""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from configs.schema import RunConfig


def markdown() -> str:
    """A page with a table per section: every field with its default and its description."""
    parts = [HEAD]
    for name, field in RunConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            parts.append(_table(name, field.description, rows(field.annotation, f"{name}.")))
    others = [(name, _default(field), field.description) for name, field in _plain_fields(RunConfig)]
    parts.append(_table("Other fields", "Fields without a section.", others))
    return "\n".join(parts) + ENTRIES


def rows(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    """(name, default, description) of every field below a section."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from rows(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _default(field), field.description or ""


def _plain_fields(model: type[BaseModel]) -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            yield name, field


def _table(title: str, text: str, fields: Any) -> str:
    lines = [f"| `{name}` | {default} | {description} |" for name, default, description in fields]
    return "\n".join([f"## {title}", "", text, "", "| field | default | |", "|---|---|---|", *lines, ""])


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    default = field.default
    if isinstance(default, dict) and default and all(isinstance(v, BaseModel) for v in default.values()):
        return ", ".join(f"`{k}`" for k in default)
    return f"`{'null' if default is None else default}`"


HEAD = """# Configuration

Every field of a run configuration. Unknown fields are refused. `null` means none. Relative paths start from the folder
that you run in. You can give values in three ways: in a YAML file, by `--set section.field=value` on the command line,
and as `overrides` in the run form of the Prefect UI. The page is generated from `configs/schema.py`.
"""
ENTRIES = """
## Entries of mappings and lists

The default gates are `accuracy` above `sft` (rival), `kl` from 0.001 to 0.5, and `mean_reward` of at least 0;
`accuracy: null` turns the first off.
An entry of `gates` has `metric` and either `min` and `max`, or `rival: sft` or `rival: champion` with `margin` and
`confidence`. An entry of `evaluation.sets` has one of `split`, `path` and `task`, and optionally `max_samples`
([evaluation](evaluation.md)). An entry of `grpo.reward_config.components` has `type`, `weight` and the settings of its
type: `target_length` and `length_unit` (length_penalty), `step_bonus`, `max_steps` and `only_right` (step).
"""

if __name__ == "__main__":
    print(markdown(), end="")
