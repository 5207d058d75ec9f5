"""The whole pipeline on a small model: what is done, cached and shown. Real servers, real training."""

import json

import mlflow
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from small_run import PASSING, STEPS, ratchet, succeed
from tiny import STAGES

from configs.schema import TrackingSection
from tasks.core.storage.store import open_store
from tasks.core.tracking import promotion, runs


@pytest.fixture(scope="module")
def second(first, stack, root):
    """The same run again: (exit code, stdout, stderr)."""
    code, out, err = ratchet(stack["project"], root, *PASSING.items())
    assert code == 0, err
    return json.loads(out), err


@pytest.fixture(scope="module")
def rejected(first, stack, root):
    """The same run with a gate that the model does not pass."""
    return succeed(stack["project"], root, ("gates", {"kl": {"min": 0.3}, "accuracy": None, "reward": None}))


def artifacts_of(flow_run_id):
    """The newest content of each artifact of a flow run, by key."""
    chosen = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
    with get_client(sync_client=True) as client:
        return {artifact.key: artifact.data for artifact in client.read_artifacts(artifact_filter=chosen)}


def mlflow_parent(summary):
    """The id of the pipeline run's parent run in MLflow."""
    return summary["urls"]["mlflow_run"].partition("?")[0].rpartition("/")[2]


def mlflow_children(summary):
    """Stage -> id of the child run in MLflow, for the stages that this pipeline run did itself."""
    client, parent = mlflow.MlflowClient(), mlflow_parent(summary)
    experiment = client.get_run(parent).info.experiment_id
    found = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{parent}'")
    children = {run.data.tags["ratchet.stage"]: run.info.run_id for run in found}
    assert len(children) == len(found)
    return children


def test_every_stage_is_done_and_none_cached(first):
    assert {name: stage["cached"] for name, stage in first["stages"].items()} == dict.fromkeys(STAGES, False)


def test_each_model_has_its_metrics(first):
    common = {"accuracy", "mean_reward", "format_rate", "mean_length", "truncated_rate", "num_prompts"}
    expected = {"base": common, "sft": common | {"kl", "kl_sequence"}, "grpo": common | {"kl", "kl_sequence"}}
    assert all(names <= set(first["metrics"][role]) for role, names in expected.items())


def test_all_models_are_measured_on_the_same_prompts(first):
    assert [first["metrics"][role]["num_prompts"] for role in ("base", "sft", "grpo")] == [16, 16, 16]


def test_version_that_passed_is_in_staging_as_challenger(first):
    assert (first["state"], first["model"]["stage"], first["model"]["aliases"]) == (
        "Completed",
        "Staging",
        ["challenger"],
    )


def test_second_run_finds_every_stage_cached(first, second):
    found = {name: (stage["key"], stage["cached"]) for name, stage in second[0]["stages"].items()}
    assert found == {name: (stage["key"], True) for name, stage in first["stages"].items()}


def test_second_run_starts_no_child_process(second):
    assert "started as process" not in second[1]


def test_orchestrating_process_imports_neither_torch_nor_transformers(second):
    assert second[1].rstrip().endswith("[]")


def test_second_run_makes_no_second_version(first, second):
    assert second[0]["model"] == first["model"]


def test_not_passing_is_a_result(rejected):
    assert (rejected["state"], rejected["verdict"]["passed"], rejected["model"]["stage"]) == ("Rejected", False, "None")


def test_other_gates_redo_the_verdict_alone(rejected):
    assert [name for name, stage in rejected["stages"].items() if not stage["cached"]] == ["judge", "register"]


def test_rejected_version_carries_its_verdict(rejected):
    found = mlflow.MlflowClient().get_model_version("pipeline", str(rejected["model"]["version"]))
    assert (found.tags["gate.status"], found.tags["gate.kl"].startswith("fail: kl is ")) == ("rejected", True)


def test_registered_model_loads_from_the_store(first):
    uri = f"models:/pipeline/{first['model']['version']}"
    loaded = mlflow.transformers.load_model(uri, return_type="components")
    assert loaded["model"].config.hidden_size == 32


def test_weights_are_stored_once(first, root):
    weights = [key for key in open_store(root).list("grpo/") if key.endswith("/model.safetensors")]
    copies = [key for key in open_store("s3://mlflow").list("") if key.endswith(".safetensors")]
    assert (len(weights), copies) == (1, [])


def test_mlflow_shows_a_child_per_stage_with_its_curve(first):
    children = mlflow_children(first)
    points = mlflow.MlflowClient().get_metric_history(children["grpo"], "reward")
    assert sorted(children) == sorted(STAGES)
    assert [point.step for point in points] == list(range(1, STEPS["grpo"] + 1))


def test_second_run_links_to_the_mlflow_runs_that_did_the_work(first, second):
    children = mlflow_children(first)
    tags = mlflow.MlflowClient().get_run(mlflow_parent(second[0])).data.tags
    assert {stage: tags[f"ratchet.{stage}.run"] for stage in STAGES} == children
    rows = [line.split(" | ") for line in tags["mlflow.note.content"].splitlines()[2:]]
    found = [(stage, children[stage.removeprefix("| ")] in link, cached) for stage, link, cached, _ in rows]
    assert found == [(f"| {stage}", True, "yes") for stage in STAGES]


def test_version_belongs_to_the_mlflow_run_of_grpo_even_if_grpo_is_cached(first, rejected):
    version = mlflow.MlflowClient().get_model_version("pipeline", str(rejected["model"]["version"]))
    assert (rejected["stages"]["grpo"]["cached"], version.run_id) == (True, mlflow_children(first)["grpo"])


def test_report_samples_and_progress_are_artifacts_of_the_run(first):
    found = artifacts_of(first["flow_run_id"])
    assert found["report"].startswith("## Passed: every gate says yes")
    assert found["samples"].startswith("# Samples")
    assert found["grpo"] == 100.0


def test_data_card_is_an_artifact_of_the_run_even_if_the_data_are_cached(first, second):
    cards = [artifacts_of(summary["flow_run_id"])["data-card"] for summary in (first, second[0])]
    assert [card.partition("\n")[0] for card in cards] == ["# Data set", "# Data set"]


def test_the_champion_is_measured_too_and_can_be_a_rival(first, stack, root):
    promotion.promote("pipeline", first["model"]["version"], runs.connect(TrackingSection()))
    gates = {**PASSING["gates"], "champion": {"metric": "accuracy", "rival": "champion"}}
    found = succeed(stack["project"], root, ("gates", gates))
    done = [name for name, stage in found["stages"].items() if not stage["cached"]]
    assert done == ["evaluate_champion", "judge", "register"]
    assert found["metrics"]["champion"]["accuracy"] == found["metrics"]["grpo"]["accuracy"]
    [gate] = [gate for gate in found["verdict"]["gates"] if gate["name"] == "champion"]
    assert (gate["outcome"], gate["limit"]) == ("inconclusive", "above champion by more than 0")
