"""Every field of SFT and GRPO: the value reaches TRL, and it changes what is trained or generated."""

import json
from pathlib import Path

import pytest
import tiny

from configs.errors import ConfigError, DataError
from configs.schema import GRPOSection, ModelSection, SFTSection
from tasks.core.model import loading
from tasks.core.storage import jsonl
from tasks.core.training import grpo, loop, sft

GRPO = {
    "num_generations": 2,
    "batch_size": 4,
    "max_steps": 3,
    "max_new_tokens": 5,
    "temperature": 1.0,
    "learning_rate": 0.01,
    "kl_coef": 0.1,
    "warmup_ratio": 0.0,
    "lora_rank": 2,
    "lora_alpha": 4,
    "logging_steps": 1,
    "reward_type": "tiny:checksum",
}
SFT = {
    "batch_size": 4,
    "max_steps": 3,
    "learning_rate": 0.01,
    "warmup_ratio": 0.0,
    "lora_rank": 2,
    "lora_alpha": 4,
    "logging_steps": 1,
    "max_length": 64,
}


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    """(data artifact, base artifact); the base serves as SFT artifact too."""
    import torch

    torch.set_num_threads(2)
    return tiny.build(tmp_path_factory.mktemp("training"))


@pytest.fixture(scope="session")
def trained(inputs, tmp_path_factory):
    """A function that trains with some fields changed and gives the artifact's folder; the same fields are trained once."""
    folders: dict[str, Path] = {}

    def train(stage: str, **changed) -> Path:
        name = f"{stage} {json.dumps(changed, sort_keys=True)}"
        if name not in folders:
            folders[name] = run(stage, inputs, tmp_path_factory.mktemp("run") / "out", **changed)
        return folders[name]

    return train


def section(stage, **changed):
    return SFTSection(**SFT | changed) if stage == "sft" else GRPOSection(**GRPO | changed)


def run(stage, inputs, out, context=None, seed=1, **changed):
    data, base = inputs
    common = dict(model=tiny.MODEL, compute=tiny.CPU, seed=seed, data=data, out=out, context=context or tiny.context())
    if stage == "sft":
        sft.train(section(stage, **changed), base=base, grpo=section("grpo"), **common)
    else:
        grpo.train(section(stage, **changed), sft=base, **common)
    return out


def build(stage, inputs, work, checkpoints=None, **changed):
    data, base = inputs
    make = sft.build if stage == "sft" else grpo.build
    source = str(base / "model") if stage == "sft" else base / "model"
    return make(
        section(stage, **changed), tiny.MODEL, tiny.CPU, 1, source, data, work, tiny.context(checkpoints=checkpoints)
    )


def weights(out):
    return (out / "model" / "model.safetensors").read_bytes()


def history(out):
    return jsonl.read_rows(out / "history.jsonl")


def contents(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


# ---------------------------------------------------------------- the value reaches TRL

BOTH = [
    ("learning_rate", 0.003, "learning_rate", 0.003),
    ("num_epochs", 2.5, "num_train_epochs", 2.5),
    ("max_steps", 7, "max_steps", 7),
    ("max_steps", None, "max_steps", -1),
    ("batch_size", 6, "per_device_train_batch_size", 6),
    ("gradient_accumulation_steps", 3, "gradient_accumulation_steps", 3),
    ("max_grad_norm", 0.25, "max_grad_norm", 0.25),
    ("gradient_checkpointing", True, "gradient_checkpointing", True),
    ("gradient_checkpointing", "auto", "gradient_checkpointing", False),
    ("gradient_checkpointing", True, "gradient_checkpointing_kwargs", {"use_reentrant": False}),
    ("mixed_precision", "bf16", "bf16", True),
    ("mixed_precision", "auto", "bf16", False),
    ("mixed_precision", "no", "fp16", False),
    ("save_steps", 4, "save_steps", 4),
    ("save_total_limit", 5, "save_total_limit", 5),
    ("logging_steps", 2, "logging_steps", 2),
    ("trl", {"weight_decay": 0.5}, "weight_decay", 0.5),
]
GRPO_ONLY = [
    ("num_generations", 4, "num_generations", 4),
    ("max_new_tokens", 9, "max_completion_length", 9),
    ("temperature", 0.7, "temperature", 0.7),
    ("kl_coef", 0.05, "beta", 0.05),
    ("clip_range", 0.15, "epsilon", 0.15),
    ("advantage", "mean", "scale_rewards", "none"),
    ("advantage", "group_std", "scale_rewards", "group"),
    ("advantage", "batch_std", "scale_rewards", "batch"),
    ("trl", {"loss_type": "dr_grpo"}, "loss_type", "dr_grpo"),
]
REACHES = [("sft", *row) for row in [*BOTH, ("max_length", 48, "max_length", 48)]] + [
    ("grpo", *row) for row in BOTH + GRPO_ONLY
]


@pytest.mark.parametrize(("stage", "field", "value", "trl", "expected"), REACHES)
def test_value_reaches_trl(inputs, tmp_path, stage, field, value, trl, expected):
    assert getattr(build(stage, inputs, tmp_path, **{field: value}).args, trl) == expected


@pytest.mark.parametrize("stage", ["sft", "grpo"])
@pytest.mark.parametrize(
    ("field", "value", "peft", "expected"),
    [("lora_rank", 4, "r", 4), ("lora_alpha", 6, "lora_alpha", 6), ("lora_dropout", 0.25, "lora_dropout", 0.25)],
)
def test_value_reaches_peft(inputs, tmp_path, stage, field, value, peft, expected):
    assert getattr(build(stage, inputs, tmp_path, **{field: value}).model.peft_config["default"], peft) == expected


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("all-linear", ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]),
        ("q_proj", ["q_proj"]),
        (["q_proj", "mlp.up_proj"], ["q_proj", "up_proj"]),
    ],
)
def test_target_modules_get_the_adapter(inputs, tmp_path, targets, expected):
    model = build("grpo", inputs, tmp_path, lora_target_modules=targets).model
    assert (
        sorted(
            {
                name.split(".lora_A")[0].rpartition(".")[2]
                for name, _ in model.named_modules()
                if name.endswith("lora_A")
            }
        )
        == expected
    )


@pytest.mark.parametrize("stage", ["sft", "grpo"])
def test_without_lora_every_weight_is_trained(inputs, tmp_path, stage):
    model = build(stage, inputs, tmp_path, use_lora=False).model
    assert not hasattr(model, "peft_config")
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("stage", ["sft", "grpo"])
def test_seed_reaches_trl(inputs, tmp_path, stage):
    args = build(stage, inputs, tmp_path).args
    assert (args.seed, args.data_seed) == (1, 1)


@pytest.mark.parametrize("stage", ["sft", "grpo"])
def test_max_samples_keeps_that_many_rows(inputs, tmp_path, stage):
    assert len(build(stage, inputs, tmp_path, max_samples=5).train_dataset) == 5


def test_max_samples_are_the_first_of_a_seeded_shuffle():
    assert jsonl.sample(list("abcdefgh"), 3, seed=1) == ["d", "g", "b"]
    assert jsonl.sample(list("abcdefgh"), 5, seed=1)[:3] == ["d", "g", "b"]
    assert jsonl.sample(list("abcdefgh"), None, seed=1) == list("abcdefgh")


def test_reward_reaches_trl_with_its_weights(inputs, tmp_path):
    components = [{"type": "accuracy", "weight": 2.0}, {"type": "tiny:brevity", "weight": 0.5}]
    made = build("grpo", inputs, tmp_path, reward_type="combined", reward_config={"components": components})
    assert made.reward_func_names == ["accuracy", "brevity"]
    assert made.args.reward_weights == [2.0, 0.5]


@pytest.mark.parametrize("stage", ["sft", "grpo"])
@pytest.mark.parametrize(("ratio", "steps", "expected"), [(0.0, 30, 0), (0.1, 30, 3), (0.5, 5, 3), (1.0, 4, 4)])
def test_warmup_is_a_share_of_the_real_number_of_steps(inputs, tmp_path, stage, ratio, steps, expected):
    made = build(stage, inputs, tmp_path, warmup_ratio=ratio)
    made.create_optimizer()
    made.create_scheduler(steps)
    assert made.args.warmup_steps == expected


# ---------------------------------------------------------------- the value changes what is trained or generated


def terms(weight):
    """Two terms of a combined reward, the second of this weight."""
    return {"components": [{"type": "tiny:checksum"}, {"type": "tiny:brevity", "weight": weight}]}


TWICE = {"trl": {"num_iterations": 2}, "kl_coef": 0.0, "max_steps": 4, "learning_rate": 0.05}
EPOCHS = {"max_steps": None, "max_samples": 8}
MATTERS = [
    ("learning_rate", {}, 0.02),
    ("warmup_ratio", {}, 0.7),
    ("lora_rank", {}, 4),
    ("lora_alpha", {}, 16),
    ("lora_dropout", {}, 0.5),
    ("lora_target_modules", {}, ["q_proj"]),
    ("use_lora", {}, False),
    ("max_grad_norm", {}, 1e-6),
    ("mixed_precision", {}, "bf16"),
    ("num_epochs", EPOCHS, 2),
    ("max_steps", {}, 2),
    ("batch_size", {}, 8),
    ("gradient_accumulation_steps", {}, 2),
    ("max_samples", {}, 4),
    ("trl", {}, {"weight_decay": 0.9}),
]
GRPO_MATTERS = [
    ("num_generations", {}, 4),
    ("max_new_tokens", {}, 3),
    ("temperature", {}, 0.3),
    ("kl_coef", {}, 5.0),
    ("clip_range", TWICE, 1e-4),
    ("advantage", {}, "group_std"),
    ("advantage", {}, "batch_std"),
    ("reward_type", {}, "tiny:brevity"),
    ("reward_config", {"reward_type": "combined", "reward_config": terms(1.0)}, terms(20.0)),
]
CHANGES = [("sft", *row) for row in [*MATTERS, ("max_length", {}, 12)]] + [
    ("grpo", *row) for row in MATTERS + GRPO_MATTERS
]


@pytest.mark.parametrize(("stage", "field", "given", "value"), CHANGES)
def test_value_changes_the_weights(trained, stage, field, given, value):
    assert weights(trained(stage, **given)) != weights(trained(stage, **given | {field: value}))


@pytest.mark.parametrize("stage", ["sft", "grpo"])
def test_seed_changes_the_weights(trained, inputs, tmp_path, stage):
    assert weights(run(stage, inputs, tmp_path / "out", seed=2)) != weights(trained(stage))


def test_completions_are_as_long_as_max_new_tokens(trained):
    assert max(row["completions/max_length"] for row in history(trained("grpo", max_new_tokens=3))) == 3


def test_num_epochs_sets_the_number_of_steps(trained):
    # 8 prompts x 2 completions, 4 at a time.
    assert [history(trained("grpo", **EPOCHS | {"num_epochs": n}))[-1]["step"] for n in (1, 2)] == [4, 8]
    # 8 rows, 4 at a time.
    assert [history(trained("sft", **EPOCHS | {"num_epochs": n}))[-1]["step"] for n in (1, 2)] == [2, 4]


@pytest.mark.parametrize("stage", ["sft", "grpo"])
def test_logging_steps_sets_the_rows_of_the_history(trained, stage):
    assert [row["step"] for row in history(trained(stage))] == [1, 2, 3]
    assert [row["step"] for row in history(trained(stage, logging_steps=2, max_steps=4))] == [2, 4]


@pytest.mark.parametrize("stage", ["sft", "grpo"])
@pytest.mark.parametrize(("save_steps", "expected"), [(1, [1, 2, 3]), (2, [2]), (3, [3]), (4, [])])
def test_save_steps_sets_the_checkpoints_but_none_at_the_end(inputs, tmp_path, stage, save_steps, expected):
    kept = tiny.checkpoints(tmp_path / "kept")
    run(stage, inputs, tmp_path / "out", context=tiny.context(checkpoints=kept), save_steps=save_steps, max_steps=4)
    assert kept.steps() == expected


@pytest.mark.parametrize("stage", ["sft", "grpo"])
def test_gradient_checkpointing_recomputes_and_leaves_the_weights_alone(trained, inputs, tmp_path, stage):
    import torch
    from safetensors.torch import load_file

    made = build(stage, inputs, tmp_path, gradient_checkpointing=True)
    made.train()
    assert made.model.is_gradient_checkpointing
    files = [
        trained(stage, gradient_checkpointing=value) / "adapter" / "adapter_model.safetensors"
        for value in (True, False)
    ]
    a, b = (load_file(file) for file in files)
    assert all(torch.allclose(a[name], b[name], atol=1e-5) for name in a)
    assert (
        json.loads((trained(stage, gradient_checkpointing=True) / "model" / "config.json").read_text())["use_cache"]
        is True
    )


# ---------------------------------------------------------------- GRPO, said exactly


def test_the_texts_worked_example(inputs, tmp_path):
    """Rewards 1, 1, 0, 0.8 less their mean 0.7."""
    made = build("grpo", inputs, tmp_path, reward_type="tiny:worked_example", num_generations=4, advantage="mean")
    seen = []
    inner = made._generate_and_score_completions

    def spy(batch):
        output = inner(batch)
        seen.append(output["advantages"].tolist())
        return output

    made._generate_and_score_completions = spy
    made.train()
    assert len(seen) == 3
    for advantages in seen:
        assert advantages == pytest.approx([0.3, 0.3, -0.7, 0.1], abs=1e-6)


@pytest.mark.parametrize("use_lora", [True, False])
def test_the_first_kl_is_zero_for_policy_and_reference_are_the_sft_model(trained, use_lora):
    rows = history(trained("grpo", use_lora=use_lora))
    assert rows[0]["kl_k3"] == pytest.approx(0, abs=1e-6)
    assert rows[-1]["kl_k3"] > 1e-5


def test_the_reference_of_full_fine_tuning_is_the_sft_model_in_the_type_of_the_policy(inputs, tmp_path):
    import torch

    model = tiny.MODEL.model_copy(update={"dtype": "bfloat16"})
    data, base = inputs
    made = grpo.build(
        section("grpo", use_lora=False), model, tiny.CPU, 1, base / "model", data, tmp_path, tiny.context()
    )
    expected = loading.load_policy(base / "model", model, tiny.CPU, for_training=True).state_dict()
    found = made.ref_model.state_dict()
    assert made.ref_model is not made.model and found.keys() == expected.keys()
    assert all(found[name].dtype == torch.bfloat16 and torch.equal(found[name], expected[name]) for name in expected)


def test_without_kl_coef_there_is_no_reference(inputs, tmp_path, trained):
    assert build("grpo", inputs, tmp_path, kl_coef=0.0, use_lora=False).ref_model is None
    assert "kl_k3" not in history(trained("grpo", kl_coef=0.0))[-1]


def test_history_has_our_names(trained):
    row = history(trained("grpo"))[-1]
    names = {
        "step",
        "epoch",
        "loss",
        "grad_norm",
        "learning_rate",
        "reward",
        "reward_std",
        "kl_k3",
        "entropy",
        "completions/mean_length",
        "rewards/checksum",
    }
    assert names <= row.keys()
    assert not row.keys() & {"kl", "step_time", "num_tokens", "rewards/checksum/mean", "rewards/checksum/std"}


def test_events_tell_the_progress(inputs, tmp_path):
    events = []
    run("grpo", inputs, tmp_path / "out", context=tiny.context(emit=lambda **event: events.append(event)))
    assert [(e["event"], e["step"], e["max_steps"]) for e in events] == [("log", 1, 3), ("log", 2, 3), ("log", 3, 3)]
    assert {"epoch", "num_epochs", "reward", "kl_k3", "loss"} <= events[0].keys()


def test_metrics_are_those_of_the_last_tenth():
    rows = [{"step": step, "reward": float(step)} for step in range(1, 21)]
    assert loop.last_tenth(rows, "reward") == 19.5
    assert loop.last_tenth(rows[:3], "reward") == 3.0
    assert loop.last_tenth(rows, "kl_k3") is None


# ---------------------------------------------------------------- SFT


def test_the_loss_is_on_the_completion_and_its_end_alone(inputs):
    data, base = inputs
    tokenizer = loading.load_tokenizer(base / "model", tiny.MODEL)
    row = sft.dataset(jsonl.read_rows(data / "sft.jsonl")[:1], tokenizer, 64, tiny.MODEL)[0]
    learnt = [token for token in row["labels"] if token != -100]
    assert tokenizer.decode(learnt) == "1 + 1 = 2. Final Answer: 2<|eos|>"
    assert tokenizer.decode(row["input_ids"]) == "<|user|>1 + 1 = ?<|assistant|>1 + 1 = 2. Final Answer: 2<|eos|>"


def test_sft_learns_its_demonstrations(trained):
    rows = history(trained("sft", max_steps=60, use_lora=False))
    assert rows[-1]["loss"] < rows[0]["loss"] / 5


# ---------------------------------------------------------------- what is saved


@pytest.mark.parametrize("stage", ["sft", "grpo"])
def test_equal_runs_give_equal_bytes(trained, inputs, tmp_path, stage):
    assert contents(run(stage, inputs, tmp_path / "elsewhere" / "out")) == contents(trained(stage))


@pytest.mark.parametrize("stage", ["sft", "grpo"])
def test_the_artifact_holds_no_path_of_this_machine(trained, inputs, stage):
    for name, content in contents(trained(stage)).items():
        assert str(inputs[1]).encode() not in content, name


def test_the_merged_model_loads_plainly_and_is_base_and_adapter(trained, inputs):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = trained("grpo")
    tokenizer, merged = (
        AutoTokenizer.from_pretrained(out / "model"),
        AutoModelForCausalLM.from_pretrained(out / "model"),
    )
    base = AutoModelForCausalLM.from_pretrained(inputs[1] / "model")
    ids = tokenizer("<|user|>2 + 3 = ?<|assistant|>", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        plain = base(ids).logits
        adapted = PeftModel.from_pretrained(base, out / "adapter")(ids).logits
        found = merged(ids).logits
    assert torch.allclose(found, adapted, atol=1e-5)
    assert not torch.allclose(found, plain, atol=1e-3)


@pytest.mark.parametrize("stage", ["sft", "grpo"])
def test_files_of_the_artifact(trained, stage):
    plain = {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    out = trained(stage)
    found = {file.name for file in (out / "model").iterdir()}
    assert found == plain if stage == "sft" else found > plain | {"MLmodel"}
    assert {file.name for file in (out / "adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert {file.name for file in out.iterdir()} == {"model", "adapter", "history.jsonl"}
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_full_fine_tuning_has_no_adapter(trained):
    assert {file.name for file in trained("grpo", use_lora=False).iterdir()} == {"model", "history.jsonl"}


# ---------------------------------------------------------------- stopped and resumed


class Killed(Exception):
    """In the place of SIGKILL."""


@pytest.mark.parametrize("stage", ["sft", "grpo"])
@pytest.mark.parametrize(("use_lora", "last"), [(True, 5), (False, 5), (True, 6)])
def test_a_run_killed_and_resumed_ends_with_the_same_bytes(inputs, tmp_path, stage, use_lora, last):
    changed = {
        "lora_dropout": 0.05,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "save_steps": 2,
        "use_lora": use_lora,
    }
    whole = run(stage, inputs, tmp_path / "whole", **changed)
    kept = tiny.checkpoints(tmp_path / "kept")
    events, messages, again = [], [], []

    def emit(event, **values):
        if event == "message":
            messages.append(values["message"])
            return
        (again if values.get("again") else events).append(values["step"])
        if events == list(range(1, last + 1)) and not again:
            raise Killed

    context = tiny.context(emit=emit, checkpoints=kept)
    with pytest.raises(Killed):
        run(stage, inputs, tmp_path / "stopped", context=context, **changed)
    assert kept.steps() == [2, 4]
    resumed = run(stage, inputs, tmp_path / "resumed", context=context, **changed)
    assert (events, messages) == ([*range(1, last + 1), 5, 6], ["going on from the checkpoint of step 4"])
    assert again == [1, 2, 3, 4]
    assert contents(resumed) == contents(whole)


# ---------------------------------------------------------------- bad input


def test_an_unknown_layer_is_one_sentence_with_the_known_ones(inputs, tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"^lora_target_modules holds 'query', which is no linear layer of this model: "
        r"choose from down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj, or all-linear$",
    ):
        build("grpo", inputs, tmp_path, lora_target_modules=["q_proj", "query"])


def test_a_value_that_trl_refuses_is_one_sentence(inputs, tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"^grpo\.trl \(lr_scheduler_type\) is refused by TRL \(.*\): correct these values or take them out$",
    ):
        build("grpo", inputs, tmp_path, trl={"lr_scheduler_type": "downhill"})


@pytest.mark.parametrize(
    ("stage", "field", "value", "reason"),
    [
        ("sft", "eos_token", "foo", "'foo'.* is not found in the vocabulary"),
        ("grpo", "router_aux_loss_coef", 0.1, "is not a Mixture-of-Experts model"),
    ],
)
def test_a_value_that_only_the_trainer_refuses_is_one_sentence(inputs, tmp_path, stage, field, value, reason):
    with pytest.raises(
        ConfigError,
        match=rf"^{stage}\.trl \({field}\) is refused by TRL \(.*{reason}.*\): correct these values or take them out$",
    ):
        build(stage, inputs, tmp_path, trl={field: value})


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("adam_beta1", 2.0, "Invalid beta parameter at index 0: 2.0"),
        ("lr_scheduler_kwargs", {"x": 1}, "unexpected keyword"),
    ],
)
def test_a_value_that_only_the_optimizer_refuses_is_one_sentence(inputs, tmp_path, field, value, reason):
    with pytest.raises(ConfigError, match=rf"^sft\.trl \({field}\) is refused by TRL \(.*{reason}.*\): correct"):
        run("sft", inputs, tmp_path / "out", trl={field: value})


@pytest.mark.parametrize("stage", ["sft", "grpo"])
def test_a_text_where_trl_takes_a_number_is_one_sentence(inputs, tmp_path, stage):
    sentence = rf"^{stage}\.trl\.weight_decay is 'abc', and TRL takes a number there: write one, without quotes, or take it out$"
    with pytest.raises(ConfigError, match=sentence):
        build(stage, inputs, tmp_path, trl={"weight_decay": "abc"})


@pytest.mark.parametrize(("targets", "written"), [([], r"\[\]"), ("", "''")])
def test_no_layer_for_the_adapter_is_one_sentence(inputs, tmp_path, targets, written):
    sentence = rf"^lora_target_modules is {written}, so that no layer would be trained: name layers, write all-linear, or set use_lora to false$"
    with pytest.raises(ConfigError, match=sentence):
        build("sft", inputs, tmp_path, lora_target_modules=targets)


def test_too_few_prompts_for_one_generation_is_one_sentence(inputs, tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"^grpo has 1 training prompts, and one generation takes 2 .*: lower grpo\.batch_size or give more prompts$",
    ):
        build("grpo", inputs, tmp_path, max_samples=1)


def test_a_length_that_leaves_no_completion_is_one_sentence(inputs, tmp_path):
    with pytest.raises(
        ConfigError, match=r"^sft\.max_length is 8, and the shortest prompt has \d+ tokens, .*: set it above \d+$"
    ):
        build("sft", inputs, tmp_path, max_length=8)


def test_no_demonstrations_is_one_sentence():
    with pytest.raises(DataError, match=r"holds no demonstrations"):
        sft.dataset([], None, 64, tiny.MODEL)


def test_prompts_that_grpo_would_refuse_stop_sft_before_its_first_step(inputs, tmp_path):
    data, base = inputs
    takes = json.loads((base / "model" / "config.json").read_text())["max_position_embeddings"]
    following, common = (
        section("grpo", max_new_tokens=takes),
        dict(model=tiny.MODEL, compute=tiny.CPU, seed=1, data=data, out=tmp_path / "out"),
    )
    with pytest.raises(DataError, match=r"prompts have more than 0 tokens, .*: lower grpo\.max_new_tokens, which is"):
        sft.train(section("sft"), base=base, context=tiny.context(), grpo=following, **common)


def test_fp16_on_a_cpu_is_one_sentence(inputs, tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"^mixed_precision is fp16, which needs a GPU, and this run is on a CPU: set it to bf16, no or auto$",
    ):
        build("sft", inputs, tmp_path, mixed_precision="fp16")


def test_full_fine_tuning_of_float16_is_one_sentence(inputs, tmp_path):
    data, base = inputs
    model = ModelSection(**tiny.MODEL.model_dump() | {"dtype": "float16"})
    with pytest.raises(
        ConfigError, match=r"^model\.dtype is float16 with use_lora false, .*: set model\.dtype to float32 or bfloat16$"
    ):
        sft.build(
            section("sft", use_lora=False), model, tiny.CPU, 1, str(base / "model"), data, tmp_path, tiny.context()
        )
