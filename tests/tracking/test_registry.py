import contextvars
import hashlib
import shutil
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from configs.errors import BadInput, IntegrityError, ModelError, RatchetError, TrackingUnavailable
from configs.schema import RegistrySection, TrackingSection
from tasks.core.storage import artifacts
from tasks.core.storage.store import open_store
from tasks.core.tracking import model_files, promotion, registry
from tasks.core.tracking.runs import connect

PROMPT = "user : 1 + 2 = assistant :"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """A Qwen3 of two layers with a tokenizer of words, as a flat Hugging Face folder with its MLmodel."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("model")
    vocab = {
        word: i
        for i, word in enumerate(["<pad>", "<eos>", "<unk>", "user", "assistant", *map(str, range(10)), "+", "=", ":"])
    }
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}assistant :{% endif %}"
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(vocab),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        eos_token_id=1,
        pad_token_id=0,
        **heads,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model_files.write_mlmodel(folder)
    return folder


@pytest.fixture
def tracking(stack):
    return connect(TrackingSection(experiment="test-registry"))


@pytest.fixture
def section():
    return RegistrySection(name=f"test-{uuid.uuid4().hex[:8]}")


def put(root: str, folder: Path) -> str:
    """Uploads the folder as an artifact's `model/` and returns its address."""
    store = open_store(root)
    store.check()
    for path in folder.rglob("*"):
        if path.is_file():
            store.put_file(path, f"grpo/key/attempt/model/{path.relative_to(folder).as_posix()}")
    return store.uri("grpo/key/attempt/model")


@pytest.fixture(scope="session")
def model_uri(stack, model_folder):
    return put(f"s3://ratchet/{uuid.uuid4().hex}", model_folder)


@pytest.fixture
def versions(section, tracking, model_uri):
    """Four versions that passed their gates, in no stage."""
    return [
        registry.register(section, tracking, model_uri, None, {"gate.status": "passed"}, f"key-{n}").version
        for n in range(1, 5)
    ]


def greedy(model, tokenizer) -> list[int]:
    return model.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=8, do_sample=False)[0].tolist()


def shown(section, tracking) -> dict[int, tuple[str, list[str]]]:
    """Version -> stage and aliases, of the versions that have either."""
    numbers = registry.stages(section.name, tracking)
    found = {n: registry.describe(section.name, n, tracking) for n in sorted(numbers)}
    return {n: (v.stage, v.aliases) for n, v in found.items() if v.stage != "None" or v.aliases}


def test_the_mlmodel_of_equal_folders_is_equal(model_folder):
    def digests():
        return {
            p.relative_to(model_folder): hashlib.sha256(p.read_bytes()).hexdigest()
            for p in model_folder.rglob("*")
            if p.is_file()
        }

    before = digests()
    model_files.write_mlmodel(model_folder)
    assert digests() == before
    text = (model_folder / "MLmodel").read_text()
    assert not any(word in text for word in ("utc_time_created", "model_uuid", "run_id", str(model_folder)))


def test_the_weights_are_in_the_folder_once(model_folder):
    assert [p.relative_to(model_folder).as_posix() for p in model_folder.rglob("*.safetensors")] == [
        "model.safetensors"
    ]


def test_a_folder_without_weights_is_no_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        ModelError, match=r"holds no Hugging Face model: config.json and safetensors weights must be there"
    ):
        model_files.write_mlmodel(tmp_path)


def test_a_registered_version_loads_in_every_way_with_equal_output(
    section, tracking, model_uri, model_folder, tmp_path, monkeypatch
):
    import mlflow
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking.uri)
    expected = greedy(AutoModelForCausalLM.from_pretrained(model_folder), AutoTokenizer.from_pretrained(model_folder))
    version = registry.register(section, tracking, model_uri, None, {}, "key")
    uri = f"models:/{section.name}/{version.version}"
    parts = mlflow.transformers.load_model(uri, return_type="components", dst_path=str(tmp_path))
    assert greedy(parts["model"], parts["tokenizer"]) == expected
    assert greedy(AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)) == expected
    (answer,) = mlflow.pyfunc.load_model(uri).predict(
        {"messages": [{"role": "user", "content": "1 + 2 ="}], "max_tokens": 4}
    )
    assert answer["choices"][0]["message"]["role"] == "assistant" and answer["usage"]["prompt_tokens"] == len(
        PROMPT.split()
    )


def test_a_version_is_the_artifact_itself_with_its_tags_and_run(section, tracking, model_uri):
    run = tracking.parent("flow", "fox")
    made = registry.register(section, tracking, model_uri, run, {"gate.status": "passed"}, "key")
    assert (made.name, made.version, made.stage, made.aliases, made.source) == (section.name, 1, "None", [], model_uri)
    kept = {
        "gate.status": "passed",
        "ratchet.key": "key",
        "ratchet.model_uri": model_uri,
        "ratchet.model_sha256": registry.model_digest(model_uri),
    }
    assert made.tags == kept and made.passed
    assert tracking.client.get_model_version(section.name, "1").run_id == run


def test_the_same_key_is_registered_once(section, tracking, model_uri):
    versions = [registry.register(section, tracking, model_uri, None, {}, key).version for key in ("a", "a", "b")]
    assert versions == [1, 1, 2]
    assert registry.find(section, tracking, "b").version == 2
    assert registry.find(section, tracking, "c") is None


def test_a_model_that_does_not_exist_has_no_version(section, tracking):
    assert registry.find(section, tracking, "key") is None


def test_four_that_register_one_key_at_once_get_one_version(section, tracking, model_uri):
    with ThreadPoolExecutor(4) as pool:
        made = list(
            pool.map(lambda _: registry.register(section, tracking, model_uri, None, {}, "key").version, range(4))
        )
    assert len(set(made)) == 1
    assert list(registry.stages(section.name, tracking)) == made[:1]


def test_objects_that_are_not_there_are_not_registered(section, tracking, s3_root, stack):
    with pytest.raises(
        ModelError,
        match=f"{s3_root}/none is no model that can be registered, for MLmodel, config.json, weights is missing",
    ):
        registry.register(section, tracking, f"{s3_root}/none", None, {}, "key")
    assert registry.find(section, tracking, "key") is None


def test_a_folder_on_this_machine_is_uploaded(section, tracking, model_folder, dir_root, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking.uri)
    uri = put(dir_root, model_folder)
    made = registry.register(section, tracking, uri, tracking.parent("flow", "fox"), {}, "key")
    assert made.source == f"models:/{made.tags['ratchet.model_id']}" and made.tags["ratchet.model_uri"] == uri
    assert mlflow.pyfunc.load_model(f"models:/{section.name}/1").metadata.metadata == {"task": "llm/v1/chat"}


def test_a_challenger_is_in_staging_and_the_one_before_is_archived(section, tracking, versions):
    for number in (1, 2):
        staged = registry.stage_challenger(registry.describe(section.name, number, tracking), tracking)
    assert (staged.version, staged.stage, staged.aliases) == (2, "Staging", ["challenger"])
    assert shown(section, tracking) == {1: ("Archived", []), 2: ("Staging", ["challenger"])}


def test_promotion_takes_the_challenger_to_production(section, tracking, versions):
    registry.stage_challenger(registry.describe(section.name, 3, tracking), tracking)
    result = promotion.promote(section.name, None, tracking)
    assert (result["version"], result["previous"], result["changed"]) == (3, None, True)
    assert result["message"] == f"version 3 of {section.name} is the champion now"
    assert shown(section, tracking) == {3: ("Production", ["champion"])}


def test_promotion_archives_the_champion_before(section, tracking, versions):
    promotion.promote(section.name, 1, tracking)
    result = promotion.promote(section.name, 2, tracking)
    assert result["message"] == f"version 2 of {section.name} is the champion now in place of version 1"
    assert shown(section, tracking) == {1: ("Archived", ["previous"]), 2: ("Production", ["champion"])}


def test_every_promotion_leaves_a_run_and_tags(section, tracking, versions):
    promotion.promote(section.name, 1, tracking)
    result = promotion.promote(section.name, 2, tracking)
    run = tracking.client.get_run(result["run_id"])
    assert run.info.status == "FINISHED" and run.info.experiment_id == promotion.audit_experiment(tracking)
    assert run.data.params == {"action": "promote", "model": section.name, "version": "2", "previous": "1"}
    tags = registry.describe(section.name, 2, tracking).tags
    assert (
        tags["promotion.run_id"] == result["run_id"]
        and tags["promotion.previous"] == "1"
        and tags["promotion.at"].endswith("+00:00")
    )


def test_promoting_the_champion_again_changes_nothing_and_says_so(section, tracking, versions):
    promotion.promote(section.name, 1, tracking)
    result = promotion.promote(section.name, 1, tracking)
    assert (result["changed"], result["run_id"], result["message"]) == (
        False,
        None,
        f"version 1 of {section.name} is the champion already",
    )


def test_a_promotion_that_was_cut_off_is_completed_by_another(section, tracking, versions):
    promotion.promote(section.name, 1, tracking)
    registry.stage_challenger(registry.describe(section.name, 2, tracking), tracking)
    for alias in ("previous", "champion"):  # what was done when it was killed
        tracking.client.set_registered_model_alias(section.name, alias, "1" if alias == "previous" else "2")
    promotion.promote(section.name, None, tracking)
    assert shown(section, tracking) == {1: ("Archived", ["previous"]), 2: ("Production", ["champion"])}


def test_rollback_is_the_inverse_as_far_back_as_promotions_go(section, tracking, versions):
    for number in (1, 2, 3):
        promotion.promote(section.name, number, tracking)
    result = promotion.rollback(section.name, tracking)
    assert result["message"] == f"version 2 of {section.name} is the champion again in place of version 3"
    assert shown(section, tracking) == {
        1: ("Archived", ["previous"]),
        2: ("Production", ["champion"]),
        3: ("Archived", []),
    }
    promotion.rollback(section.name, tracking)
    assert shown(section, tracking) == {1: ("Production", ["champion"]), 2: ("Archived", []), 3: ("Archived", [])}
    with pytest.raises(BadInput, match="no version with alias previous: there is nothing to go back to"):
        promotion.rollback(section.name, tracking)


def test_a_rejected_version_is_not_promoted(section, tracking, model_uri):
    registry.register(section, tracking, model_uri, None, {"gate.status": "rejected"}, "key")
    with pytest.raises(BadInput, match=f"version 1 of {section.name} has gate.status rejected and must have passed"):
        promotion.promote(section.name, 1, tracking)
    assert shown(section, tracking) == {}


def test_a_version_without_a_verdict_is_not_promoted(section, tracking, model_uri):
    registry.register(section, tracking, model_uri, None, {}, "key")
    with pytest.raises(BadInput, match=r"gate.status missing and must have passed"):
        promotion.promote(section.name, 1, tracking)


def test_a_model_that_was_damaged_since_is_not_promoted(section, tracking, model_folder, s3_root):
    uri = put(s3_root, model_folder)
    registry.register(section, tracking, uri, None, {"gate.status": "passed"}, "key")
    open_store(uri).put_bytes("model.safetensors", b"damaged")
    with pytest.raises(IntegrityError, match=r"^version 1 of .* is damaged: .* differs from what was registered"):
        promotion.promote(section.name, 1, tracking)
    assert registry.aliases(section.name, tracking) == {}


def test_a_damaged_model_is_out_of_use_so_that_the_next_run_makes_it_again(
    section, tracking, model_folder, s3_root, tmp_path
):
    shutil.copytree(model_folder, tmp_path / "grpo" / "model")
    store = open_store(s3_root)
    uri = store.uri(
        f"grpo/k/{artifacts.publish(store, 'grpo/k', tmp_path / 'grpo', stage='grpo', key='k').folder}/model"
    )
    registry.register(section, tracking, uri, None, {"gate.status": "passed"}, "key")
    open_store(uri).put_bytes("model.safetensors", b"damaged")
    with pytest.raises(IntegrityError):
        promotion.promote(section.name, 1, tracking)
    assert artifacts.find(store, "grpo/k") is None


def test_a_model_without_challenger_needs_a_number(section, tracking, versions):
    with pytest.raises(BadInput, match="no version with alias challenger: give a version"):
        promotion.promote(section.name, None, tracking)


def test_what_does_not_exist_is_not_promoted(section, tracking, versions):
    with pytest.raises(BadInput, match="the model 'no-such-model' does not exist in the registry"):
        promotion.promote("no-such-model", 1, tracking)
    with pytest.raises(BadInput, match=f"version 99 of the model '{section.name}' does not exist in the registry"):
        promotion.promote(section.name, 99, tracking)


def test_a_registry_that_does_not_answer_is_unavailable():
    with pytest.raises(TrackingUnavailable, match="could not show the model"):
        registry.aliases("m", connect(TrackingSection(uri="http://127.0.0.1:9"), verify=False))


def test_what_does_not_hold_afterwards_is_an_error_and_a_failed_audit(section, tracking, versions, monkeypatch):
    promotion.promote(section.name, 1, tracking)
    # Somebody else moves the alias between our change and our reading back.
    monkeypatch.setattr(
        promotion, "mirror", lambda model, t: t.client.set_registered_model_alias(model, "champion", "4")
    )
    with pytest.raises(RatchetError, match=r"the registry does not hold what was asked: .*should be version 2"):
        promotion.promote(section.name, 2, tracking)
    (run,) = tracking.client.search_runs(
        [promotion.audit_experiment(tracking)], f"params.model = '{section.name}' and params.version = '2'"
    )
    assert run.info.status == "FAILED"


def test_four_promotions_at_once_leave_one_champion(section, tracking, versions):
    from tasks.promote import promote_version

    together = threading.Barrier(4)

    def go(number):
        together.wait()
        return promote_version.fn(section.name, number)["changed"]

    # Prefect's settings lead to the stack in this thread's context alone.
    contexts = [contextvars.copy_context() for _ in versions]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda context, number: context.run(go, number), contexts, versions)) == [True] * 4
    state = shown(section, tracking)
    (champion,) = [n for n, (_, aliases) in state.items() if "champion" in aliases]
    (previous,) = [n for n, (_, aliases) in state.items() if "previous" in aliases]
    assert {n: stage for n, (stage, _) in state.items()} == {
        n: "Production" if n == champion else "Archived" for n in versions
    }
    assert registry.describe(section.name, champion, tracking).tags["promotion.previous"] == str(previous)


def test_the_flows_promote_and_roll_back(section, tracking, versions):
    from flows.promote import promote, rollback

    assert promote(section.name, 1, return_state=True).name == "Promoted"
    state = promote(section.name, 2, return_state=True)
    assert (state.name, state.message) == (
        "Promoted",
        f"Version 2 of {section.name} is the champion now in place of version 1.",
    )
    assert (
        state.result()["urls"]["model_version"]
        == f"{tracking.uri}/#/models/{section.name}/versions/2?workflowType=machine_learning"
    )
    assert promote(section.name, 2, return_state=True).name == "Unchanged"
    assert rollback(section.name, return_state=True).name == "RolledBack"
    assert shown(section, tracking) == {1: ("Production", ["champion"]), 2: ("Archived", [])}


def test_a_flow_that_may_not_promote_fails_with_the_sentence_at_once(section, tracking, versions):
    from flows.promote import promote

    state = promote(section.name, 99, return_state=True)
    assert state.is_failed() and "version 99 of the model" in state.message
