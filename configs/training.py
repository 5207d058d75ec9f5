"""The sections of SFT and GRPO, and of the reward."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from configs.rules import rewards as rules_rewards
from configs.rules import training as rules_training
from configs.section import Fraction, Section, no_key


class Training(Section):
    """What SFT and GRPO have in common."""

    learning_rate: float = Field(2e-4, gt=0, description="Peak learning rate.")
    num_epochs: float = Field(1, gt=0, description="Passes over the training rows; `max_steps` wins where it is set.")
    max_steps: int | None = Field(None, ge=1, description="Optimizer steps; none means as many as `num_epochs` needs.")
    batch_size: int = Field(8, ge=1, description="Rows (SFT) or completions (GRPO) per device and forward pass.")
    gradient_accumulation_steps: int = Field(1, ge=1, description="Forward passes per optimizer step.")
    warmup_ratio: Fraction = Field(0.1, description="Share of the steps over which the learning rate rises from 0.")
    max_samples: int | None = Field(
        None, ge=1, description="Use only this many rows, the first after a seeded shuffle; none means all."
    )
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this norm.")
    gradient_checkpointing: bool | Literal["auto"] = Field(
        "auto", description="Recompute activations to save memory; auto does so on a GPU."
    )
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = Field(
        "auto", description="Autocast type; auto is bf16 on a GPU that has it, else no."
    )
    use_lora: bool = Field(True, description="Train a LoRA adapter; false fine-tunes every weight.")
    lora_rank: int = Field(16, ge=1, description="Rank of the adapter.")
    lora_alpha: int = Field(32, ge=1, description="Scale of the adapter is alpha / rank.")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before the adapter.")
    lora_target_modules: str | list[str] = Field(
        "all-linear", description="Layers that get an adapter: `all-linear` or names."
    )

    @field_validator("mixed_precision", mode="before")
    @classmethod
    def _no_is_a_word(cls, given: Any) -> Any:
        """YAML reads `no` as false."""
        return "no" if given is False else given

    save_steps: int = no_key(500, "Optimizer steps between checkpoints in the store.", ge=1)
    save_total_limit: int = no_key(2, "Checkpoints kept in the store per stage.", ge=1)
    logging_steps: int = no_key(10, "Optimizer steps between log lines and points of a curve.", ge=1)
    trl: dict[str, Any] = Field({}, description="Any further field of TRL's configuration, under TRL's name.")


class SFTSection(Training):
    """Supervised fine-tuning."""

    learning_rate: float = Field(2e-4, gt=0, description="Peak learning rate.")
    max_length: int = Field(1024, ge=8, description="Demonstrations longer than this many tokens are cut.")

    @model_validator(mode="after")
    def _rules(self):
        rules_training.trl_names("sft", self.trl)
        return self


# Settings that a single reward and a term of a combined one have in common.
TargetLength = Annotated[
    int,
    Field(
        ge=1,
        description="length_penalty: length that costs nothing; twice that length costs 1, and more costs no more.",
    ),
]
LengthUnit = Annotated[
    Literal["tokens", "characters"], Field(description="length_penalty: what lengths are counted in.")
]
StepBonus = Annotated[float, Field(ge=0, description="step: reward of one reasoning step.")]
MaxSteps = Annotated[int, Field(ge=1, description="step: steps that are paid at most.")]
OnlyRight = Annotated[bool, Field(description="step: pay steps only where the answer is right.")]


class RewardComponent(Section):
    """One term of a combined reward."""

    type: str = Field(description="accuracy, length_penalty, step, format, or package.module:function.")
    weight: float = Field(1.0, description="Factor of this term in the total.")
    target_length: TargetLength = 200
    length_unit: LengthUnit = "tokens"
    step_bonus: StepBonus = 0.1
    max_steps: MaxSteps = 5
    only_right: OnlyRight = True

    @model_validator(mode="after")
    def _known(self):
        rules_rewards.reward_type("grpo.reward_config.components.type", self.type, rules_rewards.COMPONENTS)
        rules_rewards.reward_settings("grpo.reward_config.components", self.type, self, also=("type", "weight"))
        return self


class RewardConfig(Section):
    """Settings of the reward."""

    components: list[RewardComponent] = Field([], description="Terms of `reward_type: combined`.")
    answer_format: Literal["final_answer", "boxed", "answer_tags", "gsm8k"] = Field(
        "final_answer",
        description="Form in which demonstrations and `data.instruction: auto` teach answers; all forms are read.",
    )
    last_number: bool = Field(
        False, description="Take the last number for the answer of a completion that states none in any other form."
    )
    weight: float = Field(
        0.5, description="Weight of the term of `length_penalty`, `step` or `format` beside accuracy."
    )
    target_length: TargetLength = 200
    length_unit: LengthUnit = "tokens"
    step_bonus: StepBonus = 0.1
    max_steps: MaxSteps = 5
    only_right: OnlyRight = True


class GRPOSection(Training):
    """Group relative policy optimization."""

    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate.")
    num_generations: int = Field(8, ge=2, description="Completions sampled per prompt: the group.")
    max_new_tokens: int = Field(512, ge=1, description="Tokens of a completion at most.")
    temperature: float = Field(0.8, gt=0, description="Sampling temperature of the rollouts.")
    kl_coef: float = Field(
        0.05, ge=0, description="Weight of the KL penalty against the SFT model; 0 trains without a reference."
    )
    clip_range: float = Field(0.2, gt=0, description="The policy ratio is clipped to 1 - clip_range .. 1 + clip_range.")
    advantage: Literal["mean", "group_std", "batch_std"] = Field(
        "mean", description="mean: reward less the group's mean; group_std and batch_std also divide by that deviation."
    )
    batch_size: int = Field(
        8,
        ge=1,
        description="Completions per device and forward pass; with accumulation and processes a multiple of num_generations.",
    )
    reward_type: str = Field(
        "accuracy", description="accuracy, length_penalty, step, format, combined, or package.module:function."
    )
    reward_config: RewardConfig = Field(RewardConfig(), description="Settings of the reward.")

    @model_validator(mode="after")
    def _rules(self):
        rules_training.trl_names("grpo", self.trl)
        rules_rewards.reward_type("grpo.reward_type", self.reward_type, (*rules_rewards.COMPONENTS, "combined"))
        if (self.reward_type == "combined") != bool(self.reward_config.components):
            raise ValueError(
                f"grpo.reward_type is {self.reward_type} with {len(self.reward_config.components)} grpo.reward_config.components: "
                "components belong to reward_type combined, which needs at least one"
            )
        also = (
            "components",
            "answer_format",
            "last_number",
            *(("weight",) if self.reward_type in ("length_penalty", "step", "format") else ()),
        )
        rules_rewards.reward_settings("grpo.reward_config", self.reward_type, self.reward_config, also)
        rules_rewards.rewards_of_the_right(self.reward_type, self.reward_config)
        return self
