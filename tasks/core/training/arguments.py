"""What SFT and GRPO share: our fields as TRL's, rows, and how the trained model is saved."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from configs.errors import ConfigError, first_line
from configs.schema import ComputeSection, Training
from tasks.core.model import precision

SCALE_REWARDS = {"mean": "none", "group_std": "group", "batch_std": "batch"}


# ---------------------------------------------------------------- the configuration as TRL's


def settings(
    section: Training, names: dict[str, str], compute: ComputeSection, seed: int, work: Path, keep_checkpoints: bool
) -> dict[str, Any]:
    """The keyword arguments for SFTConfig or GRPOConfig; `names` maps our fields to TRL's. The fields of `trl` come last.

    Raises ConfigError for a precision that the device does not have.
    """
    where = precision.device(compute)
    values = {trl: getattr(section, ours) for ours, trl in names.items() if ours != "warmup_ratio"}
    values["max_steps"] = section.max_steps or -1
    if "advantage" in names:
        values["scale_rewards"] = SCALE_REWARDS[section.advantage]
    return {
        **values,
        **precision.precision(section, where),
        "gradient_checkpointing": where == "cuda"
        if section.gradient_checkpointing == "auto"
        else section.gradient_checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "save_strategy": "steps" if keep_checkpoints else "no",
        "save_total_limit": section.save_total_limit,
        "dataloader_num_workers": compute.dataloader_workers,
        "use_cpu": where == "cpu",
        "seed": seed,
        "data_seed": seed,
        "output_dir": str(work),
        "report_to": "none",
        "disable_tqdm": True,
        **section.trl,
    }


def arguments(kind: str, config_class: type, section: Training, values: dict[str, Any]) -> Any:
    """SFTConfig or GRPOConfig made of `values`. Raises ConfigError for a value under `<kind>.trl` that TRL does not take."""
    # TRL looks at no types: a text for a number would fail somewhere in the first step.
    defaults = {field.name: field.default for field in fields(config_class)}
    for name, value in section.trl.items():
        if isinstance(value, str) and type(defaults.get(name)) in (int, float):
            raise ConfigError(
                f"{kind}.trl.{name} is {value!r}, and TRL takes a number there: write one, without quotes, or take it out"
            )
    with trl_values(kind, section):
        args = config_class(**values)
    # One process takes one GPU: with several in sight transformers would choose DataParallel, which TRL refuses.
    args._n_gpu = min(1, args.n_gpu)
    return args


@contextmanager
def trl_values(kind: str, section: Training) -> Iterator[None]:
    """Turns what TRL or transformers raises inside into a ConfigError that names the fields under `<kind>.trl`, where there are any."""
    try:
        yield
    except (TypeError, ValueError, KeyError, AttributeError, ImportError, OSError) as error:
        if not section.trl:
            raise
        names = ", ".join(section.trl)
        raise ConfigError(
            f"{kind}.trl ({names}) is refused by TRL ({first_line(error)}): correct these values or take them out"
        ) from error


def with_warmup(trainer_class: type, kind: str, section: Training) -> type:
    """`trainer_class` with a warm-up over `warmup_ratio` of its real number of optimizer steps, which it alone knows, rounded up.

    Its optimizer and schedule are made when training begins: values under `<kind>.trl` that these refuse raise ConfigError.
    """

    class WithWarmup(trainer_class):
        def create_optimizer(self, *args, **kwargs):
            with trl_values(kind, section):
                return super().create_optimizer(*args, **kwargs)

        def create_scheduler(self, num_training_steps, *args, **kwargs):
            # Rounded first: 0.1 * 30 is a little more than 3.
            self.args.warmup_steps = math.ceil(round(section.warmup_ratio * num_training_steps, 6))
            with trl_values(kind, section):
                return super().create_scheduler(num_training_steps, *args, **kwargs)

    return WithWarmup


# ---------------------------------------------------------------- rows


# ---------------------------------------------------------------- what is saved
