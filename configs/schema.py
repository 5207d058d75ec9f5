"""The run configuration: one pydantic model, unknown keys refused, one sentence per field. The Prefect UI shows it as a form."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from configs import rules
from configs.section import Section, no_key

Fraction = Annotated[float, Field(ge=0, le=1)]


class Scratch(Section):
    """The size of the tiny Qwen3 that `model.name: scratch` builds, with random weights and a tokenizer trained on the data."""

    hidden_size: int = Field(128, ge=8, description="Width of the residual stream.")
    intermediate_size: int = Field(384, ge=8, description="Width of the MLP.")
    num_layers: int = Field(4, ge=1, description="Number of transformer blocks.")
    num_heads: int = Field(4, ge=1, description="Attention heads.")
    num_kv_heads: int = Field(2, ge=1, description="Key and value heads; divides `num_heads`.")
    head_dim: int = Field(32, ge=4, description="Width of one head.")
    vocab_size: int = Field(512, ge=300, description="Upper limit of the tokenizer's vocabulary: 256 bytes, the special tokens and merges.")

    @model_validator(mode="after")
    def _heads(self):
        rules.divisible("model.scratch.num_heads", self.num_heads, "model.scratch.num_kv_heads", self.num_kv_heads)
        return self


class ModelSection(Section):
    """The base model."""

    name: str = Field("scratch", min_length=1, description="Hub id, local folder, or `scratch` for a tiny model built from nothing.")
    revision: str | None = Field(None, description="Commit of a Hub model; pin it so that a run means the same tomorrow.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type of the weights; auto is float32 on a CPU and for full fine-tuning, bfloat16 for LoRA on a GPU that has it."
    )
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = Field(
        "auto", description="Attention implementation; auto leaves the choice to transformers."
    )
    chat_template: str | None = Field(None, description="Jinja chat template, for a model whose tokenizer has none.")
    chat_template_kwargs: dict[str, Any] = Field({}, description="Arguments for the chat template, such as `enable_thinking: false`.")
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")
    allow_pickle: bool = Field(False, description="Accept weights that are not safetensors; loading them can run code.")
    scratch: Scratch = Field(Scratch(), description="Size of a `scratch` model.")


class Arithmetic(Section):
    """Two-digit sums and differences without carry or borrow, with imperfect demonstrations."""

    demonstrations: int = Field(16_000, ge=1, description="Number of SFT demonstrations, drawn over the training prompts.")
    right: Fraction = Field(0.40, description="Share of demonstrations that work the sum and end in the right answer.")
    wrong: Fraction = Field(0.15, description="Share of demonstrations that give a wrong bare guess; the rest never answer.")

    @model_validator(mode="after")
    def _shares(self):
        if self.right + self.wrong > 1:
            raise ValueError(f"data.arithmetic.right + wrong is {self.right + self.wrong:g} and must be at most 1: lower one of them")
        return self


class Hub(Section):
    """A data set of the Hugging Face Hub."""

    name: str = Field("openai/gsm8k", description="Id of the data set.")
    revision: str | None = Field(None, description="Commit of the data set; pin it.")
    config: str | None = Field(None, description="Configuration (subset) of the data set, such as `main`.")
    train_split: str = Field("train", description="Split to train on.")
    test_split: str = Field("test", description="Split that judges.")


class DataSection(Section):
    """Where prompts, demonstrations and gold answers come from."""

    source: Literal["arithmetic", "jsonl", "hub"] = Field("arithmetic", description="Kind of source; `data.path` implies `jsonl`.")
    path: str | None = Field(
        None, description="JSON Lines file, or folder with train.jsonl and test.jsonl (validation.jsonl if there is one), on disk or s3://."
    )
    arithmetic: Arithmetic = Field(Arithmetic(), description="Settings of the `arithmetic` source.")
    hub: Hub = Field(Hub(), description="Settings of the `hub` source.")
    question_column: str = Field("question", description="Column that holds the question.")
    answer_column: str = Field("answer", description="Column that holds the worked answer, ending in `#### N`.")
    validation_size: int = Field(256, ge=0, description="Prompts kept out of training for validation, where the source has no such split.")
    test_size: int = Field(256, ge=1, description="Prompts kept for judging alone, where the source has no test split.")
    system_prompt: str | None = Field(None, description="System message before every question.")
    instruction: str = Field("", description="Text put after every question, such as how to write the answer.")

    @model_validator(mode="after")
    def _path_implies_jsonl(self):
        if self.path is not None and self.source != "jsonl":
            self.source = "jsonl"
        if self.source == "jsonl" and not self.path:
            raise ValueError("data.path is missing and data.source is jsonl: name a JSON Lines file or folder")
        return self


class Training(Section):
    """What SFT and GRPO have in common."""

    learning_rate: float = Field(2e-4, gt=0, description="Peak learning rate.")
    num_epochs: float = Field(1, gt=0, description="Passes over the training rows; `max_steps` wins where it is set.")
    max_steps: int | None = Field(None, ge=1, description="Optimizer steps; none means as many as `num_epochs` needs.")
    batch_size: int = Field(8, ge=1, description="Rows (SFT) or completions (GRPO) per device and forward pass.")
    gradient_accumulation_steps: int = Field(1, ge=1, description="Forward passes per optimizer step.")
    warmup_ratio: Fraction = Field(0.1, description="Share of the steps over which the learning rate rises from 0.")
    max_samples: int | None = Field(None, ge=1, description="Use only this many rows, the first after a seeded shuffle; none means all.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this norm.")
    gradient_checkpointing: bool | Literal["auto"] = Field("auto", description="Recompute activations to save memory; auto does so on a GPU.")
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = Field("auto", description="Autocast type; auto is bf16 on a GPU that has it, else no.")
    use_lora: bool = Field(True, description="Train a LoRA adapter; false fine-tunes every weight.")
    lora_rank: int = Field(16, ge=1, description="Rank of the adapter.")
    lora_alpha: int = Field(32, ge=1, description="Scale of the adapter is alpha / rank.")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before the adapter.")
    lora_target_modules: str | list[str] = Field("all-linear", description="Layers that get an adapter: `all-linear` or names.")

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
        rules.trl_names("sft", self.trl)
        return self


class RewardComponent(Section):
    """One term of a combined reward."""

    type: str = Field(description="accuracy, length_penalty, step, format, or package.module:function.")
    weight: float = Field(1.0, description="Factor of this term in the total.")
    target_length: int = Field(200, ge=1, description="length_penalty: length that costs nothing; twice that length costs 1, and more costs no more.")
    length_unit: Literal["tokens", "characters"] = Field("tokens", description="length_penalty: what lengths are counted in.")
    step_bonus: float = Field(0.1, ge=0, description="step: reward of one reasoning step.")
    max_steps: int = Field(5, ge=1, description="step: steps that are paid at most.")
    only_right: bool = Field(True, description="step: pay steps only where the answer is right.")

    @model_validator(mode="after")
    def _known(self):
        rules.reward_type("grpo.reward_config.components.type", self.type, rules.COMPONENTS)
        rules.reward_settings("grpo.reward_config.components", self.type, self, also=("type", "weight"))
        return self


class RewardConfig(Section):
    """Settings of the reward."""

    components: list[RewardComponent] = Field([], description="Terms of `reward_type: combined`.")
    last_number: bool = Field(False, description="Take the last number for the answer of a completion that states none in any other form.")
    weight: float = Field(0.5, description="Weight of the term of `length_penalty`, `step` or `format` beside accuracy.")
    target_length: int = Field(200, ge=1, description="length_penalty: length that costs nothing; twice that length costs 1, and more costs no more.")
    length_unit: Literal["tokens", "characters"] = Field("tokens", description="length_penalty: what lengths are counted in.")
    step_bonus: float = Field(0.1, ge=0, description="step: reward of one reasoning step.")
    max_steps: int = Field(5, ge=1, description="step: steps that are paid at most.")
    only_right: bool = Field(True, description="step: pay steps only where the answer is right.")


class GRPOSection(Training):
    """Group relative policy optimization."""

    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate.")
    num_generations: int = Field(8, ge=2, description="Completions sampled per prompt: the group.")
    max_new_tokens: int = Field(512, ge=1, description="Tokens of a completion at most.")
    temperature: float = Field(0.8, gt=0, description="Sampling temperature of the rollouts.")
    kl_coef: float = Field(0.05, ge=0, description="Weight of the KL penalty against the SFT model; 0 trains without a reference.")
    clip_range: float = Field(0.2, gt=0, description="The policy ratio is clipped to 1 - clip_range .. 1 + clip_range.")
    advantage: Literal["mean", "group_std", "batch_std"] = Field(
        "mean", description="mean: reward less the group's mean; group_std and batch_std also divide by that deviation."
    )
    batch_size: int = Field(8, ge=1, description="Completions per device and forward pass; with accumulation and processes a multiple of num_generations.")
    reward_type: str = Field("accuracy", description="accuracy, length_penalty, step, format, combined, or package.module:function.")
    reward_config: RewardConfig = Field(RewardConfig(), description="Settings of the reward.")

    @model_validator(mode="after")
    def _rules(self):
        rules.trl_names("grpo", self.trl)
        rules.reward_type("grpo.reward_type", self.reward_type, (*rules.COMPONENTS, "combined"))
        if (self.reward_type == "combined") != bool(self.reward_config.components):
            raise ValueError(
                f"grpo.reward_type is {self.reward_type} with {len(self.reward_config.components)} grpo.reward_config.components: "
                "components belong to reward_type combined, which needs at least one"
            )
        also = ("components", "last_number", *(("weight",) if self.reward_type in ("length_penalty", "step", "format") else ()))
        rules.reward_settings("grpo.reward_config", self.reward_type, self.reward_config, also)
        rules.rewards_of_the_right(self.reward_type, self.reward_config)
        return self


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


class RegistrySection(Section):
    """The registered model."""

    name: str = Field("ratchet", min_length=1, pattern=r"^[^/:\s\x00-\x1f][^/:\x00-\x1f]*$", description="Name of the registered model in MLflow.")


class StorageSection(Section):
    """Where artifacts lie."""

    root: str | None = Field(None, pattern=r"^(s3|file)://.+", description="s3://bucket/prefix or file:///folder; none means the environment's RATCHET_STORE.")
    timeout_seconds: float = no_key(60.0, "Seconds that one request to S3 may stay without an answer before it is sent again.", ge=0.1)


class TrackingSection(Section):
    """Where runs are shown."""

    uri: str | None = Field(None, pattern=r"^https?://[^/]+", description="MLflow server; none means the environment's MLFLOW_TRACKING_URI.")
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
        DEFAULT_GATES, description="Conditions of promotion by name, put over the default ones; none turns one off, all others must pass."
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
        rules.batch_arithmetic(self.grpo, self.compute.num_processes)
        rules.save_alignment(self.grpo)
        if not any(self.gates.values()):
            raise ValueError("gates are all turned off and at least one must stand between a model and Staging: leave one on")
        return self
