"""MLflow failures without MLflow's long waits, and a small model that can be registered."""

import uuid
from pathlib import Path

import pytest
from flaky_proxy import FlakyProxy

from configs.schema import RegistrySection, TrackingSection
from tasks.core.storage.store import open_store
from tasks.core.tracking import background_run, delivery, model_files, registry
from tasks.core.tracking.runs import connect


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    """Requests and deliveries that fail are repeated as often as always, but almost at once."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", "0")
    monkeypatch.setattr(delivery, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(delivery, "LONGEST_PAUSE", 0.5)


@pytest.fixture
def short_finish(monkeypatch):
    """`finish` gives up after half a second without an answer. Only for tests in which the server is away."""
    monkeypatch.setattr(background_run, "QUIET_SECONDS", 0.5)


@pytest.fixture
def proxy(tracking):
    """A proxy to the stack's MLflow that can fail."""
    proxy = FlakyProxy(tracking.uri)
    yield proxy
    proxy.close()


@pytest.fixture
def through_proxy(tracking, proxy):
    """The same experiment, reached through the proxy."""
    return connect(TrackingSection(uri=proxy.uri, experiment=tracking.name))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """A Qwen3 with two layers and a word tokenizer, as a flat Hugging Face folder with its MLmodel."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("model")
    words = ["<pad>", "<eos>", "<unk>", "user", "assistant", *map(str, range(10)), "+", "=", ":"]
    vocab = {word: i for i, word in enumerate(words)}
    model = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}assistant :{% endif %}"
    )
    size = {"vocab_size": len(vocab), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**size, **heads, eos_token_id=1, pad_token_id=0)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model_files.write_mlmodel(folder)
    return folder


@pytest.fixture(scope="session")
def upload_model(stack, model_folder):
    """Uploads the model as an artifact's `model/` folder below a root, and returns its address."""

    def upload(root: str) -> str:
        store = open_store(root)
        store.check()
        for path in model_folder.rglob("*"):
            if path.is_file():
                store.put_file(path, f"grpo/key/attempt/model/{path.relative_to(model_folder).as_posix()}")
        return store.uri("grpo/key/attempt/model")

    return upload


@pytest.fixture(scope="session")
def model_uri(upload_model):
    """The model's address in the stack's S3."""
    return upload_model(f"s3://ratchet/{uuid.uuid4().hex}")


@pytest.fixture
def section():
    """A registered model that no other test uses."""
    return RegistrySection(name=f"test-{uuid.uuid4().hex[:8]}")


@pytest.fixture
def register_passed(section, tracking, model_uri, model_folder):
    """Registers versions that passed their gates, without a stage."""

    def register(count: int) -> list[int]:
        tags = {"gate.status": "passed"}
        return [
            registry.register(section, tracking, model_uri, None, tags, f"key-{n}", model_folder).version
            for n in range(1, count + 1)
        ]

    return register


@pytest.fixture
def shown(section, tracking):
    """Reads, for every version with a stage or an alias: version -> stage and aliases."""

    def read() -> dict[int, tuple[str, list[str]]]:
        numbers = sorted(registry.stages(section.name, tracking))
        found = [registry.describe(section.name, number, tracking) for number in numbers]
        return {v.version: (v.stage, v.aliases) for v in found if v.stage != "None" or v.aliases}

    return read
