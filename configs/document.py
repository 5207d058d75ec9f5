"""Writes docs/configuration.md from the schema: `python -m configs.document > docs/configuration.md`; a test holds the two together."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from configs.schema import RunConfig


def markdown() -> str:
    """Every field of the run configuration with its default and its sentence."""
    return HEAD + "".join(f"| `{name}` | {default} | {text} |\n" for name, default, text in rows(RunConfig)) + ENTRIES


def rows(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Name, default and description of every field below a section."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from rows(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _shown(field), field.description or ""


def _shown(field: Any) -> str:
    if field.is_required():
        return "required"
    if (
        isinstance(field.default, dict)
        and field.default
        and all(isinstance(v, BaseModel) for v in field.default.values())
    ):
        return ", ".join(f"`{k}`" for k in field.default)
    return f"`{'null' if field.default is None else field.default}`"


HEAD = """# Configuration

Every field of a run, as `section.field`. Unknown fields are refused; `null` is YAML's word for none, and relative paths start from
the folder that you run in. Made from `configs/schema.py`.

| field | default | |
|---|---|---|
"""
ENTRIES = """
The default gates are `accuracy` above `sft` (rival), `kl` from 0.001 to 0.5, and `mean_reward` of at least 0; `accuracy: null` turns the first off.
An entry of `gates` has `metric` and either `min` and `max`, or `rival: sft` or `rival: champion` with `margin` and `confidence`. An entry of
`evaluation.sets` has one of `split`, `path` and `task`, and perhaps `max_samples` (docs/evaluation.md). An entry of
`grpo.reward_config.components` has `type`, `weight` and the settings of its type: `target_length` and
`length_unit` (length_penalty), `step_bonus`, `max_steps` and `only_right` (step).

Values may be given three ways: in a YAML file or preset, by `--set section.field=value` on the command line, and as `overrides` of the flow's form.
"""

if __name__ == "__main__":
    print(markdown(), end="")
