"""The pipeline: data -> base -> SFT -> GRPO -> evaluation -> verdict -> registration."""

from typing import Any

from prefect import flow
from prefect.states import Completed, State

from configs.schema import RunConfig
from tasks.base import prepare_base
from tasks.champion import find_champion
from tasks.data import prepare_data
from tasks.evaluate import evaluate
from tasks.grpo import train_grpo
from tasks.judge import judge
from tasks.register import register
from tasks.report import publish_report
from tasks.runtime.pipeline_run import Stages, begin, configure, redo_damaged, tracked
from tasks.runtime.stage import Artifact, Run
from tasks.sft import train_sft


@flow(name="post-train")
def post_train(
    preset: str | None = None, config: RunConfig | None = None, overrides: dict[str, Any] | None = None
) -> State:
    """Takes a base model and a dataset to a judged, registered model version.

    Args:
        preset: Name of a shipped configuration (tiny, gsm8k-smollm2, gsm8k-qwen3-0.6b) or path of a YAML file.
            Without preset and config, tiny is run.
        config: A whole configuration instead of a preset.
        overrides: Values that replace those of the preset or config, such as {"grpo.max_steps": 40}.
    """
    cfg = configure(preset, config, overrides)
    run = begin(cfg)
    with tracked(run) as stages:
        verdict = redo_damaged(pipeline, run, cfg, stages)
        summary = publish_report(run, stages)
    passed = verdict.metrics["passed"]
    gates = verdict.metrics["verdict"]["gates"]
    sentences = [gate["sentence"] for gate in gates if passed or gate["outcome"] != "pass"]
    return Completed(name="Completed" if passed else "Rejected", message=" ".join(sentences), data=summary)


def pipeline(run: Run, cfg: RunConfig, stages: Stages) -> Artifact:
    """Runs the stages in their order and returns the verdict."""
    champion = find_champion(run, cfg.registry, cfg.gates)
    data = stages.add(prepare_data(run, cfg.data, cfg.grpo, cfg.seed))
    base = stages.add(prepare_base(run, cfg.model, cfg.seed, data))
    measured = (cfg.evaluation, cfg.grpo, cfg.model, cfg.compute, cfg.seed, cfg.data, data)
    base_scores = stages.add(evaluate(run, "base", *measured, policy=base))
    sft = stages.add(train_sft(run, cfg.sft, cfg.grpo, cfg.model, cfg.compute, cfg.seed, base, data))
    sft_scores = stages.add(evaluate(run, "sft", *measured, policy=sft, reference=base))
    grpo = stages.add(train_grpo(run, cfg.grpo, cfg.model, cfg.compute, cfg.seed, sft, data))
    grpo_scores = stages.add(evaluate(run, "grpo", *measured, policy=grpo, reference=sft))
    champion_scores = champion and stages.add(evaluate(run, "champion", *measured, policy=champion))
    verdict = stages.add(judge(run, cfg.gates, base_scores, sft_scores, grpo_scores, champion_scores))
    stages.add(register(run, cfg.registry, grpo, grpo_scores, verdict))
    return verdict
