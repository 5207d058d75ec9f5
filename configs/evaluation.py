"""The section of the evaluation, and the gates."""

from typing import Literal

from pydantic import Field, model_validator

from configs import rules
from configs.section import Section


class EvaluationSection(Section):
    """How base, SFT and GRPO are measured, on the same held-out prompts."""

    split: Literal["test", "validation"] = Field("test", description="Held-out rows to measure on.")
    max_samples: int | None = Field(None, ge=1, description="Use only this many prompts; none means all.")
    max_new_tokens: int | None = Field(None, ge=1, description="Tokens of a completion at most; none means grpo.max_new_tokens.")
    batch_size: int = Field(64, ge=1, description="Prompts per forward pass, sorted by length.")
    kl_samples: int = Field(64, ge=1, description="Held-out prompts on which KL is measured, one sampled completion each.")
    kl_temperature: float = Field(1.0, gt=0, description="Sampling temperature of the completions that KL is measured on.")


class Gate(Section):
    """One condition of promotion: a limit, or a rival that must be beaten."""

    metric: str = Field(description="Metric of the evaluation, such as accuracy, mean_reward, kl.")
    min: float | None = Field(None, description="Least value that passes.")
    max: float | None = Field(None, description="Greatest value that passes.")
    rival: Literal["sft"] | None = Field(None, description="Compare with this model on the same prompts, paired.")
    margin: float = Field(0.0, description="The difference to the rival must exceed this.")
    confidence: float = Field(0.95, gt=0.5, lt=1, description="Confidence of the interval of the difference.")

    @model_validator(mode="after")
    def _one_condition(self):
        rules.gate(self.metric, self.min, self.max, self.rival)
        return self


DEFAULT_GATES = {
    "accuracy": Gate(metric="accuracy", rival="sft"),
    "kl": Gate(metric="kl", min=0.001, max=0.5),
    "reward": Gate(metric="mean_reward", min=0.0),
}
