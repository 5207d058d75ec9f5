"""The base class of every section of the run configuration."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0, le=1)]


def no_key(default: Any, description: str, **limits: Any) -> Any:
    """A field that cannot change the result of a stage, and therefore is not part of the stage key."""
    return Field(default, description=description, json_schema_extra={"in_key": False}, **limits)


class Section(BaseModel):
    """A part of the configuration. A stage receives its own section, never the whole configuration."""

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)

    def key(self) -> dict[str, Any]:
        """The fields that can change the result of the stage, as plain JSON values."""
        ignored = {n for n, f in type(self).model_fields.items() if (f.json_schema_extra or {}).get("in_key") is False}
        values = {n: getattr(self, n) for n in type(self).model_fields if n not in ignored}
        plain = self.model_dump(mode="json", exclude=ignored)
        return {n: v.key() if isinstance(v, Section) else plain[n] for n, v in values.items()}

    def changed(self, *names: str) -> dict[str, Any]:
        """Those of the named fields that differ from their default, with their values."""
        return {n: getattr(self, n) for n in names if getattr(self, n) != type(self).model_fields[n].default}
