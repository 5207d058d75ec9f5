"""Rules of the run configuration that are more than a range; each breach is one sentence with field, value, limit and remedy."""

import ast
import importlib.util
import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

# Fields of a reward's settings that each type uses; any other one would be ignored and is refused.
REWARD_USES = {"accuracy": (), "length_penalty": ("target_length", "length_unit"), "step": ("step_bonus", "max_steps", "only_right"), "format": ()}
COMPONENTS = tuple(REWARD_USES)
# Metrics that have a value for every prompt, so that two models can be compared on them, with their column in completions.jsonl.
PER_PROMPT = {"accuracy": "correct", "mean_reward": "reward", "format_rate": "formatted", "mean_length": "length", "truncated_rate": "truncated"}
METRICS = (*PER_PROMPT, "kl", "kl_sequence")
SAMPLED = re.compile(r"(?:pass|maj)_at_([1-9][0-9]*)")
# Least and greatest value that a metric can have.
RANGES = {"accuracy": (0, 1), "format_rate": (0, 1), "truncated_rate": (0, 1), "mean_length": (0, math.inf), "kl": (0, math.inf), "kl_sequence": (0, math.inf)}

# The one place where the text's names meet TRL's. `None`: computed from the field rather than passed on.
TRL_NAMES = {
    "learning_rate": "learning_rate",
    "num_epochs": "num_train_epochs",
    "max_steps": "max_steps",
    "batch_size": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "warmup_ratio": "warmup_steps",
    "max_grad_norm": "max_grad_norm",
    "save_steps": "save_steps",
    "logging_steps": "logging_steps",
}
SFT_NAMES = TRL_NAMES | {"max_length": "max_length"}
GRPO_NAMES = TRL_NAMES | {
    "num_generations": "num_generations",
    "max_new_tokens": "max_completion_length",
    "temperature": "temperature",
    "kl_coef": "beta",
    "clip_range": "epsilon",
    "advantage": "scale_rewards",
}
# TRL fields that other fields of the configuration decide: a value under `trl` would contradict them.
DERIVED = {
    "gradient_checkpointing": "gradient_checkpointing",
    "activation_checkpointing": "gradient_checkpointing",
    "trust_remote_code": "model.trust_remote_code",
    "bf16": "mixed_precision",
    "fp16": "mixed_precision",
    "reward_weights": "reward_config",
    "save_total_limit": "save_total_limit",
    "dataloader_num_workers": "compute.dataloader_workers",
    "seed": "seed",
    "data_seed": "seed",
    "use_cpu": "compute.device",
    "model_init_kwargs": "model",
    "chat_template_kwargs": "model.chat_template_kwargs",
    "chat_template_path": "model.chat_template",
}
# TRL fields that the batch arithmetic uses.
COUNTS = ("steps_per_generation", "num_iterations")
# TRL fields that Ratchet needs for itself.
RESERVED = {
    "assistant_only_loss", "auto_find_batch_size", "completion_only_loss", "dataset_text_field", "deepspeed", "disable_tqdm", "do_eval", "do_train",
    "eval_steps", "eval_strategy", "fsdp", "generation_batch_size", "hub_model_id", "hub_token", "load_best_model_at_end", "logging_strategy",
    "output_dir", "packing", "push_to_hub", "remove_unused_columns", "report_to", "resume_from_checkpoint", "run_name", "save_safetensors",
    "save_strategy", "sync_ref_model", "use_vllm",
}  # fmt: skip


def divisible(field: str, value: int, by_field: str, by: int) -> None:
    """Raises ValueError unless `by` divides `value`."""
    if value % by:
        raise ValueError(f"{field} is {value} and must be a multiple of {by_field}, which is {by}: change one of them")


@cache
def trl_fields(kind: str) -> frozenset[str]:
    """Field names of TRL's SFTConfig or GRPOConfig, read from the sources: importing them takes torch and six seconds."""
    trl = Path(importlib.util.find_spec("trl").origin).parent / "trainer"
    transformers = Path(importlib.util.find_spec("transformers").origin).parent
    files = [trl / f"{kind}_config.py", trl / "base_config.py", transformers / "training_args.py"]
    names: set[str] = set()
    for file in files:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                names |= {f.target.id for f in node.body if isinstance(f, ast.AnnAssign) and not f.target.id.startswith("_")}
    return frozenset(names)


def trl_names(kind: str, given: dict[str, Any]) -> None:
    """Raises ValueError for a name under `<kind>.trl` that TRL does not have or that a field of the configuration owns, and for a value that is no JSON."""
    for name, value in given.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise ValueError(f"{kind}.trl.{name} is {value!r} and must be a text, a finite number, true, false, or a list or mapping of these") from None
        if name in COUNTS and not (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
            raise ValueError(f"{kind}.trl.{name} is {value!r} and must be a whole number of at least 1")
    owned = {trl: ours for ours, trl in (SFT_NAMES if kind == "sft" else GRPO_NAMES).items()} | DERIVED
    for name in given:
        if name in owned:
            raise ValueError(f"{kind}.trl.{name} is owned by another field: set {owned[name]} instead")
        if name in RESERVED:
            raise ValueError(f"{kind}.trl.{name} is set by Ratchet itself: take it out")
        if name not in trl_fields(kind):
            raise ValueError(f"{kind}.trl.{name} is no field of TRL's {kind.upper()}Config: check the spelling or take it out")


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
        raise ValueError(f"{field}.{name} is set and reward type {kind} does not use it: take it out, or choose a type that does")


def rewards_of_the_right(reward_type: str, settings: Any) -> None:
    """Raises ValueError where the terms beside accuracy can lift a wrong answer to the worth of a right one, and for a negative weight of a known term.

    length_penalty lies between -1 and 0, format between 0 and 1, and step between 0 and step_bonus x max_steps where it also pays wrong answers.
    What a function of the user's may be worth is not known here; the reward audit looks at it.
    """
    if reward_type == "combined":
        terms = [(c.type, c.weight, c) for c in settings.components]
    elif reward_type in REWARD_USES:
        terms = [("accuracy", 1.0, settings)] + ([(reward_type, settings.weight, settings)] if reward_type != "accuracy" else [])
    else:
        return
    for name, weight, _ in terms:
        if name in REWARD_USES and weight < 0:
            raise ValueError(f"grpo.reward_config gives {name} the weight {weight:g}, which would pay for its opposite: set it to 0 or more")
    accuracy = sum(weight for name, weight, _ in terms if name == "accuracy")
    swings = {name: weight * _swing(name, term) for name, weight, term in terms if name in REWARD_USES and name != "accuracy"}
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


def gate(metric: str, least: float | None, most: float | None, rival: str | None, for_rival: dict[str, float]) -> None:
    """Raises ValueError for a gate without a condition, with both kinds, with crossed limits, or with what is for a rival (margin, confidence) and none."""
    prefix, _, plain = metric.rpartition("/")
    # What a further set measures is known with all of the configuration: gates_on_what_is_measured.
    if not prefix and metric not in METRICS and not SAMPLED.fullmatch(metric):
        known = ", ".join((*METRICS, "pass_at_<k>", "maj_at_<k>", "rewards/<component>"))
        raise ValueError(f"the gate on {metric!r} names no metric: the metrics are {known}, and those of a further set")
    if rival is not None and plain not in PER_PROMPT:
        raise ValueError(f"the gate on {metric} has a rival, which needs a value for every prompt, and {plain} has none: {', '.join(PER_PROMPT)} have one")
    if rival is not None and (least is not None or most is not None):
        raise ValueError(f"the gate on {metric} has a rival and a limit: make two gates of it")
    if rival is None and least is None and most is None:
        raise ValueError(f"the gate on {metric} has no min, max or rival: give one, or take the gate out")
    if least is not None and most is not None and least > most:
        raise ValueError(f"the gate on {metric} has min {least:g} above max {most:g}: no value can pass")
    for name, value in for_rival.items() if rival is None else ():
        what = {"margin": "difference", "confidence": "interval"}[name]
        raise ValueError(f"the gate on {metric} has {name} {value:g} and no rival, whose {what} it is for: take it out, or name a rival")


def reward_names(grpo: Any) -> list[str]:
    """Names of the components of GRPO's reward."""
    terms = [component.type for component in grpo.reward_config.components] if grpo.reward_type == "combined" else [grpo.reward_type]
    if grpo.reward_type in REWARD_USES and grpo.reward_type != "accuracy":
        terms.insert(0, "accuracy")
    return [term.rpartition(":")[2] for term in terms]


def gates_on_what_is_measured(gates: dict[str, Any], evaluation: Any, grpo: Any) -> None:
    """Raises ValueError for a gate on a set that is not in evaluation.sets, or on a metric or a reward's component that there will not be."""
    for gate in filter(None, gates.values()):
        name, _, metric = gate.metric.rpartition("/")
        if is_component := name.rpartition("/")[2] == "rewards":
            name = name.removesuffix("rewards").rstrip("/")
        if name and name not in evaluation.sets:
            raise ValueError(f"the gate on {gate.metric} names the set {name}, which evaluation.sets does not have: add it, or correct the name")
        is_task = name != "" and evaluation.sets[name].task is not None
        if is_component:
            if metric not in reward_names(grpo):
                raise ValueError(f"the gate on {gate.metric} names no component of the reward: these are {', '.join(reward_names(grpo))}")
            if is_task:
                raise ValueError(f"the gate on {gate.metric} is on a component of the reward, and a harness's task has none: name a metric of the task")
            continue
        if is_task:
            if gate.rival is not None:
                raise ValueError(f"the gate on {gate.metric} has a rival, which needs a value for every prompt: a harness's task has none, give a min or max")
            continue
        if name and metric not in PER_PROMPT and not SAMPLED.fullmatch(metric):
            raise ValueError(f"the gate on {gate.metric} names no metric of a set: these are {', '.join(PER_PROMPT)}, pass_at_<k> and maj_at_<k>")
        if (sampled := SAMPLED.fullmatch(metric)) and (not evaluation.samples or int(sampled[1]) not in evaluation.k):
            raise ValueError(f"the gate on {gate.metric} needs evaluation.samples of at least {sampled[1]}, and {sampled[1]} in evaluation.k: set both")
        _can_pass(gate, metric)


def _can_pass(gate: Any, metric: str) -> None:
    """Raises ValueError for limits beyond every value of the metric: the gate would refuse each model after it is trained."""
    least, most = (0, 1) if SAMPLED.fullmatch(metric) else RANGES.get(metric, (-math.inf, math.inf))
    if gate.min is not None and gate.min > most:
        raise ValueError(f"the gate on {gate.metric} has min {gate.min:g}, and its values are at most {most}: no value can pass, lower min")
    if gate.max is not None and gate.max < least:
        raise ValueError(f"the gate on {gate.metric} has max {gate.max:g}, and its values are at least {least}: no value can pass, raise max")
    if gate.rival is not None and gate.margin >= most - least:
        raise ValueError(
            f"the gate on {gate.metric} has margin {gate.margin:g}, and two values differ by at most {most - least}: no value can pass, lower margin"
        )


def batch_arithmetic(grpo: Any, num_processes: int) -> None:
    """Raises ValueError unless a generation batch holds whole groups; proposes the nearest batch sizes that do."""
    accumulation = grpo.trl.get("steps_per_generation", grpo.gradient_accumulation_steps)
    total = grpo.batch_size * accumulation * num_processes
    if total % grpo.num_generations:
        unit = grpo.num_generations // math.gcd(grpo.num_generations, accumulation * num_processes)
        below, above = grpo.batch_size // unit * unit, -(-grpo.batch_size // unit) * unit
        works = " or ".join(str(n) for n in (below, above) if n)
        raise ValueError(
            f"grpo.batch_size is {grpo.batch_size}: with {accumulation} accumulation steps and {num_processes} processes that is {total} completions a step, "
            f"which must be a multiple of grpo.num_generations = {grpo.num_generations}: set batch_size to {works}"
        )


def save_alignment(grpo: Any) -> None:
    """Raises ValueError unless checkpoints fall on generation boundaries, where alone GRPO resumes exactly."""
    per_generation = grpo.trl.get("steps_per_generation", grpo.gradient_accumulation_steps) * grpo.trl.get("num_iterations", 1)
    unit = per_generation // math.gcd(per_generation, grpo.gradient_accumulation_steps)
    if grpo.save_steps % unit:
        above = -(-grpo.save_steps // unit) * unit
        raise ValueError(f"grpo.save_steps is {grpo.save_steps} and must be a multiple of {unit}, the steps of one generation: set it to {above}")


# What each check of the data can do with what it finds, and why the rest is refused. A check says `auto` where the source decides.
POLICIES = {
    "missing": ("drop", "fail", "a row without its question or answer can be neither repaired nor used"),
    "unreadable": ("drop", "fail", "a row that cannot be read or compared with can be neither repaired nor used"),
    "encoding": ("fix", "drop", "warn", "fail", ""),
    "duplicates": ("fix", "drop", "warn", "fail", ""),
    "conflicts": ("drop", "warn", "fail", "nobody knows which gold answer is right"),
    "near_duplicates": ("drop", "warn", "fail", "nobody knows which of two wordings is right"),
    "leaks": ("drop", "fail", "what judges a model must not have trained it, and a row cannot be repaired out of a split"),
    "contamination": ("drop", "warn", "fail", "shared words cannot be repaired"),
    "disagreements": ("drop", "warn", "fail", "auto", "nobody knows whether the demonstration or the gold answer is right"),
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
            raise ValueError(f"data.columns names {name}, which every row has for its own: give the column another name, or leave it out")
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
