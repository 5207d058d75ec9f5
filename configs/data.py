"""The section of the data set."""

from typing import Literal

from pydantic import Field, model_validator

from configs.section import Fraction, Section


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
