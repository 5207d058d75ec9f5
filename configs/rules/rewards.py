"""Rules of the reward: known types, settings that the type uses, and weights that keep accuracy first."""

from typing import Any

# Fields of a reward's settings that each type uses; any other one would be ignored and is refused.
REWARD_USES = {
    "accuracy": (),
    "length_penalty": ("target_length", "length_unit"),
    "step": ("step_bonus", "max_steps", "only_right"),
    "format": (),
}
COMPONENTS = tuple(REWARD_USES)


def reward_type(field: str, value: str, known: tuple[str, ...]) -> None:
    """Raises ValueError unless `value` is a known reward or has the form package.module:function."""
    module, colon, function = value.partition(":")
    if value in known or (colon and function.isidentifier() and all(p.isidentifier() for p in module.split("."))):
        return
    raise ValueError(f"{field} is {value!r} and must be one of {', '.join(known)} or package.module:function")


def reward_settings(field: str, kind: str, settings: Any, also: tuple[str, ...]) -> None:
    """Raises ValueError for a setting that differs from its default and that this kind of reward does not use."""
    used = (*also, *REWARD_USES.get(kind, ()))
    for name in settings.changed(*(name for name in type(settings).model_fields if name not in used)):
        raise ValueError(
            f"{field}.{name} is set and reward type {kind} does not use it: take it out, or choose a type that does"
        )


def rewards_of_the_right(reward_type: str, settings: Any) -> None:
    """Raises ValueError where the terms beside accuracy can lift a wrong answer to the worth of a right one, and for a negative weight of a known term.

    length_penalty lies between -1 and 0, format between 0 and 1, and step between 0 and step_bonus x max_steps where it also pays wrong answers.
    What a function of the user's may be worth is not known here; the reward audit looks at it.
    """
    if reward_type == "combined":
        terms = [(c.type, c.weight, c) for c in settings.components]
    elif reward_type in REWARD_USES:
        terms = [("accuracy", 1.0, settings)] + (
            [(reward_type, settings.weight, settings)] if reward_type != "accuracy" else []
        )
    else:
        return
    for name, weight, _ in terms:
        if name in REWARD_USES and weight < 0:
            raise ValueError(
                f"grpo.reward_config gives {name} the weight {weight:g}, which would pay for its opposite: set it to 0 or more"
            )
    accuracy = sum(weight for name, weight, _ in terms if name == "accuracy")
    swings = {
        name: weight * _swing(name, term) for name, weight, term in terms if name in REWARD_USES and name != "accuracy"
    }
    if 0 < accuracy <= (total := sum(swings.values())):
        names = " and ".join(f"{name} ({swing:g})" for name, swing in swings.items() if swing)
        raise ValueError(
            f"grpo.reward_config lets {names} move a completion by {total:g}, and accuracy is worth {accuracy:g}: a wrong answer could be worth "
            "as much as a right one; lower their weights so that they stay below accuracy's together"
        )


def _swing(name: str, term: Any) -> float:
    """How far a term, before its weight, can move a completion for something else than being right."""
    if name == "step":
        return 0.0 if term.only_right else term.step_bonus * term.max_steps
    return 1.0


def reward_names(grpo: Any) -> list[str]:
    """Names of the components of GRPO's reward."""
    terms = (
        [component.type for component in grpo.reward_config.components]
        if grpo.reward_type == "combined"
        else [grpo.reward_type]
    )
    if grpo.reward_type in REWARD_USES and grpo.reward_type != "accuracy":
        terms.insert(0, "accuracy")
    return [term.rpartition(":")[2] for term in terms]
