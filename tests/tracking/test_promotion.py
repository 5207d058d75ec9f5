import contextvars
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from configs.errors import BadInput, IntegrityError, RatchetError
from tasks.core.storage import artifacts
from tasks.core.storage.store import open_store
from tasks.core.tracking import promotion, registry


def test_promotion_takes_the_challenger_to_production(section, tracking, register_passed, shown):
    register_passed(2)
    registry.stage_challenger(registry.describe(section.name, 2, tracking), tracking)
    result = promotion.promote(section.name, None, tracking)
    assert (result["version"], result["previous"], result["changed"]) == (2, None, True)
    assert result["message"] == f"version 2 of {section.name} is the champion now"
    assert shown() == {2: ("Production", ["champion"])}


def test_promotion_archives_the_champion_before(section, tracking, register_passed, shown):
    for number in register_passed(2):
        result = promotion.promote(section.name, number, tracking)
    assert result["message"] == f"version 2 of {section.name} is the champion now and replaces version 1"
    assert shown() == {1: ("Archived", ["previous"]), 2: ("Production", ["champion"])}


def test_every_promotion_has_an_audit_run_and_tags(section, tracking, register_passed):
    for number in register_passed(2):
        result = promotion.promote(section.name, number, tracking)
    run = tracking.client.get_run(result["run_id"])
    assert run.info.status == "FINISHED" and run.info.experiment_id == promotion.audit_experiment(tracking)
    assert run.data.params == {"action": "promote", "model": section.name, "version": "2", "previous": "1"}
    tags = registry.describe(section.name, 2, tracking).tags
    assert (tags["promotion.run_id"], tags["promotion.previous"]) == (result["run_id"], "1")
    assert tags["promotion.at"].endswith("+00:00")


def test_promoting_the_champion_again_changes_nothing_and_says_so(section, tracking, register_passed):
    register_passed(1)
    promotion.promote(section.name, 1, tracking)
    result = promotion.promote(section.name, 1, tracking)
    message = f"version 1 of {section.name} is the champion already"
    assert (result["changed"], result["run_id"], result["message"]) == (False, None, message)


def test_an_interrupted_promotion_is_completed_by_another(section, tracking, register_passed, shown):
    register_passed(2)
    promotion.promote(section.name, 1, tracking)
    registry.stage_challenger(registry.describe(section.name, 2, tracking), tracking)
    for alias, number in {"previous": "1", "champion": "2"}.items():  # the state after the interruption
        tracking.client.set_registered_model_alias(section.name, alias, number)
    promotion.promote(section.name, None, tracking)
    assert shown() == {1: ("Archived", ["previous"]), 2: ("Production", ["champion"])}


def test_rollback_undoes_every_promotion_in_turn(section, tracking, register_passed, shown):
    for number in register_passed(3):
        promotion.promote(section.name, number, tracking)
    result = promotion.rollback(section.name, tracking)
    assert result["message"] == f"version 2 of {section.name} is the champion again and replaces version 3"
    third = {3: ("Archived", [])}
    assert shown() == {1: ("Archived", ["previous"]), 2: ("Production", ["champion"]), **third}
    promotion.rollback(section.name, tracking)
    assert shown() == {1: ("Production", ["champion"]), 2: ("Archived", []), **third}
    with pytest.raises(BadInput, match="no version with alias previous, so there is no version to go back to"):
        promotion.rollback(section.name, tracking)


def test_an_interrupted_rollback_is_completed_by_another(section, tracking, register_passed, shown):
    for number in register_passed(2):
        promotion.promote(section.name, number, tracking)
    tracking.client.set_registered_model_alias(section.name, "champion", "1")  # the state after the interruption
    result = promotion.rollback(section.name, tracking)
    message = f"version 1 of {section.name} is the champion again: an interrupted change is undone"
    assert (result["changed"], result["message"]) == (False, message)
    assert shown() == {1: ("Production", ["champion"]), 2: ("Archived", [])}


def test_a_rejected_version_is_not_promoted(section, tracking, model_uri, model_folder, shown):
    registry.register(section, tracking, model_uri, None, {"gate.status": "rejected"}, "key", model_folder)
    with pytest.raises(BadInput, match=f"version 1 of {section.name} has gate.status rejected and must have passed"):
        promotion.promote(section.name, 1, tracking)
    assert shown() == {}


def test_a_version_without_a_verdict_is_not_promoted(section, tracking, model_uri, model_folder):
    registry.register(section, tracking, model_uri, None, {}, "key", model_folder)
    with pytest.raises(BadInput, match=r"gate.status missing and must have passed"):
        promotion.promote(section.name, 1, tracking)


def test_a_damaged_model_is_not_promoted(section, tracking, upload_model, model_folder, s3_root):
    uri = upload_model(s3_root)
    registry.register(section, tracking, uri, None, {"gate.status": "passed"}, "key", model_folder)
    open_store(uri).put_bytes("model.safetensors", b"damaged")
    with pytest.raises(IntegrityError, match=r"^version 1 of .* is damaged: .* differs from the registered model"):
        promotion.promote(section.name, 1, tracking)
    assert registry.aliases(section.name, tracking) == {}


def test_a_damaged_artifact_is_taken_out_of_use(section, tracking, model_folder, s3_root, tmp_path):
    shutil.copytree(model_folder, tmp_path / "grpo" / "model")
    store = open_store(s3_root)
    published = artifacts.publish(store, "grpo/k", tmp_path / "grpo", stage="grpo", key="k")
    uri = store.uri(f"grpo/k/{published.folder}/model")
    registry.register(section, tracking, uri, None, {"gate.status": "passed"}, "key", model_folder)
    open_store(uri).put_bytes("model.safetensors", b"damaged")
    with pytest.raises(IntegrityError):
        promotion.promote(section.name, 1, tracking)
    assert artifacts.find(store, "grpo/k") is None


def test_a_model_without_a_challenger_needs_a_number(section, tracking, register_passed):
    register_passed(1)
    with pytest.raises(BadInput, match="no version with alias challenger: give a version"):
        promotion.promote(section.name, None, tracking)


def test_a_model_that_does_not_exist_is_not_promoted(tracking):
    with pytest.raises(BadInput, match="the model 'no-such-model' does not exist in the registry"):
        promotion.promote("no-such-model", 1, tracking)


def test_a_version_that_does_not_exist_is_not_promoted(section, tracking, register_passed):
    register_passed(1)
    with pytest.raises(BadInput, match=f"version 99 of the model '{section.name}' does not exist in the registry"):
        promotion.promote(section.name, 99, tracking)


def test_a_change_that_another_program_undoes_is_an_error_and_a_failed_audit_run(
    section, tracking, register_passed, monkeypatch
):
    register_passed(3)
    promotion.promote(section.name, 1, tracking)

    def interfere(model, tracking):
        """Another program moves the alias before the registry is read back."""
        tracking.client.set_registered_model_alias(model, "champion", "3")

    monkeypatch.setattr(promotion, "update_stages", interfere)
    with pytest.raises(RatchetError, match=r"the registry does not show the change: .*should be version 2"):
        promotion.promote(section.name, 2, tracking)
    query = f"params.model = '{section.name}' and params.version = '2'"
    (run,) = tracking.client.search_runs([promotion.audit_experiment(tracking)], query)
    assert run.info.status == "FAILED"


def test_four_promotions_at_once_leave_one_champion(section, tracking, register_passed, shown):
    from tasks.promote import promote_version

    numbers = register_passed(4)
    together = threading.Barrier(4)

    def promote(number):
        together.wait()
        return promote_version.fn(section.name, number)["changed"]

    # Only this thread's context has the Prefect settings of the stack.
    contexts = [contextvars.copy_context() for _ in numbers]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda context, number: context.run(promote, number), contexts, numbers)) == [True] * 4
    versions = shown()
    (champion,) = [number for number, (_, aliases) in versions.items() if "champion" in aliases]
    (previous,) = [number for number, (_, aliases) in versions.items() if "previous" in aliases]
    expected = {number: "Production" if number == champion else "Archived" for number in numbers}
    assert {number: stage for number, (stage, _) in versions.items()} == expected
    assert registry.describe(section.name, champion, tracking).tags["promotion.previous"] == str(previous)


def test_the_flows_promote_and_roll_back(section, tracking, register_passed, shown):
    from flows.promote import promote, rollback

    register_passed(2)
    promotion.promote(section.name, 1, tracking)
    state = promote(section.name, 2, return_state=True)
    message = f"Version 2 of {section.name} is the champion now and replaces version 1."
    assert (state.name, state.message) == ("Promoted", message)
    page = f"{tracking.uri}/#/models/{section.name}/versions/2?workflowType=machine_learning"
    assert state.result()["urls"]["model_version"] == page
    assert promote(section.name, 2, return_state=True).name == "Unchanged"
    assert rollback(section.name, return_state=True).name == "RolledBack"
    assert shown() == {1: ("Production", ["champion"]), 2: ("Archived", [])}


def test_a_flow_that_may_not_promote_fails_at_once_with_the_sentence(section, register_passed):
    from flows.promote import promote

    register_passed(1)
    state = promote(section.name, 99, return_state=True)
    assert state.is_failed() and "version 99 of the model" in state.message
