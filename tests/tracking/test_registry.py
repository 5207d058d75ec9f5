from concurrent.futures import ThreadPoolExecutor

import pytest

from configs.errors import ModelError, TrackingUnavailable
from configs.schema import TrackingSection
from tasks.core.storage.store import open_store
from tasks.core.tracking import registry
from tasks.core.tracking.runs import connect

PROMPT = "user : 1 + 2 = assistant :"


def greedy(model, tokenizer) -> list[int]:
    return model.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=8, do_sample=False)[0].tolist()


def load(folder) -> tuple:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def test_a_registered_version_loads_in_every_way_with_equal_output(
    section, tracking, model_uri, model_folder, tmp_path, monkeypatch
):
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking.uri)
    expected = greedy(*load(model_folder))
    version = registry.register(section, tracking, model_uri, None, {}, "key")
    uri = f"models:/{section.name}/{version.version}"
    parts = mlflow.transformers.load_model(uri, return_type="components", dst_path=str(tmp_path))
    assert greedy(parts["model"], parts["tokenizer"]) == expected
    assert greedy(*load(tmp_path)) == expected
    question = {"messages": [{"role": "user", "content": "1 + 2 ="}], "max_tokens": 4}
    (answer,) = mlflow.pyfunc.load_model(uri).predict(question)
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["prompt_tokens"] == len(PROMPT.split())


def test_a_version_is_the_artifact_itself_with_its_tags_and_run(section, tracking, model_uri):
    run = tracking.parent("flow", "fox")
    made = registry.register(section, tracking, model_uri, run, {"gate.status": "passed"}, "key")
    assert (made.name, made.version, made.stage, made.aliases, made.source) == (section.name, 1, "None", [], model_uri)
    assert made.passed and made.tags == {
        "gate.status": "passed",
        "ratchet.key": "key",
        "ratchet.model_uri": model_uri,
        "ratchet.model_sha256": registry.model_digest(model_uri),
    }
    assert tracking.client.get_model_version(section.name, "1").run_id == run


def test_with_a_verified_copy_the_bytes_in_the_store_are_not_read(
    section, tracking, upload_model, model_folder, s3_root
):
    uri = upload_model(s3_root)
    expected = registry.model_digest(uri)
    open_store(uri).put_bytes("model.safetensors", b"changed after the copy was made")
    made = registry.register(section, tracking, uri, None, {}, "key", model_folder)
    assert made.tags["ratchet.model_sha256"] == expected


def test_a_verified_copy_of_a_folder_on_this_machine_is_uploaded(
    section, tracking, upload_model, model_folder, dir_root, tmp_path
):
    import mlflow

    uri = upload_model(dir_root)
    open_store(uri).put_bytes("model.safetensors", b"changed after the copy was made")
    made = registry.register(section, tracking, uri, None, {}, "key", model_folder)
    mlflow.artifacts.download_artifacts(made.source, dst_path=str(tmp_path), tracking_uri=tracking.uri)
    assert (tmp_path / "model.safetensors").read_bytes() == (model_folder / "model.safetensors").read_bytes()


def test_the_same_key_is_registered_once(section, tracking, model_uri):
    versions = [registry.register(section, tracking, model_uri, None, {}, key).version for key in ("a", "a", "b")]
    assert versions == [1, 1, 2]
    assert registry.find(section, tracking, "b").version == 2
    assert registry.find(section, tracking, "c") is None


def test_a_model_that_does_not_exist_has_no_version(section, tracking):
    assert registry.find(section, tracking, "key") is None


def test_four_threads_that_register_one_key_at_once_get_one_version(section, tracking, model_uri, model_folder):
    def register(_):
        return registry.register(section, tracking, model_uri, None, {}, "key", model_folder).version

    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(register, range(4)))
    assert len(set(made)) == 1
    assert list(registry.stages(section.name, tracking)) == made[:1]


def test_a_folder_that_does_not_exist_is_not_registered(section, tracking, s3_root):
    sentence = f"{s3_root}/none cannot be registered, because MLmodel, config.json, weights is missing"
    with pytest.raises(ModelError, match=sentence):
        registry.register(section, tracking, f"{s3_root}/none", None, {}, "key")
    assert registry.find(section, tracking, "key") is None


def test_a_folder_on_this_machine_is_uploaded(section, tracking, upload_model, dir_root, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking.uri)
    uri = upload_model(dir_root)
    made = registry.register(section, tracking, uri, tracking.parent("flow", "fox"), {}, "key")
    assert made.source == f"models:/{made.tags['ratchet.model_id']}" and made.tags["ratchet.model_uri"] == uri
    assert mlflow.pyfunc.load_model(f"models:/{section.name}/1").metadata.metadata == {"task": "llm/v1/chat"}


def test_a_challenger_is_in_staging_and_the_one_before_is_archived(section, tracking, register_passed, shown):
    for number in register_passed(2):
        staged = registry.stage_challenger(registry.describe(section.name, number, tracking), tracking)
    assert (staged.version, staged.stage, staged.aliases) == (2, "Staging", ["challenger"])
    assert shown() == {1: ("Archived", []), 2: ("Staging", ["challenger"])}


def test_every_version_lists_the_versions_of_all_models(section, tracking, register_passed):
    register_passed(2)
    found = [v for v in registry.every_version(tracking) if v.name == section.name]
    assert sorted((v.version, v.tags["ratchet.key"]) for v in found) == [(1, "key-1"), (2, "key-2")]


def test_a_registry_that_does_not_answer_is_unavailable():
    with pytest.raises(TrackingUnavailable, match="could not show the model"):
        registry.aliases("m", connect(TrackingSection(uri="http://127.0.0.1:9"), verify=False))
