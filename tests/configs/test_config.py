import pytest

from configs.errors import ConfigError
from configs.loading import load, parse_set, presets
from configs.rules import training as rules_training
from configs.schema import GRPOSection, RunConfig
from configs.section import Section


def refusal(values):
    with pytest.raises(ConfigError) as caught:
        load(values)
    return str(caught.value)


@pytest.mark.parametrize("name", presets())
def test_every_preset_loads(name):
    assert load(name).registry.name.startswith("ratchet-")


def test_defaults_of_grpo():
    grpo = RunConfig().grpo
    assert (grpo.num_generations, grpo.max_new_tokens, grpo.temperature, grpo.kl_coef, grpo.clip_range) == (
        8,
        512,
        0.8,
        0.05,
        0.2,
    )
    assert (grpo.learning_rate, grpo.warmup_ratio, grpo.advantage, grpo.lora_rank, grpo.lora_alpha) == (
        1e-5,
        0.1,
        "mean",
        16,
        32,
    )


def test_qwen3_preset_has_the_published_values():
    grpo = load("gsm8k-qwen3-0.6b").grpo
    assert (grpo.num_epochs, grpo.batch_size, grpo.learning_rate, grpo.num_generations, grpo.max_new_tokens) == (
        3,
        4,
        1e-5,
        4,
        512,
    )
    assert [(c.type, c.weight) for c in grpo.reward_config.components] == [
        ("accuracy", 1.0),
        ("length_penalty", 0.5),
        ("step", 0.3),
    ]


def sections(model=RunConfig):
    for field in model.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from sections(field.annotation)
    yield model


@pytest.mark.parametrize("section", {s.__name__: s for s in sections()}.values(), ids=lambda s: s.__name__)
def test_every_field_is_described_in_a_sentence(section):
    assert [n for n, f in section.model_fields.items() if not (f.description or "").endswith(".")] == []


def test_misspelt_key_suggests_the_closest_field():
    assert (
        refusal({"grpo": {"lerning_rate": 1e-5}})
        == "grpo.lerning_rate is not a field of the configuration: did you mean learning_rate?"
    )


def test_misspelt_key_in_a_gate_suggests_the_closest_field():
    assert (
        refusal({"gates": {"kl": {"metric": "kl", "maxx": 1}}})
        == "gates.kl.maxx is not a field of the configuration: did you mean max?"
    )


def test_batch_that_splits_groups_is_refused_with_valid_sizes():
    assert refusal({"grpo": {"batch_size": 6, "num_generations": 4}}) == (
        "grpo.batch_size is 6: with 1 accumulation steps and 1 processes that is 6 completions a step, "
        "which must be a multiple of grpo.num_generations = 4: set batch_size to 4 or 8"
    )


def test_accumulation_counts_for_whole_groups():
    assert (
        load({"grpo": {"batch_size": 2, "num_generations": 4, "gradient_accumulation_steps": 2}}).grpo.batch_size == 2
    )


def test_save_steps_between_generations_is_refused():
    values = {"grpo": {"batch_size": 4, "num_generations": 4, "save_steps": 5, "trl": {"num_iterations": 2}}}
    assert (
        refusal(values) == "grpo.save_steps is 5 and must be a multiple of 2, the steps of one generation: set it to 6"
    )


def test_value_out_of_range_names_field_value_and_limit():
    assert (
        refusal({"grpo": {"temperature": 0}}) == "grpo.temperature is 0 and is refused: input should be greater than 0"
    )


def test_unknown_trl_field_is_refused():
    assert (
        refusal({"sft": {"trl": {"wait_decay": 0.1}}})
        == "sft.trl.wait_decay is no field of TRL's SFTConfig: check the spelling or take it out"
    )


def test_trl_field_with_a_field_in_the_section_is_refused():
    assert refusal({"grpo": {"trl": {"beta": 0.1}}}) == "grpo.trl.beta is owned by another field: set kl_coef instead"


def test_trl_fields_are_read_without_importing_trl():
    assert {"loss_type", "beta", "weight_decay", "learning_rate"} <= rules_training.trl_fields("grpo")


def test_unused_reward_setting_is_refused():
    assert "target_length is set and reward type accuracy does not use it" in refusal(
        {"grpo": {"reward_config": {"target_length": 3}}}
    )


def test_a_gate_overrides_fields_of_the_default_gate():
    gates = load({"gates": {"kl": {"max": 0.3}}}).gates
    assert (gates["kl"].min, gates["kl"].max, gates["accuracy"].rival) == (0.001, 0.3, "sft")


def test_a_default_gate_that_is_turned_off_stays_off_after_a_round_trip():
    once = load({"gates": {"kl": None}})
    assert load(once.model_dump(mode="json")).gates["kl"] is None


def test_turning_off_every_gate_is_refused():
    assert refusal({"gates": dict.fromkeys(("accuracy", "kl", "reward"))}).startswith("gates are all turned off")


def test_path_implies_source_files():
    assert load({"data": {"source": "hub", "path": "rows.jsonl"}}).data.source == "files"


@pytest.mark.parametrize(
    "field",
    ["sft.learning_rate", "sft.num_epochs", "grpo.temperature", "grpo.kl_coef", "gates.kl.min", "grpo.trl.top_p"],
)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_infinity_and_nan_are_refused(field, value):
    with pytest.raises(ConfigError, match=field):
        load("tiny", {field: value})


@pytest.mark.parametrize("value", [0, -1, "2", None, 1.5, [1], True])
@pytest.mark.parametrize("name", ["num_iterations", "steps_per_generation"])
def test_counts_under_trl_are_checked_before_the_arithmetic(name, value):
    assert (
        refusal({"grpo": {"trl": {name: value}}})
        == f"grpo.trl.{name} is {value!r} and must be a whole number of at least 1"
    )


@pytest.mark.parametrize("text", ["seed: 2025-13-45", "a: &a [*a]", "- 1", "sft: [", ""])
def test_files_without_a_mapping_are_refused(tmp_path, text):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError):
        load(tmp_path / "c.yaml")


def test_a_quoted_number_stays_text(tmp_path):
    (tmp_path / "c.yaml").write_text("registry: {name: '2024'}\nsft: {learning_rate: 1e-5, mixed_precision: no}\n")
    cfg = load(tmp_path / "c.yaml")
    assert (cfg.registry.name, cfg.sft.learning_rate, cfg.sft.mixed_precision) == ("2024", 1e-5, "no")


@pytest.mark.parametrize("uri", ["foo", "http://", "sqlite:///x.db"])
def test_tracking_uri_that_is_not_http_is_refused(uri):
    assert refusal({"tracking": {"uri": uri}}).startswith(f"tracking.uri is {uri!r} and is refused")


def test_overriding_a_gate_keeps_the_other_gates():
    gates = load("tiny", {"gates.kl.max": 0.3}).gates
    assert (gates["kl"].max, gates["reward"].min, gates["accuracy"].rival) == (0.3, 0.5, "sft")


def test_overrides_replace_values_of_the_preset_and_keep_the_rest():
    cfg = load("tiny", {"grpo.max_steps": 3, "sft": {"max_steps": 5}})
    assert (cfg.grpo.max_steps, cfg.sft.max_steps, cfg.sft.batch_size) == (3, 5, load("tiny").sft.batch_size)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("grpo.learning_rate=1e-5", ("grpo.learning_rate", 1e-5)),
        ("model.name=a/b", ("model.name", "a/b")),
        ("sft.use_lora=false", ("sft.use_lora", False)),
        ("a=[q, v]", ("a", ["q", "v"])),
        ("data.instruction=", ("data.instruction", "")),
        ("a.b=c=d", ("a.b", "c=d")),
    ],
)
def test_set_reads_yaml_values(text, expected):
    assert parse_set(text) == expected


def test_set_without_value_is_refused():
    with pytest.raises(ConfigError, match="must have the form"):
        parse_set("grpo.max_steps")


def test_log_and_checkpoint_intervals_are_not_in_the_key():
    assert GRPOSection(logging_steps=3, save_steps=7, save_total_limit=9).key() == GRPOSection().key()


def test_learning_rate_is_in_the_key():
    assert GRPOSection(learning_rate=2e-5).key() != GRPOSection().key()


def test_configuration_survives_a_round_trip():
    cfg = load("gsm8k-qwen3-0.6b")
    assert load(cfg.model_dump(mode="json")) == cfg


def test_missing_file_names_the_presets():
    with pytest.raises(
        ConfigError,
        match=r"'nowhere.yaml' cannot be read .*name a YAML file or a preset \(gsm8k-qwen3-0.6b, gsm8k-smollm2, tiny\)",
    ):
        load("nowhere.yaml")


@pytest.mark.parametrize("text", ["seed: 1\nseed: 2\n", "grpo:\n  max_steps: 1\n  max_steps: 2\n"])
def test_a_key_given_twice_is_refused(tmp_path, text):
    (tmp_path / "my.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"(seed|max_steps) is given twice: remove one"):
        load(tmp_path / "my.yaml")
