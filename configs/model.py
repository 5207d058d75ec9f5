"""The section of the base model."""

from typing import Any, Literal

from pydantic import Field, model_validator

from configs.section import Section


class Scratch(Section):
    """The size of the tiny Qwen3 that `model.name: scratch` builds, with random weights and a tokenizer trained on the data."""

    hidden_size: int = Field(128, ge=8, description="Width of the residual stream.")
    intermediate_size: int = Field(384, ge=8, description="Width of the MLP.")
    num_layers: int = Field(4, ge=1, description="Number of transformer blocks.")
    num_heads: int = Field(4, ge=1, description="Attention heads.")
    num_kv_heads: int = Field(2, ge=1, description="Key and value heads; divides `num_heads`.")
    head_dim: int = Field(32, ge=4, description="Width of one head.")
    vocab_size: int = Field(
        512, ge=300, description="Upper limit of the tokenizer's vocabulary: 256 bytes, the special tokens and merges."
    )

    @model_validator(mode="after")
    def _heads(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.scratch.num_heads is {self.num_heads} and must be a multiple of model.scratch.num_kv_heads, which is {self.num_kv_heads}: "
                "change one of them"
            )
        return self


class ModelSection(Section):
    """The base model."""

    name: str = Field(
        "scratch", min_length=1, description="Hub id, local folder, or `scratch` for a tiny model built from nothing."
    )
    revision: str | None = Field(
        None, description="Commit of a Hub model; pin it so that a run means the same tomorrow."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Type of the weights; auto is float32 on a CPU and for full fine-tuning, bfloat16 for LoRA on a GPU that has it.",
    )
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = Field(
        "auto", description="Attention implementation; auto leaves the choice to transformers."
    )
    chat_template: str | None = Field(None, description="Jinja chat template, for a model whose tokenizer has none.")
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="Arguments for the chat template, such as `enable_thinking: false`."
    )
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")
    allow_pickle: bool = Field(False, description="Accept weights that are not safetensors; loading them can run code.")
    scratch: Scratch = Field(Scratch(), description="Size of a `scratch` model.")
