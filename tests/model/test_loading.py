import json

import pytest
import tiny

from configs.errors import ConfigError, ModelError
from configs.schema import ComputeSection, ModelSection, RunConfig, Scratch
from tasks.core.model import loading, location, memory, precision, scratch
from tasks.core.model.prompts import render_prompt
from tasks.core.storage import jsonl

QUESTION = [{"role": "user", "content": "34 + 25 = ?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a tiny model."""
    return tiny.build(tmp_path_factory.mktemp("models"))[1] / "model"


def files(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def broken(folder, tmp_path, without):
    """A copy of the model's folder without the files of this pattern."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        if not file.match(without):
            (copy / file.name).write_bytes(file.read_bytes())
    return copy


# ---------------------------------------------------------------- scratch


def test_scratch_is_the_same_bytes_for_the_same_seed(tmp_path, folder):
    _, base = tiny.build(tmp_path)
    assert files(base / "model") == files(folder)


def test_scratch_has_other_weights_for_another_seed(tmp_path, folder):
    _, base = tiny.build(tmp_path, seed=2)
    assert files(base / "model")["model.safetensors"] != files(folder)["model.safetensors"]
    assert files(base / "model")["tokenizer.json"] == files(folder)["tokenizer.json"]


def test_scratch_leaves_the_random_state_alone(tmp_path):
    import torch

    torch.manual_seed(5)
    first = torch.rand(1)
    torch.manual_seed(5)
    tiny.build(tmp_path)
    assert torch.equal(torch.rand(1), first)


def test_scratch_has_the_size_of_its_section():
    size = Scratch(hidden_size=32, intermediate_size=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8)
    config = scratch.model_config(size, vocabulary=301)
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (32, 64, 3)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.vocab_size) == (
        4,
        2,
        8,
        301,
    )
    assert config.tie_word_embeddings is True


def test_scratch_vocabulary_keeps_its_limit():
    texts = [f"word{chr(97 + i)}{chr(97 + j)} again" for i in range(26) for j in range(26)]
    assert len(scratch.train_tokenizer(texts, 300)) == 300


def test_tokenizer_learns_from_texts_with_line_separators_of_other_scripts(tmp_path):
    file = tmp_path / "sft.jsonl"
    jsonl.write_rows(file, [{"prompt": [{"role": "user", "content": "one\u2028two\x85"}], "completion": "three"}])
    assert list(scratch._texts(file)) == ["one\u2028two\x85", "three"]


def test_scratch_tokenizer_splits_every_digit(folder):
    tokenizer = loading.load_tokenizer(folder, tiny.MODEL)
    assert tokenizer.convert_ids_to_tokens(tokenizer("125")["input_ids"]) == ["1", "2", "5"]


def test_scratch_tokenizer_gives_any_text_back(folder):
    tokenizer = loading.load_tokenizer(folder, tiny.MODEL)
    assert tokenizer.decode(tokenizer("Größe: 12 €\n\tso, ja").input_ids) == "Größe: 12 €\n\tso, ja"


# ---------------------------------------------------------------- prompts


def test_prompt_ends_where_the_answer_begins(folder):
    tokenizer = loading.load_tokenizer(folder, tiny.MODEL)
    assert render_prompt(tokenizer, QUESTION, {}) == "<|user|>34 + 25 = ?<|assistant|>"


def test_prompt_with_a_system_message(folder):
    tokenizer = loading.load_tokenizer(folder, tiny.MODEL)
    assert (
        render_prompt(tokenizer, [{"role": "system", "content": "Add."}, *QUESTION], {})
        == "<|system|>Add.<|user|>34 + 25 = ?<|assistant|>"
    )


def test_prompt_takes_the_template_and_its_arguments_from_the_configuration(folder):
    section = ModelSection(chat_template="{% if polite %}Please: {% endif %}{{ messages[0]['content'] }}")
    tokenizer = loading.load_tokenizer(folder, section)
    assert render_prompt(tokenizer, QUESTION, {"polite": True}) == "Please: 34 + 25 = ?"


def test_prompt_has_one_begin_of_text_token_where_template_and_tokenizer_both_write_it(folder):
    from tokenizers.processors import TemplateProcessing

    tokenizer = loading.load_tokenizer(folder, ModelSection(chat_template="<|system|>{{ messages[0]['content'] }}"))
    tokenizer.bos_token = "<|system|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", tokenizer.bos_token_id)]
    )
    ids = tokenizer(render_prompt(tokenizer, QUESTION, {}))["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == 1


def test_prompt_keeps_a_begin_of_text_token_that_only_the_template_writes(folder):
    tokenizer = loading.load_tokenizer(folder, ModelSection(chat_template="<|system|>{{ messages[0]['content'] }}"))
    tokenizer.bos_token = "<|system|>"
    assert render_prompt(tokenizer, QUESTION, {}) == "<|system|>34 + 25 = ?"


def test_a_template_that_refuses_is_one_sentence(folder):
    section = ModelSection(chat_template="{{ raise_exception('no system role') }}")
    with pytest.raises(ModelError, match=r"refuses messages of user \(no system role\): change model.chat_template"):
        render_prompt(loading.load_tokenizer(folder, section), QUESTION, {})


def test_tokenizer_without_a_template_is_refused(folder, tmp_path):
    with pytest.raises(ModelError, match=r"has no chat template: give a Jinja template in model\.chat_template"):
        loading.load_tokenizer(broken(folder, tmp_path, "*.jinja"), tiny.MODEL)


def test_tokenizer_pads_on_the_left(folder):
    assert loading.load_tokenizer(folder, tiny.MODEL).padding_side == "left"


# ---------------------------------------------------------------- folders and the Hub


@pytest.mark.parametrize(
    ("without", "sentence"),
    [
        ("config.json", r"holds no config\.json"),
        ("*.safetensors", r"holds no \*\.safetensors"),
        ("tokenizer.json", "holds no tokenizer"),
    ],
)
def test_a_folder_that_is_no_model_is_refused(folder, tmp_path, without, sentence):
    section = ModelSection(name=str(broken(folder, tmp_path, without)))
    with pytest.raises(ModelError, match=sentence):
        location.content_digest(section)


def test_a_path_that_does_not_exist_is_refused():
    with pytest.raises(
        ModelError,
        match=r"^model\.name is \./nowhere, and there is no such folder: give a model folder, a Hub id or `scratch`$",
    ):
        location.content_digest(ModelSection(name="./nowhere"))


def test_pickled_weights_are_refused_until_allowed(folder, tmp_path):
    copy = broken(folder, tmp_path, "*.safetensors")
    (copy / "pytorch_model.bin").write_bytes(b"weights")
    with pytest.raises(ModelError, match=r"whose weights are pickled: .* model\.allow_pickle"):
        location.content_digest(ModelSection(name=str(copy)))
    assert len(location.content_digest(ModelSection(name=str(copy), allow_pickle=True))) == 64


def test_digest_of_a_folder_changes_with_its_weights_and_not_with_its_readme(folder, tmp_path):
    copy = broken(folder, tmp_path, "nothing")
    section = ModelSection(name=str(copy))
    before = location.content_digest(section)
    (copy / "README.md").write_text("a model")
    assert location.content_digest(section) == before
    (copy / "model.safetensors").write_bytes((copy / "model.safetensors").read_bytes()[:-1] + b"x")
    assert location.content_digest(section) != before


def test_digest_does_not_depend_on_where_the_folder_lies(folder, tmp_path):
    assert location.content_digest(
        ModelSection(name=str(broken(folder, tmp_path, "nothing")))
    ) == location.content_digest(ModelSection(name=str(folder)))


def test_digest_of_scratch_and_of_the_hub():
    assert location.content_digest(ModelSection(name="scratch")) == ""
    assert location.content_digest(ModelSection(name="org/model", revision="abc")) == "org/model@abc"
    assert location.content_digest(ModelSection(name="org/model")) == "org/model@main"


def test_base_of_a_folder_is_its_digest_alone(folder, tmp_path):
    section = ModelSection(name=str(folder))
    location.build_base(section, tmp_path, 1, tmp_path)
    assert json.loads((tmp_path / "source.json").read_text()) == {"sha256": location.content_digest(section)}
    assert [file.name for file in tmp_path.iterdir()] == ["source.json"]
    assert location.locate(section, tmp_path) == str(folder)


def test_a_hub_that_does_not_answer_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ModelError,
        match=r"^model\.name is org/no-such-model, which is no folder here, and the Hub does not give it at revision main .*: check",
    ):
        location.build_base(ModelSection(name="org/no-such-model"), tmp_path, 1, tmp_path)


# ---------------------------------------------------------------- loading


def test_weights_are_loaded_in_the_type_that_is_asked_for(folder):
    import torch

    section = tiny.MODEL.model_copy(update={"dtype": "bfloat16"})
    assert loading.load_policy(folder, section, tiny.CPU, for_training=True).dtype == torch.bfloat16
    assert loading.load_policy(folder, tiny.MODEL, tiny.CPU, for_training=True).dtype == torch.float32


def test_attention_is_loaded_as_asked(folder):
    section = tiny.MODEL.model_copy(update={"attention": "eager"})
    assert loading.load_policy(folder, section, tiny.CPU, for_training=True).config._attn_implementation == "eager"


def test_attention_that_is_not_installed_is_one_sentence(folder):
    section = tiny.MODEL.model_copy(update={"attention": "flash_attention_2"})
    with pytest.raises(ModelError, match=r"does not load .*model\.attention = flash_attention_2") as caught:
        loading.load_policy(folder, section, tiny.CPU, for_training=True)
    assert "\n" not in str(caught.value)


def test_a_model_to_measure_is_in_evaluation_mode(folder):
    assert loading.load_policy(folder, tiny.MODEL, tiny.CPU, for_training=False).training is False


def test_cuda_without_a_gpu_is_one_sentence(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(
        ConfigError, match=r"^compute\.device is cuda, and torch sees no GPU on this machine: set it to cpu or auto$"
    ):
        precision.device(ComputeSection(device="cuda"))
    assert precision.device(ComputeSection(device="auto")) == "cpu"


def described(folder, tmp_path, **changed):
    """A copy of the model's folder whose config.json says something else."""
    copy = broken(folder, tmp_path, "nothing")
    values = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(values | changed))
    return copy


@pytest.mark.parametrize("for_training", [True, False])
def test_weights_that_lack_layers_are_one_sentence(folder, tmp_path, for_training):
    copy = described(folder, tmp_path, num_hidden_layers=3, layer_types=["full_attention"] * 3)
    # Eleven tensors a layer: two norms, four of attention and its two norms, three of the MLP.
    with pytest.raises(
        ModelError,
        match=r"^the weights in \S+/copy lack 22 tensors \(model\.layers\.1\.input_layernorm\.weight, model\.layers\.1\.mlp\.down_proj\.weight, "
        r"model\.layers\.1\.mlp\.gate_proj\.weight, \.\.\.\) of the model that its config\.json describes: give the whole model, or correct the file$",
    ):
        loading.load_policy(copy, tiny.MODEL, tiny.CPU, for_training)


def test_an_output_layer_is_missing_only_where_it_is_not_tied(folder, tmp_path):
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    loading.load_policy(folder, tiny.MODEL, tiny.CPU, for_training=True)
    with pytest.raises(ModelError, match=r"lack 1 tensor \(lm_head\.weight\) of the model"):
        loading.load_policy(
            described(folder, tmp_path, tie_word_embeddings=False), tiny.MODEL, tiny.CPU, for_training=True
        )


def test_weights_of_another_shape_are_one_sentence(folder, tmp_path):
    copy = described(folder, tmp_path, intermediate_size=48)
    with pytest.raises(
        ModelError,
        match=r"have other shapes than its config\.json says in 3 tensors \(model\.layers\.0\.mlp\.down_proj\.weight \(32, 32\) for \(32, 48\), "
        r".*: give the files of one model$",
    ):
        loading.load_policy(copy, tiny.MODEL, tiny.CPU, for_training=True)


def test_a_configuration_that_contradicts_itself_is_one_sentence(folder, tmp_path):
    copy = described(folder, tmp_path, num_hidden_layers=3)
    with pytest.raises(
        ModelError,
        match=r"does not load \(.*`num_hidden_layers` \(3\) must be equal to the number of `layer_types` \(1\)\): check",
    ):
        loading.load_policy(copy, tiny.MODEL, tiny.CPU, for_training=True)
    with pytest.raises(ModelError, match=r"whose configuration cannot be read \(.*`num_hidden_layers` \(3\)"):
        memory.estimate(RunConfig(model={"name": str(copy)}, compute={"device": "cpu"}))


@pytest.mark.parametrize("kept", [0, 4, 5000])
def test_weights_cut_short_are_one_sentence(folder, tmp_path, kept):
    copy = broken(folder, tmp_path, "nothing")
    (copy / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:kept])
    with pytest.raises(
        ModelError,
        match=r"^the weights in \S+/copy cannot be read \(.+\): a file is damaged or cut short, copy or download it again$",
    ):
        loading.load_policy(copy, tiny.MODEL, tiny.CPU, for_training=True)


# A machine with a GPU is not always at hand: what torch would say about one is put in its mouth.
@pytest.mark.parametrize(
    ("for_training", "lora", "bf16", "expected"),
    [
        (True, True, True, "torch.bfloat16"),
        (True, True, False, "torch.float32"),
        (True, False, True, "torch.float32"),
        (False, False, True, "auto"),
    ],
)
def test_automatic_type_on_a_gpu(monkeypatch, for_training, lora, bf16, expected):
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: bf16)
    assert str(precision.weight_type(ModelSection(), "cuda", for_training, lora)) == expected


# ---------------------------------------------------------------- estimate


def test_estimate_counts_the_parameters_of_a_folder(folder):
    config = RunConfig(model={"name": str(folder)}, compute={"device": "cpu"})
    expected = loading.load_policy(folder, tiny.MODEL, tiny.CPU, for_training=True).num_parameters()
    assert memory.estimate(config)["parameters"] == expected


def test_estimate_of_the_adapter_counts_rank_times_both_sides():
    size = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
    }
    config = RunConfig(model={"scratch": size}, grpo={"lora_rank": 4, "batch_size": 8}, compute={"device": "cpu"})
    # Per layer: q 32->32, k and v 32->16, o 32->32, gate and up 32->64, down 64->32.
    assert memory.estimate(config)["grpo"]["trainable"] == 2 * 4 * (64 + 48 + 48 + 64 + 96 + 96 + 96)


def test_estimate_of_full_fine_tuning_takes_more_memory_than_lora():
    lora, full = (
        memory.estimate(RunConfig(grpo={"use_lora": use_lora, "batch_size": 8}, compute={"device": "cpu"}))
        for use_lora in (True, False)
    )
    assert full["grpo"]["peak_bytes"] > lora["grpo"]["peak_bytes"]


def test_estimate_without_a_model_is_one_sentence():
    with pytest.raises(ModelError, match="there is no such folder"):
        memory.estimate(RunConfig(model={"name": "./nowhere"}))


def test_estimate_of_an_odd_head_is_one_sentence():
    with pytest.raises(
        ConfigError,
        match=r"^model\.scratch\.head_dim is 5, and rotary embeddings need an even number: set it to 4 or 6$",
    ):
        memory.estimate(RunConfig(model={"scratch": {"head_dim": 5}}, compute={"device": "cpu"}))
