"""Rules of the `data` section: what each check can do, names of columns, and the prompt template."""

# What each check of the data can do with what it finds, and why the rest is refused. A check says `auto` where the source decides.
POLICIES = {
    "missing": ("drop", "fail", "a row without its question or answer can be neither repaired nor used"),
    "unreadable": ("drop", "fail", "a row that cannot be read or compared with can be neither repaired nor used"),
    "encoding": ("fix", "drop", "warn", "fail", ""),
    "duplicates": ("fix", "drop", "warn", "fail", ""),
    "conflicts": ("drop", "warn", "fail", "nobody knows which gold answer is right"),
    "near_duplicates": ("drop", "warn", "fail", "nobody knows which of two wordings is right"),
    "leaks": (
        "drop",
        "fail",
        "what judges a model must not have trained it, and a row cannot be repaired out of a split",
    ),
    "contamination": ("drop", "warn", "fail", "shared words cannot be repaired"),
    "disagreements": (
        "drop",
        "warn",
        "fail",
        "auto",
        "nobody knows whether the demonstration or the gold answer is right",
    ),
    "long_prompts": ("drop", "warn", "fail", "a prompt that is cut asks something else"),
}
# Names of a prepared row's own columns, and of what TRL and rewards give besides.
TAKEN = {
    "prompt", "prompts", "completion", "completions", "completion_ids", "gold", "id", "question", "category", "trainer_state", "image", "images", "tools",
    "log_extra", "log_metric", "environments",
}  # fmt: skip


def policy(check: str, value: str) -> None:
    """Raises ValueError for something that a check of the data cannot do."""
    *can, why = POLICIES[check]
    if value not in can:
        raise ValueError(f"data.checks.{check} is {value}, and {why}: set it to {', '.join(can[:-1])} or {can[-1]}")


def columns(names: list[str]) -> None:
    """Raises ValueError for a column of the data set under a name that prepared rows have already."""
    for name in names:
        if name in TAKEN:
            raise ValueError(
                f"data.columns names {name}, which every row has for its own: give the column another name, or leave it out"
            )
        if names.count(name) > 1:
            raise ValueError(f"data.columns names {name} twice: take one of them out")


def template(field: str, text: str) -> None:
    """Raises ValueError for what is no Jinja template."""
    from jinja2 import TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    try:
        # Compiled, not only parsed: that is where a filter that Jinja does not have is found.
        ImmutableSandboxedEnvironment().from_string(text)
    except TemplateSyntaxError as error:
        raise ValueError(f"{field} is no Jinja template (line {error.lineno}: {error.message}): correct it") from None
