"""The run configuration: one pydantic model, unknown keys refused, one sentence per field. The Prefect UI shows it as a form."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from configs.data import Arithmetic, Checks, DataSection, Hub, ReasoningGym
from configs.evaluation import DEFAULT_GATES, EvaluationSection, EvaluationSet, Gate
from configs.model import ModelSection, Scratch
from configs.rules import gates as rules_gates
from configs.rules import training as rules_training
from configs.section import Section, no_key
from configs.training import GRPOSection, RewardComponent, RewardConfig, SFTSection, Training

__all__ = [
    "DEFAULT_GATES",
    "Arithmetic",
    "Checks",
    "ComputeSection",
    "DataSection",
    "EvaluationSection",
    "EvaluationSet",
    "GRPOSection",
    "Gate",
    "Hub",
    "ModelSection",
    "ReasoningGym",
    "RegistrySection",
    "RewardComponent",
    "RewardConfig",
    "RunConfig",
    "SFTSection",
    "Scratch",
    "StorageSection",
    "TrackingSection",
    "Training",
]


class RegistrySection(Section):
    """The model in MLflow's registry."""

    name: str = Field(
        "ratchet",
        min_length=1,
        pattern=r"^[^/:\s\x00-\x1f][^/:\x00-\x1f]*$",
        description="Name of the registered model in MLflow.",
    )


class StorageSection(Section):
    """Where artifacts lie."""

    root: str | None = Field(
        None,
        pattern=r"^(s3|file)://.+",
        description="s3://bucket/prefix or file:///folder; none means the environment's RATCHET_STORE.",
    )
    timeout_seconds: float = no_key(
        60.0, "Seconds that one request to S3 may stay without an answer before it is sent again.", ge=0.1
    )


class TrackingSection(Section):
    """The MLflow server that shows the runs."""

    uri: str | None = Field(
        None,
        pattern=r"^https?://[^/]+",
        description="Address of the MLflow server. By default, the environment variable MLFLOW_TRACKING_URI.",
    )
    experiment: str = Field("ratchet", min_length=1, description="Name of the MLflow experiment.")


class ComputeSection(Section):
    """What the child processes run on."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes a GPU where there is one.")
    num_processes: int = Field(1, ge=1, description="Training processes on this machine, one per GPU.")
    dataloader_workers: int = no_key(0, "Processes that load training rows.", ge=0)


class RunConfig(Section):
    """Everything about one run of the pipeline."""

    model: ModelSection = Field(ModelSection(), description="The base model.")
    data: DataSection = Field(DataSection(), description="Where prompts, demonstrations and gold answers come from.")
    sft: SFTSection = Field(SFTSection(), description="Supervised fine-tuning.")
    grpo: GRPOSection = Field(GRPOSection(), description="Group relative policy optimization.")
    evaluation: EvaluationSection = Field(EvaluationSection(), description="How the models are measured.")
    gates: dict[str, Gate | None] = Field(
        DEFAULT_GATES,
        description="Conditions of promotion by name, put over the default ones; null turns one off, all others must pass.",
    )
    registry: RegistrySection = Field(RegistrySection(), description="The registered model.")
    storage: StorageSection = Field(StorageSection(), description="Where artifacts lie.")
    tracking: TrackingSection = Field(TrackingSection(), description="Where runs are shown.")
    compute: ComputeSection = Field(ComputeSection(), description="What the child processes run on.")
    seed: int = Field(1, ge=0, lt=2**32, description="Seed of everything random.")

    @field_validator("gates", mode="before")
    @classmethod
    def _over_the_defaults(cls, given: Any) -> Any:
        """A gate that is named takes the place of the default's fields that it gives, and the other defaults stay."""
        if not isinstance(given, dict):
            return given
        merged: dict[str, Any] = dict(DEFAULT_GATES)
        for name, gate in given.items():
            default = DEFAULT_GATES.get(name)
            merged[name] = {**default.model_dump(), **gate} if default and isinstance(gate, dict) else gate
        return merged

    @model_validator(mode="after")
    def _across_sections(self):
        rules_training.batch_arithmetic(self.grpo, self.compute.num_processes)
        rules_training.save_alignment(self.grpo)
        rules_gates.gates_on_what_is_measured(self.gates, self.evaluation, self.grpo)
        if not any(self.gates.values()):
            raise ValueError(
                "gates are all turned off and at least one must stand between a model and Staging: leave one on"
            )
        return self
