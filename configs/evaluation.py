"""The section of the evaluation, and the gates."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from configs.rules import gates as rules_gates
from configs.section import Section

SetName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]*$")]


class EvaluationSet(Section):
    """One further set of prompts to measure on: a split of the data, a file, or a task of the lm-evaluation-harness."""

    split: Literal["test", "validation"] | None = Field(None, description="Held-out rows of the data.")
    path: str | None = Field(
        None,
        min_length=1,
        description="JSON Lines file of questions and gold answers, on disk or s3://, with the data's columns.",
    )
    task: str | None = Field(
        None,
        min_length=1,
        description="Task of the lm-evaluation-harness, or the YAML file of one; needs the extra `lm-eval`.",
    )
    max_samples: int | None = Field(None, ge=1, description="Use only this many prompts; none means all.")

    @model_validator(mode="after")
    def _one_source(self):
        given = [name for name in ("split", "path", "task") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"a set of evaluation.sets has {' and '.join(given) or 'neither split, path nor task'} and needs exactly one: give one of the three"
            )
        return self


class EvaluationSection(Section):
    """How base, SFT, GRPO and the champion are measured, on the same held-out prompts."""

    split: Literal["test", "validation"] = Field("test", description="Held-out rows to measure on.")
    max_samples: int | None = Field(None, ge=1, description="Use only this many prompts; none means all.")
    max_new_tokens: int | None = Field(
        None, ge=1, description="Tokens of a completion at most; none means grpo.max_new_tokens."
    )
    batch_size: int = Field(64, ge=1, description="Prompts per forward pass, sorted by length.")
    samples: int = Field(
        0, ge=0, le=1024, description="Completions sampled per prompt for pass@k and maj@k; 0 samples none."
    )
    sample_temperature: float = Field(0.8, gt=0, description="Sampling temperature of these completions.")
    k: list[Annotated[int, Field(ge=1)]] = Field(
        [1], min_length=1, description="The k of pass@k and maj@k, each at most `samples`."
    )
    kl_samples: int = Field(
        64, ge=1, description="Held-out prompts on which KL is measured, one sampled completion each."
    )
    kl_temperature: float = Field(
        1.0, gt=0, description="Sampling temperature of the completions that KL is measured on."
    )
    sets: dict[SetName, EvaluationSet] = Field(
        {}, description="Further sets to measure on, by name; their metrics are `name/metric`."
    )

    @model_validator(mode="after")
    def _k_can_be_drawn(self):
        if self.samples and max(self.k) > self.samples:
            raise ValueError(
                f"evaluation.k has {max(self.k)} and evaluation.samples is {self.samples}: raise samples, or lower k"
            )
        if not self.samples and self.changed("k", "sample_temperature"):
            raise ValueError(
                "evaluation.k and evaluation.sample_temperature are for samples, and evaluation.samples is 0: set it, or take them out"
            )
        if twice := next((k for k in self.k if self.k.count(k) > 1), None):
            # Every prompt would count twice, and its interval be too narrow.
            raise ValueError(f"evaluation.k has {twice} twice: take one of them out")
        if "rewards" in self.sets:
            raise ValueError(
                "evaluation.sets has a set named rewards, as the reward's components are: give it another name"
            )
        return self


class Gate(Section):
    """One condition of promotion: a limit, or a rival that must be beaten."""

    metric: str = Field(
        description="Metric of the evaluation, such as accuracy, mean_reward, kl, pass_at_8, or `name/metric` of a further set."
    )
    min: float | None = Field(None, description="Least value that passes.")
    max: float | None = Field(None, description="Greatest value that passes.")
    rival: Literal["sft", "champion"] | None = Field(
        None, description="Compare with this model on the same prompts, paired; no champion, no condition."
    )
    margin: float = Field(0.0, description="The difference to the rival must exceed this.")
    confidence: float = Field(0.95, gt=0.5, lt=1, description="Confidence of the interval of the difference.")

    @model_validator(mode="after")
    def _one_condition(self):
        rules_gates.gate(self.metric, self.min, self.max, self.rival, self.changed("margin", "confidence"))
        return self


DEFAULT_GATES = {
    "accuracy": Gate(metric="accuracy", rival="sft"),
    "kl": Gate(metric="kl", min=0.001, max=0.5),
    "reward": Gate(metric="mean_reward", min=0.0),
}
